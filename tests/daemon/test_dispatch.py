"""What the daemon keeps for its clients stays small: requests in, replies out, no socket."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.config import DeadlinesConfig, LimitsConfig
from hicache.daemon.dispatch import Service
from hicache.daemon.gate import Asked, Gate
from hicache.daemon.operations.conversations import Conversations
from hicache.daemon.operations.fetch import send_more
from hicache.daemon.pending import Part, Peer
from hicache.daemon.sessions import MAX_REMEMBERED_MATCHES, Session, Sessions
from hicache.engine import plan as p
from hicache.engine.planner.planner import PlannerSettings
from hicache.engine.settings import EngineSettings
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.protocol.messages import WireError, decode_reply, pack
from hicache.protocol.operations import Reply, decode_request
from hicache.tiers.arena import Arena
from hicache.tiers.block import TierTraits
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS, ONE_TIER, World

SPEC = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(1, 1, 1, "layer"),),
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
)
PROMPT = np.arange(6 * BLOCK_TOKENS + 1, dtype="<u4").tobytes()


@dataclass
class Sent:
    """One message, and whether ZeroMQ has let go of it."""

    message: dict[str, Any]
    parts: list[bytes]
    done: bool = False


class Desk:
    """A Service over a scripted engine with one tier in memory, or what else is said. Moves end
    when the test says so."""

    def __init__(
        self, folder: Path, tiers: Sequence[tuple[str, int, TierTraits]] = ONE_TIER
    ) -> None:
        settings = EngineSettings(planner=PlannerSettings(mode="always_reload"))
        self.world = World(tiers, settings)
        self.arena = Arena.create(folder / "arena", 8 * BLOCK_BYTES)
        self.sent: list[Sent] = []
        self.gate = Gate(
            self.world.engine,
            Sessions(8, 30.0),
            {"dram": self.arena},
            "epoch",
            DeadlinesConfig(),
            LimitsConfig(),
            self,
        )
        self.service = Service(self.gate)
        self._ids = itertools.count(1)

    def send(
        self, peer: Peer, message: Mapping[str, Any] | Reply, parts: Sequence[Part] = ()
    ) -> Sent:
        self.sent.append(Sent(decode_reply(pack(message)), [bytes(part) for part in parts]))
        return self.sent[-1]

    def describe(self, spec: NamespaceSpec) -> None:
        pass

    def dispatch(self, plan: p.Plan[Any]) -> None:
        self.world.engine.identify(plan.moves)
        self.world.in_flight.update({move.id: move for move in plan.moves})

    def ask(self, op: str, parts: Sequence[Part] = (), **fields: Any) -> dict[str, Any]:
        """The last reply to one request."""
        self.request(op, parts, **fields)
        return self.sent[-1].message

    def request(self, op: str, parts: Sequence[Part] = (), **fields: Any) -> None:
        request = decode_request(pack({"op": op, "id": next(self._ids), **fields}))
        self.service.handle(Asked(Peer(b"peer", request.id), request, parts, 0, self.world.now_s))
        self.world.engine.catch_up()

    def hello(self, transport: str = "frames") -> Session:
        spec = SPEC.to_wire()
        reply = self.ask("hello", protocol=1, client="", spec=spec, transport=transport)
        return self.gate.sessions.by_token[reply["session"]]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def store(desk: Desk, session: Session, tokens: bytes, num_blocks: int) -> None:
    placed = desk.ask("put", s=session.token, tokens=tokens, last=num_blocks)
    blocks = [bytes([number]) * BLOCK_BYTES for number in range(num_blocks)]
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


def fetching(desk: Desk, session: Session) -> tuple[int, list[Sent]]:
    """A fetch of six blocks by a session that may have four unread. Its lease, and what is sent."""
    few = LimitsConfig().model_copy(update={"max_unread_bytes": 4 * BLOCK_BYTES})
    desk.gate.configure(DeadlinesConfig(), few)
    store(desk, session, PROMPT, 6)
    lease = desk.ask("match", s=session.token, tokens=PROMPT)["lease"]
    desk.sent.clear()
    desk.ask("fetch", s=session.token, lease=lease)
    return lease, desk.sent


def first_bytes(sent: list[Sent]) -> list[int]:
    return [part[0] for item in sent for part in item.parts]


def test_a_fetch_goes_on_as_its_client_reads(desk: Desk) -> None:
    """All of it was copied at once, and again with every fetch, whether anybody read it or not."""
    session = desk.hello()
    _, sent = fetching(desk, session)
    assert first_bytes(sent) == [0, 1, 2, 3]
    send_more(desk.gate)
    assert len(sent) == 2
    sent[0].done = True
    send_more(desk.gate)
    assert first_bytes(sent) == [0, 1, 2, 3, 4, 5]
    assert [item.message.get("more", False) for item in sent] == [True, True, False]
    assert sent[-1].message["blocks"] == 6
    assert not desk.gate.waiting.fetches


def test_a_client_that_never_reads_gets_no_more(desk: Desk) -> None:
    """Its fetch ends by its deadline with what was sent; the next one sends nothing at all."""
    session = desk.hello()
    lease, sent = fetching(desk, session)
    desk.service.tick(desk.world.now_s + 6)
    assert sent[-1].message["blocks"] == 4
    assert desk.gate.errors["unread"] == 1
    desk.ask("release", s=session.token, lease=lease)
    lease = desk.ask("match", s=session.token, tokens=PROMPT)["lease"]
    sent.clear()
    desk.request("fetch", s=session.token, lease=lease)
    assert sent == []
    assert desk.ask("release", s=session.token, lease=lease)["released"]
    assert sent[0].message["blocks"] == 0


def test_nothing_is_sent_of_a_lease_that_has_ended(desk: Desk) -> None:
    """Its slots may hold other blocks by now."""
    session = desk.hello()
    _, sent = fetching(desk, session)
    desk.world.do(p.WriterGone(session.group.number, desk.world.now_s))
    sent[0].done = sent[1].done = True
    send_more(desk.gate)
    assert first_bytes(sent) == [0, 1, 2, 3]
    assert sent[-1].message["blocks"] == 4


def held(desk: Desk, tokens: bytes) -> int:
    """Blocks of a prompt in memory, without asking for it."""
    return len([tier for tier in desk.world.tiers_of(tokens, 1) if tier != "-"])


def test_leases_may_not_hold_all_of_memory(desk: Desk) -> None:
    """Requests that wait in an inference engine's queue hold a lease each. Above the limit a match
    is refused, so that what is fetched finds room; prefixes that they share count once."""
    session = desk.hello()
    store(desk, session, PROMPT, 6)
    desk.gate.configure(DeadlinesConfig(), LimitsConfig(max_leased=0.5))
    held = [desk.ask("match", s=session.token, tokens=PROMPT) for _ in range(3)]
    assert all(reply["lease"] for reply in held)
    desk.service.tick(1.0)
    share = desk.gate.leased_share
    assert share == 6 / 8
    with pytest.raises(WireError, match=r"leases hold 75% of memory \(limits.max_leased\)"):
        desk.ask("match", s=session.token, tokens=PROMPT)
    assert desk.gate.turned_away["leased memory"] == 1
    for reply in held:
        desk.ask("release", s=session.token, lease=reply["lease"])
    desk.service.tick(2.0)
    assert desk.ask("match", s=session.token, tokens=PROMPT)["lease"]


def test_a_hint_may_name_the_conversation_instead_of_its_prompt(desk: Desk) -> None:
    session = desk.hello()
    asked = desk.ask("match", s=session.token, tokens=PROMPT, conversation="a")
    assert asked["hit_blocks"] == 0
    store(desk, session, PROMPT, 6)
    assert desk.ask("hint", s=session.token, conversation="b", keep=False)["known"] is False
    assert held(desk, PROMPT) == 6
    assert desk.ask("hint", s=session.token, conversation="a", keep=False)["known"] is True
    assert held(desk, PROMPT) == 0
    over = desk.ask("hint", s=session.token, conversation="a", ended="conversation")
    assert over["known"] is True
    assert len(desk.gate.state(Conversations)) == 0


def test_a_hint_that_is_none_of_the_documented_ones_is_refused(desk: Desk) -> None:
    session = desk.hello()
    with pytest.raises(WireError, match="turn, tool_call, conversation"):
        desk.ask("hint", s=session.token, ended="soon")


def test_conversations_take_little_room() -> None:
    known = Conversations(max_bytes=100)
    for number in range(50):
        known.went_on(0, str(number), bytes(40))
    assert len(known) == 2
    assert known.newest(0, "49") == bytes(40)
    assert known.newest(0, "47") == b""
    known.went_on(0, "49", bytes(44))
    assert known.newest(0, "49") == bytes(44)


def test_a_quiet_request_is_answered_by_an_error_only(desk: Desk) -> None:
    session = desk.hello()
    store(desk, session, PROMPT, 6)
    lease = desk.ask("match", s=session.token, tokens=PROMPT)["lease"]
    sent = len(desk.sent)
    desk.request("release", s=session.token, lease=lease, quiet=True)
    desk.request("observe", s=session.token, sum_n=1, sum_nc=1, seconds=0.1, quiet=True)
    assert len(desk.sent) == sent
    assert not desk.world.engine.residency.leases.leases, "it was released all the same"
    with pytest.raises(WireError):
        desk.request("abort", s=session.token, ticket=99, quiet=True)
