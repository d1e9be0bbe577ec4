"""Makes a machine look as if it had one GPU, as far as the daemon looks (`pick_device`)."""

from pathlib import Path
from typing import Any

_exists = Path.exists


def _or_gpu(path: Path, **more: Any) -> bool:
    return str(path) == "/dev/nvidia0" or _exists(path, **more)


Path.exists = _or_gpu  # type: ignore[method-assign, assignment]
