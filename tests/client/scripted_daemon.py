"""A daemon that says what a test tells it to: a ROUTER in a thread, one answer per operation.

with ScriptedDaemon(endpoint) as daemon:
    daemon.on("match", {"lease": 0, ...})        # the fields of a reply
    daemon.on("match", refuse("expired"))        # an error reply
    daemon.on("match", b"garbage")               # raw bytes
    daemon.on("match", HOLD)                     # no answer; daemon.answer(request, …) later
    daemon.on("match", DIE)                      # close the socket instead
    daemon.on("fetch", Many([...], parts))       # progress, then the final reply
    daemon.on("put", function_of_the_request)    # any of these, decided then
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import msgspec
import zmq

from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.protocol.messages import error_reply, pack, unpack
from hicache.protocol.operations import Request, decode_request, operation_of

HOLD: Final = object()
DIE: Final = object()
SPEC: Final = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(2, 1, 4, "any"),),
    block_tokens=4,
    block_bytes=64,
)
"""Of a client that talks to it, if nothing else is said."""
_SESSION: Final = bytes(range(16))


@dataclass(frozen=True)
class Many:
    """Several replies to one request, each with the parts that go with it. With `then=HOLD` the
    last of them is not the final one either."""

    replies: list[tuple[dict[str, Any], list[bytes]]]
    then: object = None


@dataclass(frozen=True)
class Refusal:
    code: str


@dataclass
class Seen:
    """A request as it came, and who sent it."""

    request: Request
    parts: list[bytes]
    peer: bytes = field(repr=False)

    @property
    def op(self) -> str:
        return operation_of(self.request).name

    @property
    def body(self) -> dict[str, Any]:
        """The fields of the operation alone."""
        fields = {name: getattr(self.request, name) for name in operation_of(self.request).fields}
        raw = (name for name, value in fields.items() if isinstance(value, msgspec.Raw))
        return fields | {name: unpack(bytes(fields[name])) for name in raw}


Script = Callable[[Seen], Any] | Any


def refuse(code: str) -> Refusal:
    return Refusal(code)


def greeting(**changed: Any) -> dict[str, Any]:
    """A hello's reply: frames, four tokens and 64 bytes a block."""
    fields = {
        "session": _SESSION,
        "group": _SESSION,
        "epoch": "e1",
        "version": "0",
        "pid": 1,
        "namespace": bytes(32),
        "block_tokens": 4,
        "block_bytes": 64,
        "slot_bytes": 4096,
        "transport": "frames",
        "arenas": [],
        "lease_ttl_s": 30.0,
        "heartbeat_s": 10.0,
        "max_message_bytes": 1 << 20,
        "max_prompt_tokens": 1 << 20,
        "capabilities": [],
    }
    return {**fields, **changed}


def hit(blocks: int, lease: int = 1) -> dict[str, Any]:
    """A match's reply: `blocks` blocks in dram, all to be reloaded."""
    decision = {
        "name": "reload" if blocks else "recompute",
        "reload_blocks": blocks,
        "reason": "cheaper",
        "sentence": "because the test says so",
        "reload_s": 0.001,
        "prefill_s": 0.0,
        "recompute_s": 0.1,
    }
    runs = [["dram", blocks]] if blocks else []
    return {
        "lease": lease if blocks else 0,
        "hit_blocks": blocks,
        "runs": runs,
        "decision": decision,
    }


class ScriptedDaemon(threading.Thread):
    """Records every request; `hello`, `bye` and `release` are answered unless told otherwise."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="scripted-daemon", daemon=True)
        self.endpoint = endpoint
        self.seen: list[Seen] = []
        self._scripts: dict[str, Script] = {
            "hello": greeting(),
            "bye": {},
            "release": {"released": True},
            "observe": {},
            "hint": {"known": True},
            "abort": {"aborted": 0},
        }
        self._orders: queue.SimpleQueue[tuple[bytes, list[bytes]] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def on(self, op: str, script: Script) -> None:
        self._scripts[op] = script

    def ops(self) -> list[str]:
        with self._news:
            return [seen.op for seen in self.seen]

    def wait_for(self, op: str, count: int = 1) -> Seen:
        """The count-th request of this kind."""
        with self._news:
            assert self._news.wait_for(lambda: len(self._those(op)) >= count, 10), self.seen
            return self._those(op)[count - 1]

    def answer(self, seen: Seen, fields: dict[str, Any]) -> None:
        """Answer a held request after all."""
        self._orders.put((seen.peer, [pack({"id": seen.request.id, "ok": True, **fields})]))

    def stop(self) -> None:
        self._orders.put(None)
        self.join(10)

    def run(self) -> None:
        try:
            while self._obey_orders():
                if self._socket.poll(2):
                    peer, head, *parts = self._socket.recv_multipart()
                    seen = Seen(decode_request(head), parts, peer)
                    with self._news:
                        self.seen.append(seen)
                        self._news.notify_all()
                    if not self._play(seen):
                        return
        finally:
            self._socket.close(0)
            self._context.term()

    def _those(self, op: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.op == op]

    def _obey_orders(self) -> bool:
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            self._socket.send_multipart([order[0], *order[1]])
        return True

    def _play(self, seen: Seen) -> bool:
        script = self._scripts[seen.op]
        if callable(script):
            script = script(seen)
        head = {"id": seen.request.id, "ok": True}
        match script:
            case _ if script is DIE:
                return False
            case _ if script is HOLD:
                pass
            case Refusal(code):
                self._send(seen, pack(error_reply(seen.request.id, code)))
            case bytes():
                self._send(seen, script)
            case Many(replies, then):
                for number, (fields, parts) in enumerate(replies, 1):
                    more = {"more": True} if number < len(replies) or then is HOLD else {}
                    self._send(seen, pack({**head, **fields, **more}), parts)
            case _:
                self._send(seen, pack({**head, **script}))
        return True

    def _send(self, seen: Seen, head: bytes, parts: list[bytes] | None = None) -> None:
        self._socket.send_multipart([seen.peer, head, *(parts or [])])

    def __enter__(self) -> ScriptedDaemon:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
