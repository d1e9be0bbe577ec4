"""Ranges and mappings, with a driver of our own that says where an allocation begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.transfer.gpu_pages.cuda_ipc import Mappings, NotShareable, SharedRange, share
from tests.shared_library import compiled

# The signature is that of cuda.h. One allocation: 1000 bytes at 5000.
DRIVER = r"""
#include <stddef.h>
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long at) {
    if (at < 5000 || at >= 6000) return 1;
    *base = 5000; *size = 1000;
    return 0;
}
"""


class CudaError(RuntimeError):
    pass


class Fake:
    """CuPy's three calls. `open` counts what is mapped."""

    def __init__(self, refuse: bool = False) -> None:
        self.open: dict[int, bytes] = {}
        self.refuse = refuse
        runtime: Any = SimpleNamespace(
            CUDARuntimeError=CudaError,
            ipcGetMemHandle=self._get,
            ipcOpenMemHandle=self._open,
            ipcCloseMemHandle=self.open.pop,
        )
        self.cuda = SimpleNamespace(runtime=runtime)

    def _get(self, base: int) -> bytes:
        if self.refuse:
            raise CudaError("cudaErrorInvalidValue")
        return base.to_bytes(64, "little")

    def _open(self, handle: bytes) -> int:
        assert handle not in self.open.values(), "mapped twice"
        if self.refuse:
            raise CudaError("cudaErrorMapBufferObjectFailed")
        self.open[(len(self.open) + 1) << 20] = handle
        return len(self.open) << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compiled(DRIVER, tmp_path_factory.mktemp("driver") / "libcuda.so"))


def test_a_tensor_is_an_allocation_and_an_offset(driver: str) -> None:
    shared = share(Fake(), 5300, 700, driver)
    assert (shared.offset, shared.num_bytes) == (300, 700)
    assert int.from_bytes(shared.handle, "little") == 5000


def test_what_cannot_be_shared_is_a_sentence(driver: str, tmp_path: Path) -> None:
    with pytest.raises(NotShareable, match="no allocation at this address"):
        share(Fake(), 7000, 1, driver)
    with pytest.raises(NotShareable, match="701 bytes reach beyond"):
        share(Fake(), 5300, 701, driver)
    with pytest.raises(NotShareable, match="does not share this memory: cudaErrorInvalidValue"):
        share(Fake(refuse=True), 5300, 1, driver)
    with pytest.raises(NotShareable, match="cannot open"):
        share(Fake(), 5300, 1, str(tmp_path / "none.so"))


def test_an_allocation_is_mapped_once_and_let_go_once() -> None:
    cupy = Fake()
    mappings = Mappings(cupy)
    first = mappings.address(SharedRange(b"a", 0, 10))
    assert mappings.address(SharedRange(b"a", 512, 10)) == first + 512
    assert mappings.address(SharedRange(b"b", 0, 10)) != first
    assert sorted(cupy.open.values()) == [b"a", b"b"]
    mappings.close()
    mappings.close()
    assert cupy.open == {}
    with pytest.raises(NotShareable, match="does not map this memory"):
        Mappings(Fake(refuse=True)).address(SharedRange(b"a", 0, 10))
