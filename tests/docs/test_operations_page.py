"""docs/operations.md and the compose file: what they name is there."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from hicache.cli import cli
from hicache.config import Surroundings, load_config
from tests.docs.pages import DOCS, PAGES, ROOT
from tests.e2e.daemon_process import DaemonProcess, prompt, store

PAGE = (DOCS / "operations.md").read_text()
ROW = re.compile(r"^\| (`.+?) \| ", re.M)


def fields() -> list[str]:
    """The names in the table of `stats --json`."""
    table = PAGE.split("| field | meaning |")[1].split("\n\n")[0]
    return [name for row in ROW.findall(table) for name in re.findall(r"`([^`]+)`", row)]


def has(value: Any, path: list[str]) -> bool:
    if not path:
        return True
    name = path[0].removesuffix("[]")
    if name not in value:
        return False
    inner = value[name]
    return has(inner[0] if path[0].endswith("[]") else inner, path[1:])


@pytest.mark.e2e
def test_every_field_of_the_table_is_in_stats() -> None:
    named = fields()
    assert len(named) >= 40
    with DaemonProcess() as server:
        store(server.client(), prompt(1, 4))
        stats = server.stats()
    assert not [name for name in named if not has(stats, name.split("."))]


def test_every_command_that_it_names_exists() -> None:
    named = {
        tuple(words.split())
        for page in PAGES
        for words in re.findall(r"`hicache ([a-z-]+(?: [a-z]+)?)", page.read_text())
    }
    with click.Context(cli) as context:
        for command, *more in named:
            found = cli.get_command(context, command)
            assert found, f"hicache {command}"
            if isinstance(found, click.Group) and more:
                assert found.get_command(context, more[0]), f"hicache {command} {more[0]}"


def test_the_configuration_of_the_compose_file_is_valid(tmp_path: Path) -> None:
    compose = yaml.safe_load((DOCS / "vllm-compose.yaml").read_text())
    file = tmp_path / "hicache.yaml"
    file.write_text(compose["configs"]["hicache"]["content"])
    config = load_config(file, Surroundings.of({}, 1000)).config
    folders = {volume.split(":")[1] for volume in compose["services"]["hicache"]["volumes"]}
    assert config.tiers.disk is not None
    assert str(config.tiers.disk.path) in folders


def test_every_configuration_that_a_page_shows_in_full_is_valid(tmp_path: Path) -> None:
    shown = [
        body
        for page in PAGES
        for body in re.findall(r"^```yaml config\n(.*?)^```$", page.read_text(), re.S | re.M)
    ]
    assert shown
    for number, body in enumerate(shown):
        file = tmp_path / f"{number}.yaml"
        file.write_text(body)
        load_config(file, Surroundings.of({}, 1000))


def test_every_line_of_the_log_that_it_quotes_is_one() -> None:
    """Its fixed words are in the product; an ellipsis stands for the rest, `disk` for any tier."""
    code = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for room in ("hicache", "engine", "transfer")
        for file in (ROOT / room).rglob("*.py")
    )
    table = PAGE.split("| line | meaning |")[1].split("\n\n")[0]
    quoted = [line for row in ROW.findall(table) for line in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 6
    for line in quoted:
        for piece in line.removeprefix("disk ").split("…"):
            assert piece.strip(" :)") in code, line
