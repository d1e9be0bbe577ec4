"""The memory available before the kernel's OOM killer acts: of the host, and of this process's
control groups.

Not computed from processes' memory (RSS), which includes pages of the disk tier's mapped file that
the kernel can free at any time. Instead: the kernel's MemAvailable, and for each control group with
a limit (this process's and its ancestors), the limit less the used memory without file pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Headroom:
    """`available_bytes` of `total_bytes`, of the host or of a control group, named by `of`."""

    of: str
    available_bytes: int
    total_bytes: int


def look(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Headroom]:
    """The host's, then those of the control groups with a limit. Unreadable ones are left out."""
    found = [_of_host(proc), *_of_groups(proc, cgroups)]
    return [headroom for headroom in found if headroom is not None]


def _of_host(proc: Path) -> Headroom | None:
    fields = _fields(proc / "meminfo")
    available, total = fields.get("MemAvailable:"), fields.get("MemTotal:")
    if available is None or total is None:
        return None
    return Headroom("the host", available << 10, total << 10)


def _of_groups(proc: Path, cgroups: Path) -> Iterator[Headroom | None]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from (_of_v2(folder) for folder in _up(cgroups, path))
            yield from (_of_v2(folder) for folder in _up(cgroups / "unified", path))
        elif "memory" in controllers.split(","):
            yield from (_of_v1(folder) for folder in _up(cgroups / "memory", path))


def _up(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and its ancestors, as far as they exist: in a container the group's folder
    is often mounted as the root."""
    folder = root / path.lstrip("/")
    while folder != root:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    if root.is_dir():
        yield root


def _of_v2(folder: Path) -> Headroom | None:
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    limit = min([limit for limit in limits if limit is not None], default=None)
    stat = _fields(folder / "memory.stat")
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return _headroom(folder, limit, _number(folder / "memory.current"), reclaimable)


def _of_v1(folder: Path) -> Headroom | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is not None and limit >= _V1_NO_LIMIT:
        return None
    stat = _fields(folder / "memory.stat")
    reclaimable = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return _headroom(folder, limit, _number(folder / "memory.usage_in_bytes"), reclaimable)


def _headroom(
    folder: Path, limit: int | None, used: int | None, reclaimable: int
) -> Headroom | None:
    if limit is None or used is None:
        return None
    return Headroom(f"the control group {folder}", max(0, limit - used + reclaimable), limit)


def _number(file: Path) -> int | None:
    """The file's number; None where it is missing, or `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _fields(file: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
