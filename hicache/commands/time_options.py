"""Options that are a time: `250ms`, `2s`, `1m`, or a number of seconds, within bounds."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from hicache.config.units import UnitError, format_seconds, parse_seconds
from hicache.protocol.operations import MAX_DEADLINE_S

Command = TypeVar("Command", bound=Callable[..., Any])


def seconds_option(
    flag: str, name: str, default: str, low_s: float, high_s: float, text: str
) -> Callable[[Command], Command]:
    """A value out of bounds is a usage error, before a daemon is called."""

    def read(_: click.Context, parameter: click.Parameter, value: str) -> float:
        try:
            seconds = _seconds(value)
        except UnitError as error:
            raise click.BadParameter(str(error), param=parameter) from None
        if not low_s <= seconds <= high_s:
            bounds = f"{format_seconds(low_s)} … {format_seconds(high_s)}"
            raise click.BadParameter(f"{value} is outside {bounds}", param=parameter)
        return seconds

    return click.option(
        flag, name, default=default, show_default=True, callback=read, metavar="TIME", help=text
    )


def timeout_option(default: str, text: str = "How long to wait.") -> Callable[[Command], Command]:
    """`--timeout`, as `timeout_s`."""
    return seconds_option("--timeout", "timeout_s", default, 0.0, MAX_DEADLINE_S, text)


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return parse_seconds(value)
