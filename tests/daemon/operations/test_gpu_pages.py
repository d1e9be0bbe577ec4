"""Registered pages and copies under way: requests in, replies out, a worker that answers when the
test says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.daemon.gate import Asked
from hicache.daemon.operations.gpu_pages import MAX_COPIES, GpuPages
from hicache.daemon.operations.stats import namespace_rows
from hicache.daemon.pending import Part, Peer
from hicache.daemon.sessions import Session
from hicache.engine import plan as p
from hicache.protocol.messages import WireError, pack
from hicache.protocol.operations import decode_request
from hicache.tiers.block import slot_bytes_for
from hicache.transfer.gpu_pages.page_messages import PageReport, unpack_claim, unpack_copy
from hicache.transfer.worker_events import PageEvent
from hicache.transfer.worker_messages import Message, Stream
from tests.daemon.test_dispatch import PROMPT, SPEC, Desk, store
from tests.engine.world import BLOCK_BYTES, BLOCK_TOKENS

PLANES = np.array([[0, 0, BLOCK_BYTES // 2, 16]], "<u8")  # two pages of half a block
CLAIM: dict[str, Any] = {
    "bus_id": "0000:00:00.0",
    "handles": b"h" * 64,
    "planes": PLANES.tobytes(),
    "page_bytes": BLOCK_BYTES // 2,
    "pages_per_block": 2,
}


class Worker:
    """Takes orders and leaves them: `told` answers one."""

    def __init__(self, desk: PageDesk) -> None:
        self.desk = desk
        self.is_up = True
        self.orders: list[Message] = []

    def send_pages(self, device: str, message: bytes) -> bool:
        if self.is_up:
            self.orders += Stream().feed(message)
        return self.is_up

    def pids(self) -> dict[str, int]:
        return {"gpu:0": 77}

    def of(self, kind: str) -> list[Message]:
        return [order for order in self.orders if order["t"] == kind]

    def answer(self, order: Message, error: str = "") -> None:
        self.orders.remove(order)
        kind = {"map": "mapped", "unmap": "unmapped"}.get(order["t"], "copied")
        self.tell(PageReport(kind, order["n"], error, seconds=0.5))

    def tell(self, told: PageReport) -> None:
        self.desk.gate.state(GpuPages).take(PageEvent("gpu:0", told), self.desk.world.now_s)

    def die(self) -> None:
        self.orders.clear()
        self.desk.gate.state(GpuPages).worker_gone("gpu:0", self.desk.world.now_s)


class PageDesk(Desk):
    """A Service with a GPU worker, whose clients can be seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.worker = Worker(self)
        self.pid = os.getpid()
        self.gate.state(GpuPages).serve(["gpu:0"], self.worker)

    def request(self, op: str, parts: Sequence[Part] = (), **fields: Any) -> None:
        request = decode_request(pack({"op": op, "id": next(self._ids), **fields}))
        peer = Peer(b"peer", request.id)
        self.service.handle(Asked(peer, request, parts, self.pid, self.world.now_s))
        self.world.engine.catch_up()

    def reply_to(self, number: int) -> dict[str, Any] | None:
        """The last answer to the request of this id."""
        found = [item.message for item in self.sent if item.message["id"] == number]
        return found[-1] if found else None

    def later(self, op: str, **fields: Any) -> int:
        """Sent; the id by which its answer can be found."""
        self.request(op, **fields)
        return next(self._ids) - 1

    def registered(self, session: Session) -> int:
        asked = self.later("register", s=session.token, **CLAIM)
        (order,) = self.worker.of("map")
        assert unpack_claim(order).page_bytes == BLOCK_BYTES // 2
        self.worker.answer(order)
        reply = self.reply_to(asked)
        assert reply is not None
        assert reply["pid"] == 77
        number: int = reply["registration"]
        return number

    def placed(self, session: Session, tokens: bytes, num_blocks: int) -> dict[str, Any]:
        return self.ask("put", s=session.token, tokens=tokens, last=num_blocks)

    def saving(self, session: Session, registration: int, placed: dict[str, Any]) -> int:
        """Of all blocks of a ticket."""
        num = len(placed["indices"]) // 4
        more = {"ticket": placed["ticket"], "indices": placed["indices"]}
        return self.later(
            "save", s=session.token, registration=registration, pages=table(num), **more
        )

    def loading(self, session: Session, registration: int, lease: int, num: int) -> int:
        more = {"registration": registration, "lease": lease, "pages": table(num)}
        return self.later("load", s=session.token, **more)

    def matched(self, session: Session, tokens: bytes = PROMPT) -> int:
        lease: int = self.ask("match", s=session.token, tokens=tokens)["lease"]
        fetched = self.ask("fetch", s=session.token, lease=lease, pages=True)
        assert [run[2:4] for run in fetched["ready"]] == [[b"", b""]]
        return lease

    def free_bytes(self) -> int:
        (pool,) = self.world.engine.residency.pools
        return pool.available(slot_bytes_for(BLOCK_BYTES)) * BLOCK_BYTES


def table(num_blocks: int) -> bytes:
    return np.arange(2 * num_blocks, dtype="<i4").tobytes()


@pytest.fixture
def desk(tmp_path: Path) -> PageDesk:
    return PageDesk(tmp_path)


def refused(desk: PageDesk, why: str, op: str, **fields: Any) -> None:
    with pytest.raises(WireError, match=why):
        desk.request(op, **fields)


def test_who_cannot_register_is_told_why(desk: PageDesk) -> None:
    session = desk.hello()
    s = session.token
    refused(desk, "blocks of these pages", "register", s=s, **{**CLAIM, "page_bytes": 1})
    refused(desk, "64 bytes each", "register", s=s, **{**CLAIM, "handles": b"x"})
    refused(desk, "64 bytes each", "register", s=s, **{**CLAIM, "planes": b""})
    desk.worker.is_up = False
    refused(desk, "not up", "register", s=s, **CLAIM)
    desk.worker.is_up = True
    asked = desk.later("register", s=s, **CLAIM)
    desk.worker.answer(desk.worker.of("map")[0], "CUDA does not map this memory")
    reply = desk.reply_to(asked)
    assert reply is not None
    assert (reply["error"], reply["message"]) == ("refused", "CUDA does not map this memory")
    desk.pid = 0
    refused(desk, "is not visible", "register", s=desk.hello().token, **CLAIM)
    desk.gate.state(GpuPages).serve([], desk.worker)
    refused(desk, "no GPU worker", "register", s=s, **CLAIM)
    assert desk.gate.state(GpuPages).counts() == {"registrations": 0, "copies": 0}


def test_another_sessions_pages_are_nobodys(desk: PageDesk) -> None:
    mine, other = desk.hello(), desk.hello()
    number = desk.registered(mine)
    store(desk, other, PROMPT, 6)
    lease = desk.matched(other)
    asked: dict[str, Any] = {"registration": number, "lease": lease, "pages": table(2)}
    with pytest.raises(WireError) as error:
        desk.request("load", s=other.token, **asked)
    assert error.value.code == "unknown_registration"


def test_a_load_is_answered_when_it_is_at_rest(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    lease = desk.matched(session)
    asked = desk.loading(session, number, lease, 4)
    (order,) = desk.worker.of("load")
    copy = unpack_copy(order)
    assert copy.registration == number
    assert copy.pages.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [(tier, len(slots)) for tier, slots in copy.runs] == [("dram", 4)]
    assert desk.reply_to(asked) is None
    desk.worker.tell(PageReport("part", order["n"], planes=3))
    part = desk.reply_to(asked)
    assert part == {"id": asked, "ok": True, "more": True, "planes": 3, "blocks": 4}
    desk.worker.answer(order)
    assert desk.reply_to(asked) == {"id": asked, "ok": True, "blocks": 4, "seconds": 0.5}


def scored_by_worker(desk: PageDesk) -> bool:
    """Whether a router, who has no session, is told what the worker's loads take."""
    number = desk.world.engine.number_of(SPEC.digest())
    assert number is not None
    return desk.gate.state(GpuPages).copies_in(number)


def priced_by_worker(desk: PageDesk, session: Session) -> bool:
    """Whether the planner counted on the worker when this session asked."""
    lease = desk.ask("match", s=session.token, tokens=PROMPT)["lease"]
    desk.ask("release", s=session.token, lease=lease)
    return next(desk.world.engine.record.last(1)).hit.by_worker


def test_whose_blocks_the_worker_copies_is_known_before_they_are_asked_for(desk: PageDesk) -> None:
    """One session of an inference engine asks, and another one has the pages."""
    scheduler = desk.hello()
    spec, group = SPEC.to_wire(), scheduler.group.token
    reply = desk.ask("hello", protocol=1, spec=spec, transport="frames", group=group)
    rank, stranger = desk.gate.sessions.by_token[reply["session"]], desk.hello()
    store(desk, scheduler, PROMPT, 6)
    assert not priced_by_worker(desk, scheduler)
    assert not scored_by_worker(desk)
    first, second = desk.registered(rank), desk.registered(rank)
    assert priced_by_worker(desk, scheduler)
    assert not priced_by_worker(desk, stranger)
    assert scored_by_worker(desk)
    desk.later("unregister", s=rank.token, registration=first)
    assert priced_by_worker(desk, scheduler)
    desk.later("unregister", s=rank.token, registration=second)
    assert not priced_by_worker(desk, scheduler), "nothing is loaded into what is being unmapped"
    assert not scored_by_worker(desk)
    for order in desk.worker.of("unmap"):
        desk.worker.answer(order)
    desk.registered(rank)
    assert priced_by_worker(desk, scheduler)
    desk.worker.die()
    assert not priced_by_worker(desk, scheduler)


def test_the_planner_learns_what_a_load_took(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    lease = desk.matched(session)
    desk.loading(session, number, lease, 4)
    desk.worker.answer(desk.worker.of("load")[0], "CUDA refused")
    assert not desk.world.engine.estimates.loads[session.namespace].num_measured
    desk.loading(session, number, lease, 6)
    desk.world.now_s += 0.75
    desk.worker.answer(desk.worker.of("load")[0])
    load = desk.world.engine.estimates.loads[session.namespace]
    assert load.seconds({0: 6.0 * BLOCK_BYTES}) == pytest.approx(0.5, rel=0.3)
    row = namespace_rows(desk.gate)[session.namespace]
    assert row["loads"] == {"measurements": 1, "bytes_per_s": {"dram": load.bytes_per_s[0]}}
    desk.ask("release", s=session.token, lease=lease)
    record = next(desk.world.engine.record.last(1))
    assert record.blocks_came == 6
    assert record.reload_s == pytest.approx(0.75)


@pytest.mark.parametrize("ending", ["failed", "under way", "worker died", "came at last"])
def test_what_a_load_did_not_bring_has_not_come(desk: PageDesk, ending: str) -> None:
    """In the planner's record a load that failed, or that its client no longer waited for, counted
    as having brought all of its blocks: they could have been read where they lay."""
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    lease = desk.matched(session)
    desk.loading(session, number, lease, 2)
    desk.worker.answer(desk.worker.of("load")[0])
    rest: dict[str, Any] = {"registration": number, "lease": lease, "pages": table(4)}
    desk.later("load", s=session.token, first=2, **rest)
    if ending in ("failed", "came at last"):
        desk.worker.answer(desk.worker.of("load")[0], "CUDA refused")
    if ending == "worker died":
        desk.worker.die()
    if ending == "came at last":
        desk.loading(session, number, lease, 6)
        desk.worker.answer(desk.worker.of("load")[0])
    desk.ask("release", s=session.token, lease=lease)
    engine = desk.world.engine
    came = 6 if ending == "came at last" else 2
    assert next(engine.record.last(1)).blocks_came == came
    assert engine.record.num_cut_short == (came < 6)
    assert engine.ledger.tiers["dram"].hits == came


def test_a_load_whose_lease_ended_meanwhile_has_failed(desk: PageDesk) -> None:
    """Its slots may have got other bytes, whatever the worker says."""
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    lease = desk.matched(session)
    asked = desk.loading(session, number, lease, 4)
    desk.ask("release", s=session.token, lease=lease)
    (order,) = desk.worker.of("load")
    desk.worker.tell(PageReport("part", order["n"], planes=3))
    assert desk.reply_to(asked) is None
    desk.worker.answer(order)
    reply = desk.reply_to(asked)
    assert reply is not None
    assert reply["error"] == "unknown_lease"


def test_what_cannot_be_loaded(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    lease: int = desk.ask("match", s=session.token, tokens=PROMPT)["lease"]
    asked: dict[str, Any] = {"s": session.token, "registration": number, "lease": lease}
    refused(desk, "needs a fetch", "load", **asked, pages=table(1))
    desk.ask("fetch", s=session.token, lease=lease, pages=True)
    refused(desk, "blocks 0 … 7 of 6", "load", **asked, pages=table(7))
    refused(desk, "pages: 2 for each", "load", **asked, pages=table(1)[:4])
    refused(desk, "pages: 2 for each", "load", **asked, pages=b"")
    for _ in range(MAX_COPIES):
        desk.loading(session, number, lease, 1)
    refused(desk, "are running", "load", **asked, pages=table(1))


def test_a_save_keeps_its_ticket_from_being_committed(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    placed = desk.placed(session, PROMPT, 2)
    asked = desk.saving(session, number, placed)
    commit = {"ticket": placed["ticket"], "indices": placed["indices"]}
    blocks = [bytes(BLOCK_BYTES)] * 2
    with pytest.raises(WireError, match="still running"):
        desk.ask("commit", blocks, s=session.token, **commit)
    (order,) = desk.worker.of("save")
    assert unpack_copy(order).to_blocks
    desk.worker.answer(order)
    assert desk.reply_to(asked) == {"id": asked, "ok": True, "blocks": 2, "seconds": 0.5}
    assert desk.ask("commit", blocks, s=session.token, **commit)["committed"] == 2


def test_a_save_of_other_blocks_than_the_tickets(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    placed = desk.placed(session, PROMPT, 2)
    asked: dict[str, Any] = {
        "s": session.token,
        "registration": number,
        "ticket": placed["ticket"],
    }
    for indices in ([0, 2], [1, 1], [7], []):
        packed = np.array(indices, "<u4").tobytes()
        pages = table(max(1, len(indices)))
        refused(desk, "indices", "save", **asked, indices=packed, pages=pages)
    refused(desk, "indices", "save", **asked, indices=placed["indices"], pages=table(1))
    assert not desk.worker.of("save")


def test_slots_of_an_aborted_ticket_are_free_when_the_save_has_ended(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    before = desk.free_bytes()
    placed = desk.placed(session, PROMPT, 2)
    desk.saving(session, number, placed)
    for _ in range(2):  # the second finds it quarantined
        desk.ask("abort", s=session.token, ticket=placed["ticket"])
        assert desk.free_bytes() < before
    desk.worker.answer(desk.worker.of("save")[0])
    assert desk.free_bytes() == before


@pytest.mark.parametrize("ending", ["answer", "die"])
def test_slots_of_a_session_that_ended_are_free_when_the_save_has(
    desk: PageDesk, ending: str
) -> None:
    """And its pages are let go of only then; the worker's death ends both."""
    session = desk.hello()
    number = desk.registered(session)
    before = desk.free_bytes()
    desk.saving(session, number, desk.placed(session, PROMPT, 2))
    desk.ask("bye", s=session.token)
    assert desk.free_bytes() < before
    assert not desk.worker.of("unmap")
    if ending == "answer":
        desk.worker.answer(desk.worker.of("save")[0])
        desk.worker.answer(desk.worker.of("unmap")[0])
    else:
        desk.worker.die()
    assert desk.free_bytes() == before
    assert desk.gate.state(GpuPages).counts() == {"registrations": 0, "copies": 0}


def test_unregister_is_answered_when_the_worker_has_let_go(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    loading = desk.loading(session, number, desk.matched(session), 4)
    asked = desk.later("unregister", s=session.token, registration=number)
    refused(desk, "already", "unregister", s=session.token, registration=number)
    again: dict[str, Any] = {"registration": number, "lease": desk.matched(session)}
    refused(desk, "mapped or unmapped", "load", s=session.token, pages=table(1), **again)
    assert not desk.worker.of("unmap")
    desk.worker.answer(desk.worker.of("load")[0])
    assert desk.reply_to(loading) is not None
    assert desk.reply_to(asked) is None
    desk.worker.answer(desk.worker.of("unmap")[0])
    assert desk.reply_to(asked) == {"id": asked, "ok": True}
    with pytest.raises(WireError) as error:
        desk.request("unregister", s=session.token, registration=number)
    assert error.value.code == "unknown_registration"


def test_another_session_of_the_same_process_asks_whether_it_is_over(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    desk.loading(session, number, desk.matched(session), 4)
    desk.ask("bye", s=session.token)
    asked = desk.later("unregister", s=desk.hello().token, registration=number)
    assert desk.reply_to(asked) is None
    desk.worker.answer(desk.worker.of("load")[0])
    desk.worker.answer(desk.worker.of("unmap")[0])
    assert desk.reply_to(asked) == {"id": asked, "ok": True}
    again = desk.registered(desk.hello())
    desk.pid = os.getppid()
    with pytest.raises(WireError) as error:
        desk.request("unregister", s=desk.hello().token, registration=again)
    assert error.value.code == "unknown_registration"


def test_a_session_that_ended_while_its_pages_were_mapped(desk: PageDesk) -> None:
    session = desk.hello()
    desk.request("register", s=session.token, **CLAIM)
    desk.ask("bye", s=session.token)
    assert not desk.worker.of("unmap")
    desk.worker.answer(desk.worker.of("map")[0])
    desk.worker.answer(desk.worker.of("unmap")[0])
    assert desk.gate.state(GpuPages).counts() == {"registrations": 0, "copies": 0}


def test_the_workers_death_answers_everybody(desk: PageDesk) -> None:
    session = desk.hello()
    number = desk.registered(session)
    store(desk, session, PROMPT, 6)
    loading = desk.loading(session, number, desk.matched(session), 4)
    mapping = desk.later("register", s=session.token, **CLAIM)
    letting_go = desk.later("unregister", s=session.token, registration=number)
    desk.worker.die()
    for asked in (loading, mapping):
        reply = desk.reply_to(asked)
        assert reply is not None
        assert (reply["error"], reply["message"]) == ("refused", "the GPU worker ended")
    assert desk.reply_to(letting_go) == {"id": letting_go, "ok": True}
    assert desk.gate.state(GpuPages).counts() == {"registrations": 0, "copies": 0}


_STEPS = ("hello", "put", "save", "commit", "abort", "bye", "answer", "fail", "die", "age")


@pytest.mark.thorough
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.lists(st.sampled_from(_STEPS), min_size=30, max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_no_slot_is_given_to_anybody_while_the_worker_writes_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[str]
) -> None:
    """Whatever clients do, in whatever order the worker answers: slots named in a save that was
    not told as ended are in no later put. In the end nothing is left over."""
    rng = Random(seed)
    server = World(PageDesk(tmp_path_factory.mktemp("desk")), rng)
    for step in steps:
        getattr(server, step)()
        server.check()
    server.finish()


class World:
    """Sessions, tickets, and which slots the worker may write now."""

    def __init__(self, desk: PageDesk, rng: Random) -> None:
        self.desk, self.rng = desk, rng
        self.sessions: list[tuple[Session, int]] = []
        self.tickets: list[tuple[Session, int, dict[str, Any]]] = []
        self.written: dict[int, set[int]] = {}  # by the save's number
        self.before = desk.free_bytes()
        self.num_prompts = 0
        self.hello()

    def check(self) -> None:
        """What the worker writes is a ticket's, or set aside."""
        self.desk.world.engine.validate()
        server = self.desk.world.engine.residency
        kept = [server.blocks.slot[t.tier][t.ids] for t in server.leases.tickets.values()]
        kept += [held.slots for held in server.leases.quarantine.values()]
        slots = set(np.concatenate([np.empty(0, int), *kept]).tolist())
        assert all(written <= slots for written in self.written.values()), "they are not held"

    def hello(self) -> None:
        if len(self.sessions) < 4:
            session = self.desk.hello(self.rng.choice(["frames", "arena"]))
            self.sessions.append((session, self.desk.registered(session)))

    def put(self) -> None:
        if not self.sessions:
            return
        session, number = self.rng.choice(self.sessions)
        self.num_prompts += 1
        first = np.full(2 * BLOCK_TOKENS, self.num_prompts, "<u4")
        asked = self.desk.later("put", s=session.token, tokens=first.tobytes(), last=2)
        placed = self.desk.reply_to(asked)
        if placed is None or not placed["ticket"]:
            return
        slots = {
            int(slot)
            for ticket in [self.desk.world.engine.residency.leases.tickets[placed["ticket"]]]
            for slot in self.desk.world.engine.residency.blocks.slot[ticket.tier][ticket.ids]
        }
        for written in self.written.values():
            assert not slots & written, "given away while the worker writes it"
        self.tickets.append((session, number, placed))

    def save(self) -> None:
        if self.tickets:
            session, number, placed = self.rng.choice(self.tickets)
            self._try("save", session, number, placed)
            for order in self.desk.worker.of("save"):
                slots = {int(s) for _, slots in unpack_copy(order).runs for s in slots}
                self.written[order["n"]] = slots

    def commit(self) -> None:
        if self.tickets:
            session, number, placed = self.rng.choice(self.tickets)
            if self._try("commit", session, number, placed):
                self.tickets.remove((session, number, placed))

    def abort(self) -> None:
        if self.tickets:
            self._try("abort", *self.rng.choice(self.tickets))

    def bye(self) -> None:
        if self.sessions:
            session, _ = self.sessions.pop(self.rng.randrange(len(self.sessions)))
            self.desk.ask("bye", s=session.token)
            self.tickets = [ticket for ticket in self.tickets if ticket[0] is not session]

    def answer(self, error: str = "") -> None:
        orders = self.desk.worker.orders
        if orders:
            order = self.rng.choice(orders)
            self.written.pop(order["n"] if order["t"] == "save" else -1, None)
            self.desk.worker.answer(order, error if order["t"] == "save" else "")

    def fail(self) -> None:
        self.answer("cudaErrorInvalidValue")

    def die(self) -> None:
        self.written.clear()
        self.desk.worker.die()
        self.sessions = [(session, self.desk.registered(session)) for session, _ in self.sessions]

    def age(self) -> None:
        """Tickets expire."""
        self.desk.world.now_s += 400.0
        self.desk.service.tick(self.desk.world.now_s)

    def finish(self) -> None:
        while self.sessions:
            self.bye()
        while self.desk.worker.orders:
            self.answer()
        for namespace in self.desk.world.engine.residency.namespaces:
            self.desk.world.do(p.Clear(namespace.number, self.desk.world.now_s))
        assert self.desk.gate.state(GpuPages).counts() == {"registrations": 0, "copies": 0}
        assert self.desk.free_bytes() == self.before
        self.desk.world.engine.validate()

    def _try(self, op: str, session: Session, number: int, placed: dict[str, Any]) -> bool:
        try:
            if op == "save":
                self.desk.saving(session, number, placed)
            elif op == "commit":
                count = len(placed["indices"]) // 4
                parts = [bytes(BLOCK_BYTES)] * count if session.transport == "frames" else []
                more = {"ticket": placed["ticket"], "indices": placed["indices"]}
                self.desk.ask("commit", parts, s=session.token, **more)
            else:
                self.desk.ask("abort", s=session.token, ticket=placed["ticket"])
        except WireError:
            return False
        return True
