"""The option `--curve` of the commands that call a running daemon."""

from pathlib import Path

import click

from hicache.protocol.curve import CurveKeys


def _load(
    _: click.Context, parameter: click.Parameter, files: tuple[Path, Path] | None
) -> CurveKeys | None:
    try:
        return CurveKeys.load(*files) if files else None
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None


curve_option = click.option(
    "--curve",
    type=(click.Path(path_type=Path), click.Path(path_type=Path)),
    default=None,
    callback=_load,
    metavar="MY.key_secret DAEMON.key",
    help="For a daemon on tcp:// with CURVE keys.",
)
