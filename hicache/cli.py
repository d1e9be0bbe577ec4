"""The command table of `hicache`.

Owns the list of commands, and how a failure is printed. A command's module is imported only when it
runs, so `hicache --help` stays quick and `hicache ping` needs no LMDB. Only commands read the
environment (`os.environ`).
"""

import importlib
import io
import os
import sys
from typing import Any

import click

from hicache import __version__

# name: (module, attribute, the line in `hicache --help`)
COMMANDS = {
    "serve": ("hicache.commands.serve", "serve", "Run the daemon."),
    "stats": ("hicache.commands.stats", "stats", "Show a daemon's tiers, traffic and decisions."),
    "tree": ("hicache.commands.tree", "tree", "Show which prefixes fill the tiers."),
    "explain": ("hicache.commands.explain", "explain", "Say why it was reloaded or recomputed."),
    "ping": ("hicache.commands.ping", "ping", "Check whether a daemon answers, and how fast."),
    "health": (
        "hicache.commands.health",
        "health",
        "Check whether a daemon is healthy.",
    ),
    "doctor": ("hicache.commands.doctor", "doctor", "Show what hicache finds on this machine."),
    "config": ("hicache.commands.config", "config", "Check, show and reload configurations."),
    "verify": ("hicache.commands.verify", "verify", "Check every block on disk."),
    "disk": ("hicache.commands.disk", "disk", "Repair a disk tier's folder."),
    "warm": ("hicache.commands.warm", "warm", "Copy a prompt to memory before it is requested."),
    "pin": ("hicache.commands.warm", "pin", "Keep a prompt's blocks for a time."),
    "unpin": ("hicache.commands.warm", "unpin", "Remove a pin."),
    "pins": ("hicache.commands.warm", "pins", "List the pins."),
    "demo": ("hicache.commands.demo", "demo", "Serve a small LLM with and without hicache."),
    "replay": (
        "hicache.commands.replay",
        "replay",
        "Replay request traces to compare policies and size tiers.",
    ),
    "bench": ("hicache.commands.bench", "bench", "Measure a daemon against this machine's floor."),
    "gpu-check": (
        "hicache.commands.gpu_check",
        "gpu_check",
        "Check everything that needs a GPU, on one.",
    ),
}


# Errors whose text is a sentence for the user: (module, class) and the exit status.
PLAIN_ERRORS = {
    ("hicache.config", "ConfigError"): 2,
    ("hicache.config.eviction", "PolicyError"): 2,
    ("hicache.tiers.errors", "TierUnavailable"): 2,
    ("hicache.client.session", "DaemonAbsent"): 1,
    ("hicache.client.session", "DaemonError"): 1,
}


class LazyGroup(click.Group):
    """Lists the commands by name and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}.{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hicache")
def cli() -> None:
    """KV-cache storage sidecar for LLM inference engines."""


class OutputLost(Exception):
    """The output of a command could not be written. Its text is a sentence, or empty where the
    reader of a pipe has closed it, as `| head` does."""


class _Output(io.FileIO):
    """Standard output. A failed write raises OutputLost, unlike any other OSError."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is still buffered
            is_closed = isinstance(error, BrokenPipeError)
            why = "" if is_closed else f"the output could not be written: {error.strerror}\n"
            raise OutputLost(why) from error


def main() -> None:
    """Runs the command line; a plain error is printed as a sentence, without traceback."""
    if (stdout := sys.__stdout__) is sys.stdout and stdout is not None:
        raw = _Output(stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            stdout.encoding,
            stdout.errors,
            line_buffering=stdout.isatty(),
        )
    try:
        code: Any = cli.main(prog_name="hicache", standalone_mode=False)
        sys.stdout.flush()
    except OutputLost as error:
        sys.stderr.write(str(error))
        sys.exit(1)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except tuple(plain_errors()) as error:
        print(error, file=sys.stderr)
        sys.exit(next(s for kind, s in plain_errors().items() if isinstance(error, kind)))
    sys.exit(code if isinstance(code, int) else 0)


def plain_errors() -> dict[type[Exception], int]:
    """The classes of plain errors with their exit status; other exceptions keep their traceback.

    Only modules that are imported are looked at: another cannot have raised.
    """
    return {
        getattr(sys.modules[module], name): status
        for (module, name), status in PLAIN_ERRORS.items()
        if module in sys.modules
    }
