"""Rows of a scan, told as chains: parents first, what was used last first, nothing twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hicache.tiers import restore_order as disk_forest
from hicache.tiers.block import StoredRows
from hicache.tiers.disk.format import derive_key
from hicache.tiers.restore_order import StoredForest
from tests.tiers.blocks import Row, scanned

NAMESPACE, ROOT = bytes(32), bytes(32)

trees = st.lists(
    st.tuples(st.integers(-1, 40), st.integers(0, 9), st.booleans()), min_size=1, max_size=40
)


def rows_of(drawn: Sequence[tuple[int, int, bool]]) -> tuple[list[Row], set[bytes]]:
    """Row n hangs below one before it, or the root; it is lost where drawn so. The rows that are
    there, and the keys of those that can be reached."""
    made: list[Row] = []
    there: list[Row] = []
    reached = {ROOT}
    for number, (above, used_s, is_lost) in enumerate(drawn):
        parent = made[above % number].key if above >= 0 and number else ROOT
        tokens = number.to_bytes(4, "little")
        key = derive_key(NAMESPACE, parent, tokens)
        made.append(Row(NAMESPACE, key, parent, tokens, 10, number, used_s))
        if not is_lost:
            there.append(made[-1])
            if parent in reached:
                reached.add(key)
    return sorted(there, key=lambda row: row.key), reached - {ROOT}


def chains_of(told: Sequence[StoredRows]) -> list[list[Row]]:
    """Each chain's rows again, looked up by what the tellings say. Checks their numbers."""
    rows: list[tuple[bytes, bytes]] = []
    chains = []
    for part in told:
        assert part.is_sound()
        assert part.first == len(rows)
        at = 0
        for number, length in enumerate(part.lengths.tolist()):
            parent = part.parent_keys[32 * number : 32 * number + 32]
            up = int(part.parents[number])
            assert parent == (rows[up][0] if up >= 0 else ROOT)
            chain = []
            for i in range(at, at + length):
                tokens = part.tokens[4 * i : 4 * i + 4]
                key = derive_key(part.namespace, parent, tokens)
                hits, used_s = int(part.hits[i]), int(part.used_s[i])
                chain.append(Row(NAMESPACE, key, parent, tokens, 10, hits, used_s))
                rows.append((key, parent))
                parent = key
            chains.append(chain)
            at += length
    return chains


@given(trees, st.integers(1, 7))
def test_everything_that_can_be_reached_is_told_once(
    drawn: list[tuple[int, int, bool]], max_rows: int
) -> None:
    rows, reached = rows_of(drawn)
    forest = StoredForest(NAMESPACE, 10, 4)
    if rows:
        forest.add(scanned(rows))
    told = list(forest.in_order(0, len(rows), max_rows))
    assert all(len(part) <= max_rows for part in told)
    chains = chains_of(told)
    keys = [row.key for chain in chains for row in chain]
    assert len(keys) == len(set(keys))
    assert set(keys) == reached
    assert set(forest.orphans) == {row.key for row in rows} - reached
    hits = {row.key: row.hits for row in rows}
    assert all(hits[row.key] == row.hits for chain in chains for row in chain)
    used = {row.key: row.used_s for row in rows}
    for row in reversed([row for chain in chains for row in chain]):
        assert row.used_s == used[row.key], "its own, or the latest below it"
        if row.parent in used:
            used[row.parent] = max(used[row.parent], row.used_s)
    for chain in chains:
        assert all(a.used_s >= b.used_s for a, b in itertools.pairwise(chain))
    told_before = [b"", *keys]
    heads = [
        row
        for row, before in zip(itertools.chain(*chains), told_before, strict=False)
        if row.parent != before
    ]
    first_uses = [row.used_s for row in heads]
    assert first_uses == sorted(first_uses, reverse=True)


def test_a_path_goes_on_with_the_child_used_last() -> None:
    rows, _ = rows_of([(-1, 5, False), (0, 1, False), (0, 4, False), (2, 3, False), (-1, 2, False)])
    forest = StoredForest(NAMESPACE, 10, 4)
    forest.add(scanned(rows))
    (told,) = forest.in_order(0, 5)
    assert [[row.hits for row in chain] for chain in chains_of([told])] == [[0, 2, 3], [4], [1]]


def test_a_message_is_bounded_in_chains_too() -> None:
    count = 3 * disk_forest.MAX_CHAINS
    rows, _ = rows_of([(-1, 0, False)] * count)
    forest = StoredForest(NAMESPACE, 10, 4)
    forest.add(scanned(rows))
    told = list(forest.in_order(0, count))
    assert [len(part.lengths) for part in told] == [disk_forest.MAX_CHAINS] * 3
    assert len(chains_of(told)) == count


def test_rows_that_lead_in_a_circle_are_orphans() -> None:
    one, two = b"1" * 32, b"2" * 32
    forest = StoredForest(NAMESPACE, 10, 4)
    forest.add(scanned([Row(NAMESPACE, one, two, b"1111", 10)]))
    forest.add(scanned([Row(NAMESPACE, two, one, b"2222", 10)]))
    assert list(forest.in_order(0, 2)) == []
    assert sorted(forest.orphans) == [one, two]
