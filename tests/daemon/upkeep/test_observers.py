"""Observers see every request once, in order; prompts and blocks of any size; one that fails does
not stop another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache.daemon.sessions import Group, Session
from hicache.daemon.upkeep.observers import Observer, Observers
from hicache.daemon.upkeep.request_sample import Sample
from hicache.daemon.upkeep.trace import TraceRecorder
from hicache.engine.policies.hazard.history import symbols_of
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.protocol.messages import WireError
from hicache.replay.whatif import Sampled, what_if
from hicache.tiers.block import MAX_BLOCK_TOKENS
from tests.daemon.test_dispatch import PROMPT, SPEC, Desk, desk

__all__ = ["desk"]
SIZES = st.integers(0, 3 * MAX_BLOCK_TOKENS)
BLOCK_TOKENS = st.integers(1, MAX_BLOCK_TOKENS)


class Noted:
    def __init__(self) -> None:
        self.rows: list[str] = []

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        self.rows.append(conversation)

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        self.rows.append(f"{stop} {answer_tokens}")


class Failing(Noted):
    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        raise ValueError("no")


def session_of(block_tokens: int) -> Session:
    spec = NamespaceSpec(
        model_digest="m",
        weights_digest="w",
        dtype="float16",
        groups=(LayerGroup(1, 1, 1, "layer"),),
        block_tokens=block_tokens,
        block_bytes=4096,
    )
    return Session(b"s" * 16, Group(1, b"g" * 16), 0, spec, "arena", "", 0, 0.0)


def test_each_request_is_observed_once_and_in_order(desk: Desk) -> None:
    noted = Noted()
    desk.gate.observers = Observers({"a record": noted})
    session = desk.hello()
    desk.request("match", s=session.token, tokens=PROMPT, conversation="c")
    desk.request(
        "hint", s=session.token, tokens=PROMPT, conversation="c", ended="turn", answer_tokens=7
    )
    assert not noted.rows, "no client waits for a record"
    desk.gate.observers.deliver()
    desk.gate.observers.deliver()
    assert noted.rows == ["c", "turn 7"]


def test_an_observer_that_fails_does_not_stop_another() -> None:
    """Both shared one `Faults`: a sample that failed made the record rest for up to a minute."""
    noted = Noted()
    observers = Observers({"one": Failing(), "another": noted})
    session = session_of(16)

    def asked(observer: Observer) -> None:
        observer.asked(session, b"", "c", 0.0)

    observers.note(asked)
    observers.note(asked)
    observers.deliver()
    assert noted.rows == ["c", "c"]
    assert [faults.num for faults in observers.faults] == [1, 0]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:
        yield Path(path)


@given(SIZES, BLOCK_TOKENS)
@example(0, 16)
@example(15, 16)
@example(MAX_BLOCK_TOKENS, MAX_BLOCK_TOKENS)
@example(7, 3)
def test_a_prompt_of_any_size_is_observed(folder: Path, num_tokens: int, block_tokens: int) -> None:
    """A prompt shorter than a block could not be sampled, and the daemon was not healthy."""
    tokens = np.arange(num_tokens, dtype="<u4").tobytes()
    sample, recorder = Sample(1 << 20), TraceRecorder(folder / "trace.jsonl")
    session = session_of(block_tokens)
    for observer in (sample, recorder):
        observer.asked(session, tokens, "c", 1.0)
    recorder.close()
    num_blocks = num_tokens // block_tokens
    assert len(sample.hashes(0, tokens, 4 * block_tokens)) == num_blocks
    assert len(symbols_of(tokens, 4 * block_tokens)) == 8 * num_blocks
    tiers = [{"name": "dram", "bytes": 1 << 20, "eviction": "lru"}]
    estimates = what_if(Sampled.of({"tiers": tiers, **sample.report()}))
    assert all(0 <= estimate.all_hit <= 1 for estimate in estimates)


def test_what_if_of_a_daemon_that_was_asked_nothing() -> None:
    tiers = [{"name": "dram", "bytes": 1 << 20, "eviction": "lru"}]
    sampled = Sampled.of({"tiers": tiers, **Sample(1 << 20).report()})
    assert all(estimate.all_hit == 0 for estimate in what_if(sampled))


def test_a_block_of_too_many_tokens_is_refused(desk: Desk) -> None:
    """It was let in, and then every match was an internal error under the hazard policy."""
    spec = replace(SPEC, block_tokens=MAX_BLOCK_TOKENS + 1).to_wire()
    with pytest.raises(WireError, match="at most 4096 are held") as refused:
        desk.ask("hello", protocol=1, client="", spec=spec, transport="frames")
    assert refused.value.code == "spec"
