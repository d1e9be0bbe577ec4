"""Real system calls that fail: the n-th write, read, sync or open of files under one folder.

LMDB and Python call libc through their tables of imported addresses (ELF jump slots); `Faults`
puts a function of its own there, which counts and either passes the call on or fails it with
an errno. So the real LMDB meets a real error code where a real device would give it one, without a
mock, a compiler or a privilege. For one process, and Linux on x86-64 or arm64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["write", "read", "sync", "open"]

CALLS: Final[dict[Kind, tuple[str, ...]]] = {
    "write": (
        *("write", "pwrite", "pwrite64", "writev", "pwritev", "pwritev64"),
        *("ftruncate", "ftruncate64"),
    ),
    "read": ("read", "pread", "pread64", "preadv", "preadv64", "preadv2", "preadv64v2"),
    "sync": ("fsync", "fdatasync", "msync"),
    "open": ("open", "open64", "openat", "openat64"),
}
_KIND_OF: Final = {name: kind for kind, names in CALLS.items() for name in names}
_Call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 6, use_errno=True)
_JUMP_SLOTS: Final = {6, 7, 1025, 1026}  # GLOB_DAT and JUMP_SLOT of x86-64 and of arm64
_PROT_READ, _PROT_WRITE = 1, 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL, _PLTRELSZ = 5, 6, 7, 8, 23, 2


class Faults:
    """Counts the calls on files under `folder`; with `fail_at`, fails one of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._kind: Kind = "write"
        self._left = 0
        self._errno = 0
        self._for_good = False
        self.has_failed = False
        self._kept: list[Any] = []  # what the tables point to must not be collected
        self._originals: list[tuple[Any, int]] = []
        for path, base in _objects():
            for name, slot in _imports(path, base):
                if name in _KIND_OF:
                    self._patch(name, slot)

    def close(self) -> None:
        """Every call goes straight to libc again."""
        for slot, address in self._originals:
            slot.value = address
        self._originals.clear()

    @contextmanager
    def fail_at(
        self, kind: Kind, nth: int, error: int = errno.EIO, *, for_good: bool = False
    ) -> Iterator[None]:
        """The n-th call of this kind from here on fails, and all after it if it is `for_good`;
        `has_failed` says whether it came."""
        self._kind, self._left, self._errno, self.has_failed = kind, nth, error, False
        self._for_good = for_good
        try:
            yield
        finally:
            self._left = 0

    def _patch(self, name: str, slot: int) -> None:
        original = ctypes.c_long.from_address(slot)
        real = _Call(original.value)
        self._originals.append((original, original.value))

        def call(*arguments: int) -> int:
            if self._left and _KIND_OF[name] == self._kind and self._concerns(name, arguments):
                self._left -= 1
                if not self._left:
                    self._left = int(self._for_good)
                    self.has_failed = True
                    ctypes.set_errno(self._errno)
                    return -1
            return int(real(*arguments))

        ours = _Call(call)
        self._kept += [ours, real]
        _make_writable(slot)
        original.value = ctypes.cast(ours, ctypes.c_void_p).value or 0

    def _concerns(self, name: str, arguments: tuple[int, ...]) -> bool:
        if name == "msync":
            return True
        if _KIND_OF[name] == "open":
            path = ctypes.string_at(arguments[name.startswith("openat")]).decode()
        else:
            try:
                path = os.readlink(f"/proc/self/fd/{arguments[0]}")
            except OSError:
                return False
        return path.startswith(self._folder)


def _objects() -> Iterator[tuple[str, int]]:
    """LMDB's and Python's own loaded objects, and where they begin."""
    seen = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[2] == "00000000" and fields[5] not in seen:
            path = fields[5]
            name = os.path.basename(path)
            is_lmdb = "lmdb" in path and name.startswith("cpython")
            if is_lmdb or name.startswith(("python3", "libpython3")):
                seen.add(path)
                yield path, int(fields[0].split("-")[0], 16)


def _imports(path: str, base: int) -> Iterator[tuple[str, int]]:
    """(function, address of its slot) of everything that an object imports."""
    header = Path(path).read_bytes()[:4096]
    (kind,) = struct.unpack_from("<H", header, 16)
    start, count = struct.unpack_from("<Q", header, 32)[0], struct.unpack_from("<H", header, 56)[0]
    base = base if kind == 3 else 0  # a program that is not position-independent lies where it says
    tags: dict[int, int] = {}
    for number in range(count):
        at = start + 56 * number
        if struct.unpack_from("<I", header, at)[0] == 2:  # PT_DYNAMIC
            address = base + struct.unpack_from("<Q", header, at + 16)[0]
            while (tag := ctypes.c_long.from_address(address).value) != 0:
                tags[tag] = ctypes.c_ulong.from_address(address + 8).value
                address += 16

    def where(tag: int) -> int:
        return tags[tag] + (base if tags[tag] < base else 0)

    for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
        if table not in tags:
            continue
        rows = ctypes.string_at(where(table), tags[size])
        for slot, info, _ in struct.iter_unpack("<QQq", rows):
            if info & 0xFFFFFFFF in _JUMP_SLOTS:
                symbol = ctypes.string_at(where(_SYMTAB) + 24 * (info >> 32), 4)
                name = ctypes.string_at(where(_STRTAB) + struct.unpack("<I", symbol)[0])
                yield name.decode(), base + slot


def _make_writable(address: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    start = ctypes.c_void_p(address // page * page)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(start, ctypes.c_size_t(page), _PROT_READ | _PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
