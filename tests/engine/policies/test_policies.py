"""What every eviction policy has to keep to, whatever its order."""

from __future__ import annotations

import pytest

from hicache.engine.index.node import Node
from hicache.engine.policies.base import MIN_SWEEP
from hicache.engine.policies.hazard.history import History
from tests.engine.policies.registry import every_policy

MANY = 20 * MIN_SWEEP


def leaf(root: Node, number: int) -> Node:
    node = Node(number, 0, root, slice(number, number + 1), 1, 0)
    node.touched_s = float(number)
    node.uses = 1 + number % 3
    return node


def num_entries(policy: object) -> int:
    """How many entries all of the policy's lines, heaps and tables have."""
    held = vars(policy).values()
    sized = [value for value in held if hasattr(value, "__len__")]
    lines = [line for value in sized if isinstance(value, dict) for line in value.values()]
    return sum(map(len, sized)) + sum(len(line) for line in lines if isinstance(line, list))


@pytest.mark.parametrize("name", every_policy())
def test_candidates_come_out_once_each(name: str) -> None:
    root = Node(0, 0, None, slice(0, 0), 0, 0)
    policy = every_policy()[name](0, History())
    nodes = [leaf(root, number) for number in range(1, MANY)]
    for node in nodes:
        policy.add(node)
        policy.add(node)
    for node in nodes[::2]:
        node.parent = None
    popped = []
    while (node_out := policy.pop()) is not None:
        popped.append(node_out)
    assert sorted(node.number for node in popped) == [node.number for node in nodes[1::2]]


@pytest.mark.parametrize("name", every_policy())
def test_nodes_that_are_no_more_are_let_go_without_an_eviction(name: str) -> None:
    root = Node(0, 0, None, slice(0, 0), 0, 0)
    policy = every_policy()[name](0, History())
    for number in range(1, MANY):
        node = leaf(root, number)
        policy.add(node)
        node.parent = None
    assert num_entries(policy) < 4 * MIN_SWEEP


@pytest.mark.parametrize("name", every_policy())
def test_one_candidate_used_over_and_over_is_one_entry(name: str) -> None:
    root = Node(0, 0, None, slice(0, 0), 0, 0)
    policy = every_policy()[name](0, History())
    node = leaf(root, 1)
    for use in range(MANY):
        node.touched_s = float(use)
        node.kind = use % 5
        policy.add(node)
    assert num_entries(policy) < 4 * MIN_SWEEP
    assert policy.pop() is node
    assert policy.pop() is None
