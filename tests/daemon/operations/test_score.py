"""Scores by request and reply: what is taken, what is refused, and that nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.protocol.messages import WireError
from hicache.protocol.operations import MAX_SCORED_PROMPTS, MAX_SCORED_TOKENS
from tests.daemon.test_dispatch import PROMPT, SPEC, Desk, store
from tests.engine.index.tree_picture import portrait
from tests.engine.world import BLOCK_TOKENS

NAMESPACE = SPEC.digest()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def asking(*prompts: bytes, **changes: Any) -> dict[str, Any]:
    lengths = np.array([len(tokens) // 4 for tokens in prompts], "<u4").tobytes()
    fields = {"namespace": NAMESPACE, "tokens": b"".join(prompts), "lengths": lengths}
    return {**fields, **changes}


def test_each_prompt_gets_what_a_match_would_find(desk: Desk) -> None:
    """Without a session, and nothing is different afterwards: no lease, no use, no record."""
    session = desk.hello()
    store(desk, session, PROMPT, 6)
    before = portrait(desk.world.engine)
    other = PROMPT[: 4 * 2 * BLOCK_TOKENS] + PROMPT[:4] * 5
    reply = desk.ask("score", **asking(PROMPT, other, b"", PROMPT[4:]))
    assert portrait(desk.world.engine) == before
    assert [score["hit_blocks"] for score in reply["scores"]] == [6, 2, 0, 0]
    assert [score["runs"] for score in reply["scores"]] == [[["dram", 6]], [["dram", 2]], [], []]
    assert (reply["block_tokens"], reply["measured"]) == (BLOCK_TOKENS, False)
    match = desk.ask("match", s=session.token, tokens=PROMPT)
    assert match["runs"] == reply["scores"][0]["runs"]
    for name in ("reload_blocks", "reload_s", "prefill_s", "recompute_s"):
        assert match["decision"][name] == reply["scores"][0][name]


def test_a_namespace_that_nobody_knows_holds_nothing(desk: Desk) -> None:
    """It is not made by asking, either."""
    reply = desk.ask("score", **asking(PROMPT, PROMPT))
    assert reply["block_tokens"] == 0
    assert [score["hit_blocks"] for score in reply["scores"]] == [0, 0]
    assert not desk.world.engine.knows(NAMESPACE)
    assert desk.ask("score", **asking())["scores"] == []


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"lengths": np.array([3], "<u4").tobytes()}, "malformed", "lengths"),
        ({"lengths": np.array([2**32 - 1] * 3, "<u4").tobytes()}, "malformed", "lengths"),
        ({"lengths": bytes(4 * (MAX_SCORED_PROMPTS + 1))}, "too_large", "at most 128"),
        ({"tokens": bytes(4 * (MAX_SCORED_TOKENS + 1))}, "too_large", "at most 2097152"),
        ({"namespace": NAMESPACE[:31]}, "malformed", "namespace"),
        ({"namespace": NAMESPACE + b"n"}, "too_large", "namespace"),
        ({"tokens": b"odd"}, "malformed", "tokens"),
        ({"limit": 1}, "malformed", "limit"),
    ],
)
def test_a_bad_request_gets_one_clear_error(
    desk: Desk, changes: dict[str, Any], code: str, told: str
) -> None:
    desk.hello()
    with pytest.raises(WireError, match=told) as error:
        desk.ask("score", **asking(PROMPT, **changes))
    assert error.value.code == code
    assert len(desk.sent) == 1, "the answer to hello"
