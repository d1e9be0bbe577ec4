"""Output that cannot be written: a full volume, a pipe that its reader closed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hicache.cli import COMMANDS

ASK = [*([name, "--help"] for name in COMMANDS), ["config", "schema"], ["doctor", "--no-measure"]]


def run(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def full_volume(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    with open("/dev/full", "w") as sink:
        return run(arguments, sink.fileno())


def closed_pipe(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(arguments, writer)
    finally:
        os.close(writer)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ASK, ids=" ".join)
def test_output_that_is_lost_is_a_sentence(arguments: list[str]) -> None:
    ran = full_volume(arguments)
    assert ran.returncode == 1
    assert ran.stderr.startswith("the output could not be written: ")
    assert ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ASK, ids=" ".join)
def test_a_pipe_that_its_reader_closed_ends_a_command_in_silence(arguments: list[str]) -> None:
    ran = closed_pipe(arguments)
    assert (ran.returncode, ran.stderr) == (1, "")
