"""The client's core driven by hand: a test reads each step, and decides what comes back and when.

core = ByHand()
call = core.begin(core.client.match(TOKENS))
call.sent("hello")                      # the step is a Send of this request, which is returned
call.reply(greeting())                  # feed its reply and go on
core.now_s += 2.0                       # time passes only like this
call.go_on()                            # a Wait that nothing has come for
call.result                             # what the call returned
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hicache.client.calls import DaemonCalls, PromptCalls
from hicache.client.gpu_pages import PageCalls
from hicache.client.session import Connection, Timeouts, Transport
from hicache.client.steps import Give, Send, Step, Wait
from hicache.protocol.messages import pack
from hicache.protocol.operations import Request, decode_request, operation_of
from tests.client.scripted_daemon import SPEC, greeting

ENDPOINT = "ipc:///nowhere"
TOKENS = list(range(16))


class Core(PromptCalls, PageCalls, DaemonCalls):
    """The calls as generators."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @staticmethod
    def call_of(steps: Any) -> Any:
        return steps

    stream_of = call_of


class ByHand:
    """One core, its clock, and the requests that it has sent."""

    def __init__(self, transport: Transport = "auto", call_s: float = 1.0) -> None:
        self.now_s = 100.0
        self.connection = Connection(
            SPEC, ENDPOINT, Timeouts(call_s, 5.0, 5.0), lambda: self.now_s, transport=transport
        )
        self.client: Any = Core(self.connection)
        self.requests: list[Request] = []

    def begin(self, steps: Generator[Any, Any, Any]) -> Call:
        return Call(self, steps)

    def greeted(self, **changed: Any) -> None:
        """Open a session."""
        call = self.begin(self.client.heartbeat())
        call.sent("hello")
        call.reply(greeting(**changed))
        call.sent("heartbeat")
        call.reply({})
        assert call.result is True

    def feed(self, request: Request, fields: dict[str, Any], *parts: bytes) -> str:
        """A reply from the connection."""
        return self.connection.feed([pack({"id": request.id, "ok": True, **fields}), *parts])

    def refuse(self, request: Request, code: str) -> None:
        fields = {"id": request.id, "ok": False, "error": code, "message": "a sentence"}
        self.connection.feed([pack(fields)])


class Call:
    """One call under way: `step` is what it wants, or None when it has ended with `result`."""

    def __init__(self, core: ByHand, steps: Generator[Any, Any, Any]) -> None:
        self._core = core
        self._steps = steps
        self.step: Step | Give[Any] | None = None
        self.result: Any = None
        self.request: Request | None = None
        self.go_on()

    def go_on(self, result: Any = None) -> None:
        """Send the result of a step."""
        self._advance(lambda: self._steps.send(result))

    def fail(self, error: BaseException) -> None:
        """Raise in the call what the driver has run into."""
        self._advance(lambda: self._steps.throw(error))

    def sent(self, op: str) -> Any:
        """The step is to send this request; it is sent, and the call goes on."""
        assert isinstance(self.step, Send), self.step
        self.request = request = decode_request(self.step.frames[0])
        assert operation_of(request).name == op
        self._core.requests.append(request)
        self.go_on()
        return request

    def reply(self, fields: dict[str, Any], *parts: bytes) -> None:
        """Feed the reply to the last request that was sent, and go on."""
        assert isinstance(self.step, Wait), self.step
        assert self.request is not None
        assert self._core.feed(self.request, fields, *parts) == ""
        self.go_on()

    def refuse(self, code: str) -> None:
        assert isinstance(self.step, Wait), self.step
        assert self.request is not None
        self._core.refuse(self.request, code)
        self.go_on()

    def _advance(self, how: Any) -> None:
        try:
            self.step = how()
        except StopIteration as stop:
            self.step, self.result = None, stop.value
