"""`hicache serve`: run the daemon in the foreground until a signal stops it."""

import logging
import os
import sys
import time
from pathlib import Path

import click
from pydantic import ValidationError

from hicache.config import (
    ConfigError,
    LoadedConfig,
    SocketConfig,
    Surroundings,
    check_against_machine,
    load_config,
    probe_machine,
    resolve_sizes,
)
from hicache.config.messages_for_people import Mistake, mistakes_of
from hicache.config.units import UnitError, parse_size
from hicache.daemon.build import assemble, remove_dead_arenas
from hicache.daemon.curve_auth import check_keys
from hicache.daemon.upkeep.heap import fill_small_buffers, limit_heaps


def _as_bytes(_: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except UnitError as error:
        raise click.BadParameter(f"{value!r}: expected {error}", param=param) from None


@click.command()
@click.option(
    "--config",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The YAML file; see `hicache config schema` and configs/.",
)
@click.option("--endpoint", help="Listen here instead of at the file's endpoint.")
@click.option(
    "--record",
    "record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the requests, as hashes, to a trace for `hicache replay`. A FILE that is full, or "
    "exists at start, becomes FILE.1.",
)
@click.option(
    "--record-size",
    default="256MiB",
    show_default=True,
    callback=_as_bytes,
    metavar="SIZE",
    help="The size at which FILE is full.",
)
def serve(file: Path, endpoint: str | None, record: Path | None, record_size: int) -> None:
    """Run the daemon in the foreground.

    SIGTERM and Ctrl-C stop it in order (blocks that are only in memory are written to disk first),
    SIGHUP reads the configuration again.
    """
    limit_heaps()
    fill_small_buffers()
    around = Surroundings.of(os.environ, os.getuid())
    log = logging.getLogger("hicache")

    def load(other: str) -> LoadedConfig:
        if other and not os.path.isfile(other):  # reading a pipe would block the loop
            raise ConfigError(other, [Mistake((), "cannot be read: there is no such file")])
        loaded = load_config(Path(other) if other else file, around)
        for warning in loaded.warnings:
            log.warning("%s", warning)
        return loaded

    loaded = load("")
    probe = probe_machine(loaded.config)
    config = resolve_sizes(loaded.config, probe)
    kept = remove_dead_arenas(config)
    probe = probe_machine(config, gpus=probe.gpus, adopted_bytes=kept)
    if endpoint:
        config = config.model_copy(update={"socket": _listening_at(endpoint, config.socket)})
    _log_to_stderr(config.log_level)
    problems = check_against_machine(config, probe) + check_keys(config.socket)
    if problems:
        for problem in problems:
            click.echo(f"{file}: {problem}", err=True)
        sys.exit(2)

    from hicache.daemon.loop import Daemon
    from hicache.daemon.socket_lock import AlreadyServed, SocketLock
    from hicache.daemon.upkeep.trace import TraceRecorder
    from hicache.tiers.arena import ArenaError

    parts = None
    try:
        locks = [SocketLock(config.socket.endpoint)]
        if config.events.endpoint is not None:
            locks.append(SocketLock(config.events.endpoint, "events.endpoint"))
        parts = assemble(config, probe.gpus, _Progress())
        recorder = TraceRecorder(record, record_size) if record is not None else None
        daemon = Daemon(config, parts, locks, load, recorder)
    except (AlreadyServed, ArenaError, ConfigError, ValueError, OSError) as error:
        if parts is not None:
            parts.close()
        click.echo(f"hicache cannot start: {error}", err=True)
        sys.exit(1)
    for spec in parts.tiers:
        note = f" ({parts.notes[spec.name]})" if parts.notes.get(spec.name) else ""
        log.info(
            "%s: %.0f MiB of %s%s",
            spec.name,
            spec.capacity_bytes / 2**20,
            parts.media[spec.name],
            note,
        )
    log.info("pid %d listens on %s", os.getpid(), config.socket.endpoint)
    daemon.run()


def _listening_at(endpoint: str, socket: SocketConfig) -> SocketConfig:
    """Checked like the file's: other machines need keys to reach it. Raises ConfigError."""
    values = {**socket.model_dump(), "endpoint": endpoint}
    try:
        return SocketConfig.model_validate(values)
    except ValidationError as error:
        found = mistakes_of(SocketConfig, values, error.errors(include_url=False))
        raise ConfigError("--endpoint", found) from None


class _Progress:
    """Logs every two seconds how much of the memory was touched."""

    def __init__(self) -> None:
        self._logged_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._logged_s > 2.0:
            self._logged_s = time.monotonic()
            logging.getLogger("hicache").info(
                "%s: %.0f of %.0f MiB touched", what, done / 2**20, total / 2**20
            )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
