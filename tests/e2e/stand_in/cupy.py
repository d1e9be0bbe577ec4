"""CuPy's place on the path of a daemon under test: GPU memory that is host memory.

While the file named by STAND_IN_GATE is there, copies that somebody waits for get half-way and no
further.
"""

import os
import time
from pathlib import Path
from typing import Any

from hicache.bench.gpu.stand_in import StandIn

GATE = os.environ.get("STAND_IN_GATE", "")


class _Held:
    """An event that waits for the gate in the middle of its copies."""

    def __init__(self, event: Any, device: StandIn) -> None:
        self._event, self._device = event, device
        self.record = event.record

    def synchronize(self) -> None:
        if Path(GATE).exists():
            stream = self._event._stream
            self._device.do(stream, len(stream.waiting) // 2)
            while Path(GATE).exists():
                time.sleep(0.005)
        self._event.synchronize()


def _device() -> StandIn:
    device = StandIn()
    if GATE:
        make = device.cuda.Event
        device.cuda.Event = lambda **more: _Held(make(**more), device)
    return device


__version__ = "stand-in"
cuda = _device().cuda
