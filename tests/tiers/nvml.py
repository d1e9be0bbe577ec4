"""A management library that says 1000 MiB are in use, and from then on 1518."""

from __future__ import annotations

from pathlib import Path

from tests.shared_library import compiled

# The signatures are those of nvml.h.
SOURCE = r"""
#include <string.h>
static unsigned long long asked;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = &asked;
    return strcmp(bus, "0000:99:00.0") ? 0 : 6;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 80ull << 30;
    memory[2] = (asked++ ? 1518ull : 1000ull) << 20;
    memory[1] = memory[0] - memory[2];
    return device == &asked ? 0 : 2;
}
"""


def build(folder: Path) -> str:
    """Compiled into this folder, under the name that is looked for; skips without a compiler."""
    return str(compiled(SOURCE, folder / "libnvidia-ml.so.1"))
