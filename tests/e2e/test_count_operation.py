"""An operation that exists only in the tests, 3 of 3: its client method, and the whole.

Three declarations are all it needs: docs/adding.md shows these files as its worked example.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hicache.client import AsyncClient, Client
from hicache.client.calls import Calls
from hicache.client.replies import read_reply
from hicache.client.steps import Steps, operation
from hicache.protocol.messages import PROTOCOL, Tokens, encode_tokens
from tests.e2e.count_operation import CountReply, CountRequest
from tests.e2e.daemon_process import SPEC, DaemonProcess, prompt, store

pytestmark = pytest.mark.e2e


class CountCalls(Calls):
    @operation
    def count(self, tokens: Tokens, note: str = "") -> Steps[CountReply | None]:
        """How many blocks of this prompt are held; None where the daemon does not say."""
        wanted = CountRequest(tokens=encode_tokens(tokens), note=note)
        return (yield from self._ask(wanted, lambda reply: read_reply(reply, CountReply)))


class CountingClient(Client, CountCalls):
    pass


class AsyncCountingClient(AsyncClient, CountCalls):
    pass


def answer_of(reply: CountReply | None) -> tuple[int, str]:
    assert reply is not None
    return reply.blocks, reply.note


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(hbm=None, disk=None, module="tests.e2e.counting_daemon") as running:
        yield running


def test_both_clients_call_it(daemon: DaemonProcess) -> None:
    tokens = prompt(1, 6)
    with CountingClient(SPEC, daemon.endpoint, timeout_s=10.0) as client:
        assert store(client, tokens) == 6
        assert answer_of(client.count(tokens, "hello")) == (6, "hello")
        assert answer_of(client.count(prompt(2, 3))) == (0, "")

    async def main() -> CountReply | None:
        async with AsyncCountingClient(SPEC, daemon.endpoint, timeout_s=10.0) as other:
            return await other.count(tokens[:12], "later")

    assert answer_of(asyncio.run(main())) == (3, "later")
    assert daemon.stats()["requests"]["count"] == 3


def test_it_is_checked_and_listed_like_every_operation(daemon: DaemonProcess) -> None:
    peer = daemon.peer()
    reply = peer.hello(protocol=PROTOCOL)
    assert "count" in reply["capabilities"]
    session = reply["session"]
    late = {"sent_s": time.monotonic() - 5.0, "deadline_s": 1.0}
    wrong = [
        ({}, "unknown_session", "count needs a session"),
        ({"s": session}, "malformed", "missing required field `tokens`"),
        ({"s": session, "tokens": b"123"}, "malformed", "tokens: length 3"),
        ({"s": session, "tokens": b"", "note": 7}, "malformed", "note: Expected `str`, got `int`"),
        ({"s": session, "tokens": b"", **late}, "expired", "after it was sent"),
    ]
    for fields, code, words in wrong:
        answer = peer.ask("count", **fields)
        assert answer["error"] == code
        assert words in answer["message"]


def test_a_daemon_without_it_refuses_it(server: DaemonProcess) -> None:
    """The client's caller gets no answer, and the client goes on."""
    with CountingClient(SPEC, server.endpoint, timeout_s=10.0) as client:
        assert client.count(np.arange(8, dtype="<u4")) is None
        assert "'count' is no operation of protocol 1" in client.last_error
        assert not client.match(prompt(1, 2)).hit_blocks
        assert client.connected
