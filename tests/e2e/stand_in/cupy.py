"""CuPy's place on the path of a daemon under test: GPU memory that is host memory.

While the file named by STAND_IN_GATE is locked (flock), copies that somebody waits for get half-way
and no further. Each copy takes STAND_IN_COPY_S seconds beside its bytes. While the file named by
STAND_IN_NO_LAUNCH is there, kernels are refused.
"""

import fcntl
import os
from pathlib import Path
from typing import Any

from hicache.bench.gpu_check.stand_in import INVALID_VALUE, StandIn, StandInError

GATE = Path(os.environ.get("STAND_IN_GATE", ""))


NO_LAUNCH = Path(os.environ.get("STAND_IN_NO_LAUNCH", "/none"))


class _Device(StandIn):
    def _launch(self, name: str, *more: Any) -> None:
        if NO_LAUNCH.exists():
            raise StandInError(INVALID_VALUE)
        super()._launch(name, *more)


class _Held:
    """An event that waits for the gate in the middle of its copies."""

    def __init__(self, event: Any, device: StandIn) -> None:
        self._event, self._device = event, device
        self.record = event.record

    @property
    def done(self) -> bool:
        return bool(self._event.done)

    def synchronize(self) -> None:
        with GATE.open() as gate:
            try:
                fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                stream = self._event._stream
                self._device.do(stream, len(stream.waiting) // 2)
                fcntl.flock(gate, fcntl.LOCK_SH)
        self._event.synchronize()


def _device() -> StandIn:
    device = _Device(copy_s=float(os.environ.get("STAND_IN_COPY_S", "0")))
    if GATE.is_file():
        make = device.cuda.Event
        device.cuda.Event = lambda **more: _Held(make(**more), device)
    return device


__version__ = "stand-in"
_stand_in = _device()
cuda, RawModule = _stand_in.cuda, _stand_in.RawModule
