"""The product's docstrings, comments and messages name things and numbers, not "somebody"."""

import re

import pytest

from tests.architecture.product import FILES

# Words that stood for a missing name or number. Name the process, the client or the count instead.
BANNED = re.compile(
    r"\b(nobody|somebody|anybody|whoever|so many|so much|who asks|in vain|house|household|grove|"
    r"witness)\b",
    re.IGNORECASE,
)


def banned_in(text: str) -> list[str]:
    return [match.group() for match in BANNED.finditer(" ".join(text.split()))]


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("The slot is nobody's.", ["nobody"]),
        ("Free so\n    many slots.", ["so many"]),
        ("The warehouse has witnesses.", []),  # a field of `health` has this plural as its name
    ],
)
def test_a_banned_word_is_found(sentence: str, found: list[str]) -> None:
    assert banned_in(sentence) == found


def test_plain_words() -> None:
    assert {file.name: words for file in FILES if (words := banned_in(file.text))} == {}
