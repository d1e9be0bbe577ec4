"""A volume that its kernel makes read-only after an error of its own, as ext4 does with
`errors=remount-ro`: a real one, in a file behind a loop device. Needs root, mkfs.ext4 and a kernel
that has both; skipped elsewhere."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon_process import DaemonProcess, blocks_of, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

IMAGE_BYTES = 256 << 20
SEEDS = range(12)  # more than memory holds
NUM_BLOCKS = 4


class Volume:
    """A file system in a file. Raises OSError or CalledProcessError where that cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "volume"
        self._image = folder / "image"
        self._device = ""
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-q", "-F", str(self._image))

    def mount(self) -> None:
        self._device = run("losetup", "--find", "--show", str(self._image)).strip()
        run("mount", "-o", "errors=remount-ro", self._device, str(self.path))

    def fail(self) -> None:
        """The kernel meets an error in its own records, and takes no more writes."""
        trigger = Path("/sys/fs/ext4") / Path(self._device).name / "trigger_fs_error"
        trigger.write_text("1")

    def is_let_go(self) -> bool:
        """Nobody holds a file of it any more, and it is unmounted."""
        try:
            run("umount", str(self.path))
        except subprocess.CalledProcessError:
            return False
        run("losetup", "--detach", self._device)
        return True

    def repair(self) -> None:
        run("fsck.ext4", "-fy", str(self._image), good=(0, 1))
        self.mount()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        subprocess.run(["losetup", "--detach", self._device], check=False, capture_output=True)


def run(*command: str, good: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in good:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    if os.getuid():
        pytest.skip("needs root, who alone may mount a volume")
    try:
        volume = Volume(tmp_path)
        volume.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs losetup, mkfs.ext4 and the right to mount, and this failed: {error}")
    yield volume
    volume.close()


def test_a_volume_that_turns_read_only(volume: Volume) -> None:
    """`health` says so, what is held is served, memory takes what comes. Once the worker has let go
    of it the volume is mended, and the tier is back by itself with all that was acknowledged."""
    disk = {"size": "128MiB", "path": str(volume.path / "blocks")}
    with DaemonProcess(hbm=None, dram={"size": "8MiB"}, disk=disk) as server:
        client = server.client()
        seeds = itertools.count(200)

        def is_durable() -> bool:
            tokens = prompt(next(seeds), NUM_BLOCKS)
            return client.put(tokens, blocks_of(tokens), durable=True).durable

        def serves_from_memory() -> None:
            for seed in range(100, 104):
                assert store(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
                assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS

        for seed in SEEDS:
            assert store(client, prompt(seed, NUM_BLOCKS), durable=True) == NUM_BLOCKS
        volume.fail()
        assert not is_durable()
        health = server.ask("health")
        assert health["tiers"]["disk"] == "read-only"
        assert "takes no new blocks" in health["problems"]["disk"]
        for seed in SEEDS:
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
        serves_from_memory()

        os.kill(server.worker("disk"), 9)
        wait_for(lambda: server.ask("health")["tiers"]["disk"] == "down", "a tier that is down")
        serves_from_memory()
        wait_for(volume.is_let_go, "a volume that nobody holds")
        volume.repair()
        wait_for(lambda: server.ask("health")["healthy"] and is_durable(), "its return", 120.0)
        for seed in SEEDS:
            assert read(client, prompt(seed, NUM_BLOCKS)) == NUM_BLOCKS
        assert not list((volume.path / "blocks").glob("aside-*"))
        assert server.stats()["errors"] == {}
