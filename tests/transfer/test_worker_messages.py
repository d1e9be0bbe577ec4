"""The words between mover and worker survive the trip; anything else is refused."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.plan import BlockIdentity, Move, Outcome, Priority, Use
from hicache.tiers.block import StoredRows
from hicache.tiers.tier import DeviceSpec
from hicache.transfer import worker_messages as messages
from hicache.transfer.worker_messages import Batch, Done, MalformedMessage, Stream, WorkerConfig

IDENTITY = BlockIdentity(b"n" * 32, b"k" * 32, b"p" * 32, b"t" * 64, 3, 7)


def one(data: bytes) -> messages.Message:
    (message,) = Stream().feed(data)
    return message


def test_a_batch_survives() -> None:
    moves = [
        Move(1, 0, "dram", 2, "disk", 3, 4, 4096, 8192, Priority.DEMAND, IDENTITY),
        Move(2, 0, "disk", 5, None, 0, 4, 4096, 0, Priority.DEMAND, None),
    ]
    assert messages.unpack_batch(one(messages.pack_batch(Batch(9, moves)))) == Batch(9, moves)


def test_outcomes_survive_with_their_share_of_the_time() -> None:
    outcomes = [Outcome(1, True), Outcome(2, False, error="no", corrupt=True)]
    done = messages.unpack_done(one(messages.pack_done(Done(4, outcomes, 0.5, 100))))
    assert (done.batch, done.seconds, done.num_bytes) == (4, 0.5, 100)
    assert done.outcomes == [Outcome(1, True, 0.25), Outcome(2, False, 0.25, "no", True)]


def test_rows_survive() -> None:
    words = [np.array(row, np.uint32) for row in ([1, 2], [5, 6, 7], [8, 9, 2**32 - 1])]
    lengths, hits, used_s = words
    parents = np.array([-1, 0], np.int32)
    rows = StoredRows(b"ns", 10, 4, 0, 3, lengths, parents, b"k" * 64, b"t" * 12, hits, used_s)
    found = messages.unpack_rows(one(messages.pack_rows(rows)))
    assert str(found) == str(rows)
    wrongs: list[dict[str, Any]] = [{"tokens": b"t"}, {"hits": hits[:2]}, {"step": 0}]
    for wrong in wrongs:
        packed = messages.pack_rows(replace(rows, **wrong))
        with pytest.raises(MalformedMessage):
            messages.unpack_rows(one(packed))


def test_uses_survive() -> None:
    uses = [Use(4096, b"k", 3, 10.5), Use(8192, b"l", 1, -99.0)]
    found = messages.unpack_uses(one(messages.pack_uses(uses, 50.0)))
    assert found == {4096: [(b"k", 3, 60)], 8192: [(b"l", 1, 0)]}


def test_a_stream_may_be_cut_anywhere() -> None:
    data = messages.pack("stop") + messages.pack("broken", error="x", damaged=False)
    stream = Stream()
    found = [m["t"] for i in range(len(data)) for m in stream.feed(data[i : i + 1])]
    assert found == ["stop", "broken"]


@given(data=st.binary(max_size=40))
def test_garbage_is_malformed_and_nothing_else(data: bytes) -> None:
    try:
        for message in Stream().feed(data):
            assert isinstance(message, dict)
    except MalformedMessage:
        pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.binary(max_size=3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=12,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            ["n", "moves", "out", "seconds", "bytes", "names", "words", "tokens", "keys", "uses"]
        ),
        VALUES,
    )
)
def test_wrong_fields_are_malformed_and_nothing_else(fields: dict[str, Any]) -> None:
    message = one(msgpack.packb({"t": "x"} | fields))
    for unpack in (
        messages.unpack_batch,
        messages.unpack_done,
        messages.unpack_rows,
        messages.unpack_uses,
        messages.unpack_keys,
    ):
        with contextlib.suppress(MalformedMessage):
            unpack(message)


def config(**fields: Any) -> WorkerConfig:
    spec = DeviceSpec("disk:x", "hicache-disk-0", "a.module:Medium", 1 << 30, {"path": "/b"})
    return replace(WorkerConfig(spec, "dram", "/a", "disk"), **fields)


def test_a_config_survives_and_is_checked() -> None:
    fields = asdict(config())
    assert WorkerConfig.from_fields(fields) == config()
    wrong_spec = {**fields["spec"], "capacity_bytes": "8GiB"}
    for wrong in ({"spec": wrong_spec}, {"near": 7}, {"near_path": "b"}, {"colour": 1}):
        with pytest.raises(MalformedMessage):
            WorkerConfig.from_fields(fields | wrong)
    with pytest.raises(ValueError, match="15 bytes"):
        replace(config().spec, title="hicache-disk-number-0")
