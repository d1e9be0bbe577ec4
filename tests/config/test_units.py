"""Sizes and times, as written and as shown again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import Share, format_seconds, format_size, parse_seconds, parse_size
from hicache.config.units import (
    UnitError,
    format_flop_rate,
    format_rate,
    parse_flop_rate,
    parse_rate,
    parse_size_or_share,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("1.5 KiB", 1536),
        ("512mib", 512 << 20),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        (4096, 4096),
        (" 1KiB ", 1024),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "4096", "GiB", "8 Gi B", "-1GiB", "1e3", "٣KiB", None, 1.5, True, []]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(UnitError):
        parse_size_or_share(text)


def test_a_share_is_no_number_of_bytes_yet() -> None:
    assert parse_size_or_share("12.5%") == Share(0.125)
    assert Share(0.125).of(8 << 30) == 1 << 30
    assert str(Share(0.125)) == "12.5%"
    with pytest.raises(UnitError):
        parse_size("25%")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("2s", 2), ("1m", 60), ("3us", 3e-6), ("100ms", 0.1), (5, 5), (0.5, 0.5)],
)
def test_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "2 sec", "1h30m", "-1s", None, True, "5"])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(UnitError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_day"),
    [("200GiB/day", 200 << 30), ("8 MiB / h", 192 << 20), ("1GB/d", 10**9), (5, 5)],
)
def test_rates(text: object, bytes_per_day: int) -> None:
    assert parse_rate(text) == bytes_per_day


@pytest.mark.parametrize("text", ["200GiB", "25%/day", "5GiB/week", "/day", None, True, 1.5, "5"])
def test_what_is_no_rate(text: object) -> None:
    with pytest.raises(UnitError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "flop_per_s"),
    [("495TFLOP/s", 4.95e14), ("1.2 pflop / s", 1.2e15), ("80GFLOP/s", 8e10), (3.5e14, 3.5e14)],
)
def test_speeds_of_computing(text: object, flop_per_s: float) -> None:
    assert parse_flop_rate(text) == flop_per_s
    assert parse_flop_rate(format_flop_rate(flop_per_s)) == flop_per_s


@pytest.mark.parametrize("text", ["495TFLOP", "495T", "5e14", "TFLOP/s", "1TFLOP/h", None, True])
def test_what_is_no_speed_of_computing(text: object) -> None:
    with pytest.raises(UnitError):
        parse_flop_rate(text)


@given(st.integers(0, 1 << 50))
def test_a_rate_is_shown_as_it_can_be_read(bytes_per_day: int) -> None:
    assert parse_rate(format_rate(bytes_per_day)) == pytest.approx(bytes_per_day, rel=0.01)


@given(st.integers(0, 1 << 50))
def test_a_size_is_shown_as_it_can_be_read(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=0.01)


@given(st.floats(1e-9, 1e7))
def test_a_time_is_shown_as_it_can_be_read(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=1e-5)
