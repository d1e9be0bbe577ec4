"""What the daemon keeps for its clients stays small: requests in, replies out, no socket."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.engine.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.keys import LayerGroup, NamespaceSpec
from hicache.service import Asked, Part, Service
from hicache.session import MAX_REMEMBERED_MATCHES, Session, Sessions
from hicache.tiers.arena import Arena
from hicache.waiting import Peer
from hicache.wire import MatchReply, decode_reply, decode_request, pack
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, ONE_TIER, World

SPEC = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(1, 1, 1, "layer"),),
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
)


class Desk:
    """A Service over a scripted engine with one tier in memory."""

    def __init__(self, folder: Path) -> None:
        settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
        self.world = World(ONE_TIER, settings)
        self.arena = Arena.create(folder / "arena", 8 * BLOCK_BYTES)
        self.sent: list[tuple[dict[str, Any], Sequence[Part]]] = []
        self.service = Service(
            self.world.engine,
            Sessions(8, 30.0),
            {"dram": self.arena},
            "epoch",
            1,
            DeadlinesConfig(),
            LimitsConfig(),
            self._send,
            lambda plan: None,
            lambda spec: None,
        )
        self._ids = itertools.count(1)

    def _send(
        self, peer: Peer, message: Mapping[str, Any] | MatchReply, parts: Sequence[Part] = ()
    ) -> None:
        self.sent.append((decode_reply(pack(message)), parts))

    def ask(self, op: str, parts: Sequence[Part] = (), **fields: Any) -> dict[str, Any]:
        """The last reply to one request."""
        request = decode_request(pack({"op": op, "id": next(self._ids), **fields}))
        self.service.handle(Asked(Peer(b"peer", request.id), request, parts, 0, self.world.now_s))
        self.world.engine.catch_up()
        return self.sent[-1][0]

    def hello(self, transport: str = "frames") -> Session:
        spec = SPEC.to_wire()
        reply = self.ask("hello", protocol=1, client="", spec=spec, transport=transport)
        return self.service.sessions.by_token[reply["session"]]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def store(desk: Desk, session: Session, tokens: bytes, num_blocks: int) -> None:
    placed = desk.ask("put", s=session.token, tokens=tokens, last=num_blocks)
    blocks = [bytes(BLOCK_BYTES)] * num_blocks
    commit = {"ticket": placed["ticket"], "indices": placed["indices"]}
    assert desk.ask("commit", blocks, s=session.token, **commit)["committed"] == num_blocks


def test_a_match_remembered_takes_little_room(desk: Desk) -> None:
    """Each request id kept its whole prompt, half a megabyte, and 4,096 of them."""
    session = desk.hello()
    tokens = np.arange(32_768, dtype="<u4")
    store(desk, session, tokens.tobytes(), 4)
    for number in range(MAX_REMEMBERED_MATCHES + 8):
        tokens[-1] = number
        asked: dict[str, Any] = {
            "s": session.token,
            "tokens": tokens.tobytes(),
            "request": f"request {number}",
        }
        lease = desk.ask("match", **asked)["lease"]
        assert lease
        assert desk.ask("match", **asked)["lease"] == lease
        asked["tokens"] = asked["tokens"][:-4]
        assert desk.ask("match", **asked)["lease"] != lease
        desk.sent.clear()
    assert len(session.matches) == MAX_REMEMBERED_MATCHES
    assert len(pickle.dumps(session.matches)) < 1000 * MAX_REMEMBERED_MATCHES
