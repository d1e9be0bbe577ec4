"""Messages about inference engines' pages, there and back, and what is not believed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from hicache.transfer.gpu_pages.page_messages import (
    Claim,
    PageCopy,
    PageReport,
    pack_claim,
    pack_copy,
    pack_report,
    unpack_claim,
    unpack_copy,
    unpack_report,
)
from hicache.transfer.worker_messages import MalformedMessage, Stream

CLAIM = Claim(7, "0000:81:00.0", (b"a" * 64, b"b" * 64), np.array([[1, 2, 3, 4]], np.uint64), 64, 2)
COPY = PageCopy(
    9,
    7,
    True,
    128,
    (("dram", np.array([4], np.int32)), ("hbm", np.array([8], np.int32))),
    np.array([[0, 1], [5, 2]], np.int32),
    3,
)
REPORT = PageReport("copied", 9, "a sentence", 4, 0.25)


def one(data: bytes) -> dict[str, Any]:
    (message,) = Stream().feed(data)
    return message


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(x, y) if isinstance(x, np.ndarray) else str(x) == str(y)
        for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    )


def test_there_and_back() -> None:
    assert same(unpack_claim(one(pack_claim(CLAIM))), CLAIM)
    assert same(unpack_copy(one(pack_copy(COPY))), COPY)
    assert unpack_report(one(pack_report(REPORT))) == REPORT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", -1),
        ("bus", b"x"),
        ("handles", b"a" * 65),
        ("planes", b"a" * 31),
        ("page_bytes", None),
        ("pages_per_block", "2"),
    ],
)
def test_a_claim_of_the_wrong_form(name: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_claim(one(pack_claim(CLAIM)) | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5),
        ("of", None),
        ("runs", "dram"),
        ("runs", [["dram"]]),
        ("runs", [["dram", b"abc"]]),
        ("runs", []),
        ("pages", b"\0" * 12),
        ("pages", b"abc"),
        ("part", -1),
    ],
)
def test_a_copy_of_the_wrong_form(name: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_copy(one(pack_copy(COPY)) | {name: value})


@pytest.mark.parametrize(("name", "value"), [("error", None), ("seconds", 1), ("planes", -1)])
def test_an_answer_of_the_wrong_form(name: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_report(one(pack_report(REPORT)) | {name: value})
