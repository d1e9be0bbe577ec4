"""`hicache serve`: run the daemon in the foreground until it is told to stop."""

import logging
import os
import sys
import time
from pathlib import Path

import click

from hicache.assembly import assemble, remove_dead_arenas
from hicache.config import (
    ConfigError,
    LoadedConfig,
    Surroundings,
    check_against_machine,
    load_config,
    probe_machine,
    resolve_sizes,
)


@click.command()
@click.option(
    "--config",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The YAML file; see `hicache config schema` and configs/.",
)
@click.option("--endpoint", help="Listen here instead of where the file says.")
def serve(file: Path, endpoint: str | None) -> None:
    """Run the daemon in the foreground.

    SIGTERM and Ctrl-C stop it in order (what only memory holds is written to disk first), SIGHUP
    reads the configuration again.
    """
    around = Surroundings.of(os.environ, os.getuid())

    def load(other: str) -> LoadedConfig:
        return load_config(Path(other) if other else file, around)

    loaded = load("")
    remove_dead_arenas(loaded.config)
    probe = probe_machine(loaded.config)
    config = resolve_sizes(loaded.config, probe)
    if endpoint:
        socket = config.socket.model_copy(update={"endpoint": endpoint})
        config = config.model_copy(update={"socket": socket})
    _log_to_stderr(config.log_level)
    log = logging.getLogger("hicache")
    problems = check_against_machine(config, probe)
    if problems:
        for problem in problems:
            click.echo(f"{file}: {problem}", err=True)
        sys.exit(2)

    from hicache.daemon import Daemon
    from hicache.instance import AlreadyServed, Instance
    from hicache.tiers.arena import ArenaError

    try:
        instance = Instance(config.socket.endpoint)
        parts = assemble(config, _Progress())
        daemon = Daemon(config, parts, instance, load)
    except (AlreadyServed, ArenaError, ConfigError, ValueError, OSError) as error:
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


class _Progress:
    """Says now and then how far the memory is prepared."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._said_s > 2.0:
            self._said_s = time.monotonic()
            logging.getLogger("hicache").info(
                "%s: %.0f of %.0f MiB touched", what, done / 2**20, total / 2**20
            )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
