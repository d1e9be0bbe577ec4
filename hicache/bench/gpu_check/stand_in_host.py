"""Processes whose GPU is the stand-in: a CuPy and a driver for a daemon and its worker. For dry
runs; tests have their own CuPy, whose copies can be held and refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hicache.bench.gpu_check.cpu_kernels import NoCompiler

# A copy takes longer than a kernel that the CPU runs.
_CUPY: Final = """from hicache.bench.gpu_check.stand_in import StandIn
__version__ = "stand-in"
_device = StandIn(copy_s=1e-4)
cuda, RawModule = _device.cuda, _device.RawModule
"""
# The signatures are those of cuda.h. An allocation is what the kernel has mapped in one piece.
DRIVER: Final = r"""
#include <stdio.h>
#include <stddef.h>
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long at) {
    unsigned long start, end;
    char line[4096];
    int status = 1;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (status && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= at && at < end) {
            *base = start; *size = end - start; status = 0;
        }
    fclose(maps);
    return status;
}
int cuGetProcAddress_v2(const char *n, void **f, int v, unsigned long long x, int *s) { return 1; }
"""


@contextmanager
def stand_in_host(folder: Path) -> Iterator[str]:
    """In effect for every process started inside the `with`. Yields the driver's library for this
    process. Raises NoCompiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompiler("no C compiler here: install cc")
    place = folder / "stand-in"
    place.mkdir(exist_ok=True)
    (place / "cupy.py").write_text(_CUPY)
    library = place / "libcuda.so.1"
    source = place / "driver.c"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    for name, old in before.items():
        os.environ[name] = os.pathsep.join(filter(None, [str(place), old]))
    try:
        yield str(library)
    finally:
        for name, old in before.items():
            del os.environ[name]
            if old is not None:
                os.environ[name] = old
