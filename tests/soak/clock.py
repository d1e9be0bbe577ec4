"""The wall clock of a soak's daemon and workers, with an offset from a file.

The environment variable `CLOCK` names the file, which has the seconds to add. Deadlines use the
monotonic clock, which no operator can set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

CLOCK: Final = "HICACHE_TEST_CLOCK"


def install() -> None:
    """Replace time.time in this process."""
    real, file = time.time, Path(os.environ[CLOCK])

    def jumped() -> float:
        try:
            return real() + float(file.read_text())
        except (OSError, ValueError):  # it is being written
            return real()

    time.time = jumped
