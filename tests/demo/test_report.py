"""What the demo shows and writes."""

import io
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install .[demo]")
pytest.importorskip("transformers", reason="needs the extra: pip install .[demo]")

from rich.console import Console

from hicache.demo.demo_report import DemoReport, as_data
from hicache.demo.demo_run import Result, Turn


def turn(number: int, *, equal: bool = True, **hits: int) -> Turn:
    return Turn(
        agent="ada",
        turn=number,
        prompt_tokens=1700,
        new_share=0.03,
        hit_tokens={"hbm": 0, "dram": 0, "disk": 0, **hits},
        decision="reload",
        reason="Reload [all] of it.",
        ttft_s=0.5,
        ttft_without_s=5.0,
        outputs_equal=equal,
        reply="one\n\ntwo",
    )


def tier(name: str, demotions: int) -> dict[str, Any]:
    counts = {"hit_tokens": 5, "promotions": 0, "evictions": 0, "demotions": demotions}
    sizes = {"capacity_bytes": 1 << 28, "used_bytes": 1 << 20, "blocks": 3}
    return {"name": name, "medium": "host memory", **counts, **sizes}


def result(*turns: Turn) -> Result:
    stats = {"tiers": [tier("hbm", 0), tier("dram", 7), tier("disk", 4)]}
    return Result(list(turns), 3200, 3100, [stats, stats])


def test_data_has_the_documented_keys() -> None:
    data = as_data(result(turn(1), turn(2, hbm=1600)))
    assert set(data) == {"turns", "outputs_equal", "after_restart_hit_tokens", "demoted_blocks"}
    assert data["turns"][1] == {
        "agent": "ada",
        "turn": 2,
        "prompt_tokens": 1700,
        "hit_tokens": {"hbm": 1600, "dram": 0, "disk": 0},
        "decision": "reload",
        "reason": "Reload [all] of it.",
        "ttft_s": 0.5,
        "ttft_without_s": 5.0,
        "outputs_equal": True,
    }
    assert (data["outputs_equal"], data["after_restart_hit_tokens"]) == (True, 3100)
    assert data["demoted_blocks"] == 22


def test_one_different_output_is_a_different_demo() -> None:
    assert as_data(result(turn(1), turn(2, equal=False)))["outputs_equal"] is False


def test_turns_and_summary_say_what_matters() -> None:
    out = io.StringIO()
    shown = result(turn(1), turn(2, hbm=1000, dram=600))
    with DemoReport(Console(file=out)) as report:
        report.phase("loading")
        for each in shown.turns:
            report.turn(each)
        report.summary(shown)
    text = out.getvalue()
    assert "… loading" in text
    assert "1,000 hbm, 600 dram" in text
    assert "reload: Reload [all] of it." in text
    assert "3,100 tokens reloaded of 3,200" in text
    assert "no turn was served from: disk" in text
    assert "all equal, token for token" in text
