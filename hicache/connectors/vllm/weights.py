"""A digest of the weights of a model or an adapter, from its files, wherever they are.

The scheduler's and the workers' processes read the same files. The path does not count: the same
model under another path has the same digest, a fine-tune of the same shapes has another. A few KiB
of every tensor are read, so large models cost milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from hicache.protocol.keys import KEY_BYTES, digest_weights, sample_bytes

_PLAIN_FILES: Final = ("*.gguf", "*.bin", "*.pt", "*.pth")
_STRETCH_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 1 << 28


class _FileRegion:
    """A part of a file, in the form of an array for `sample_bytes`. Only requested slices are
    read."""

    def __init__(self, file: int, start: int, num_bytes: int) -> None:
        self._file, self._start, self.nbytes = file, start, num_bytes

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        start, stop, _ = part.indices(self.nbytes)
        return np.frombuffer(os.pread(self._file, stop - start, self._start + start), np.uint8)

    def tobytes(self) -> bytes:
        return self[:].tobytes()


def digest_files(path: Path) -> str:
    """Of a folder of safetensors (or other weight files), or of one file.

    Raises ValueError with a sentence if there are no weight files.
    """
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for file in _weight_files(path):
        read = _tensors if file.suffix == ".safetensors" else _stretches
        tensors.extend(read(file))
    return digest_weights(tensors)


def digest_adapter(path: Path) -> str:
    """Of a LoRA adapter's folder: its weights, and its config, which scales them."""
    digest = hashlib.blake2b(digest_files(path).encode(), digest_size=KEY_BYTES)
    config = path / "adapter_config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for pattern in ("*.safetensors", *_PLAIN_FILES):
        files = sorted(path.glob(pattern))
        if files:
            return files
    raise ValueError(f"{path} has no weights to tell this model from another of the same shape")


def _tensors(file: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Name, number type, shape and sample of every tensor of a safetensors file."""
    with file.open("rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, Any] = json.loads(handle.read(header_bytes))
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            first, last = fields["data_offsets"]
            region = _FileRegion(handle.fileno(), 8 + header_bytes + first, last - first)
            sample = sample_bytes(cast(Any, region)) if last > first else b""
            yield name, fields["dtype"], tuple(fields["shape"]), sample


def _stretches(file: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Of a file whose tensors are not known: a sample of every MiB."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        for start in range(0, size, _STRETCH_BYTES):
            region = _FileRegion(handle.fileno(), start, min(_STRETCH_BYTES, size - start))
            yield f"{start}", "bytes", (size,), sample_bytes(cast(Any, region))
