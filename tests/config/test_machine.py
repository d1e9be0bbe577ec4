"""Sizes against memory, /dev/shm and the disk's volume, on machines that do not exist."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import (
    Config,
    MachineProbe,
    Share,
    Surroundings,
    Volume,
    check_against_machine,
    parse_config,
    probe_machine,
    resolve_sizes,
)
from hicache.tiers.hbm import CONTEXT_BYTES
from hicache.tiers.hbm_probe import Gpu, Gpus, look

GIB = 1 << 30
AROUND = Surroundings(home="/home/op", endpoint="ipc:///tmp/x.sock")
MACHINE = MachineProbe(
    memory_total_bytes=64 * GIB,
    memory_available_bytes=48 * GIB,
    volumes={
        "/dev/shm": Volume(32 * GIB, 32 * GIB, mount="/dev/shm"),
        "/d": Volume(100 * GIB, 50 * GIB, mount="/"),
    },
)
ONE_GPU = replace(MACHINE, gpus=Gpus((Gpu(0, 80 * GIB, 60 * GIB),), trouble=""))


def tiers(text: str) -> Config:
    return parse_config(f"tiers: {text}", "x.yaml", AROUND).config


def test_shares_become_bytes() -> None:
    config = tiers("{hbm: {size: 10%}, dram: {size: 25%}, disk: {size: 50%, path: /d}}")
    on_host = resolve_sizes(config, MACHINE).tiers
    assert on_host.hbm is not None
    assert on_host.disk is not None
    assert on_host.hbm.size_bytes == int(6.4 * GIB)
    assert on_host.dram.size_bytes == 16 * GIB
    assert on_host.disk.size_bytes == 50 * GIB
    on_gpu = resolve_sizes(config, ONE_GPU).tiers
    assert on_gpu.hbm is not None
    assert on_gpu.hbm.size_bytes == 8 * GIB


@pytest.mark.parametrize("total_gib", [20, 24, 40, 80, 141, 192])
def test_a_gpu_of_which_nobody_said_how_much_has_room_for_an_inference_engine(
    total_gib: int,
) -> None:
    """vLLM takes 92% of it, if nobody says more."""
    gpus = Gpus((Gpu(0, total_gib * GIB, total_gib * GIB),), trouble="")
    config = resolve_sizes(tiers("{hbm: auto, dram: {size: 1GiB}}"), replace(MACHINE, gpus=gpus))
    assert config.tiers.hbm is not None
    used = config.tiers.hbm.size_bytes + CONTEXT_BYTES
    assert used <= int(0.08 * total_gib * GIB)
    assert config.tiers.hbm.size_bytes >= GIB


@pytest.mark.parametrize(
    ("text", "key", "sentence"),
    [
        ("{dram: {size: 40GiB}}", "tiers.dram.size", "only 32GiB is free there"),
        (
            "{dram: {size: 20GiB}, hbm: {size: 20GiB, device: host}}",
            "tiers.dram.size and tiers.hbm.size",
            "40GiB in /dev/shm",
        ),
        ("{dram: {size: 100%, path: /d}}", "tiers.dram.size", "of which 5% must stay"),
        ("{dram: {size: 49GiB, path: /d}}", "tiers.dram.size", "48GiB of memory free now"),
        ("{dram: {size: 1GiB}, disk: {size: 50GiB, path: /d}}", "tiers.disk.size", "min_free"),
        (
            "{dram: {size: 1GiB}, hbm: {size: 50%, device: cuda:3}}",
            "tiers.hbm.device",
            "cuda:3: the GPUs have not been probed; give host to emulate it",
        ),
    ],
)
def test_what_does_not_fit_is_a_sentence(text: str, key: str, sentence: str) -> None:
    problems = check_against_machine(tiers(text), MACHINE)
    assert any(problem.key == key and sentence in problem.sentence for problem in problems), (
        problems
    )


def test_what_fits_is_no_problem() -> None:
    config = tiers("{hbm: {size: 1GiB}, dram: {size: 16GiB}, disk: {size: 40%, path: /d}}")
    assert check_against_machine(config, MACHINE) == []


def test_what_an_earlier_run_holds_counts_as_room() -> None:
    """A restarted daemon re-adopts its arena: it must not be refused for its own bytes."""
    config = tiers("{dram: {size: 30GiB}}")
    held = Volume(32 * GIB, 2 * GIB, mount="/dev/shm")
    taken = replace(MACHINE, memory_available_bytes=4 * GIB, volumes={"/dev/shm": held})
    assert len(check_against_machine(config, taken)) == 2
    ours = replace(taken, volumes={"/dev/shm": replace(held, ours_bytes=30 * GIB)})
    assert check_against_machine(config, ours) == []


def test_a_gpu_without_so_much_free_memory() -> None:
    """What another program holds of it cannot be had, nor what CUDA takes for the worker."""
    fits = tiers("{dram: {size: 1GiB}, hbm: {size: 59GiB, device: cuda:0}}")
    assert check_against_machine(fits, ONE_GPU) == []
    for size in ("60GiB", "90GiB", "75%"):
        config = tiers(f"{{dram: {{size: 1GiB}}, hbm: {{size: {size}}}}}")
        (problem,) = check_against_machine(config, ONE_GPU)
        assert problem.key == "tiers.hbm.size"
        assert "that cuda:0 can give: of its 80GiB, 60GiB are free" in problem.sentence


def test_auto_picks_a_gpu_where_there_is_one() -> None:
    hbm = tiers("{dram: {size: 1GiB}, hbm: {size: 1GiB}}").tiers.hbm
    assert hbm is not None
    assert MACHINE.is_emulated(hbm)
    assert not ONE_GPU.is_emulated(hbm)
    assert ONE_GPU.device(hbm).index == 0


def test_hbm_on_a_gpu_takes_no_room_in_shared_memory() -> None:
    config = tiers("{dram: {size: 20GiB}, hbm: {size: 50GiB}}")
    assert check_against_machine(config, ONE_GPU) == []
    assert "tiers.hbm.size" in check_against_machine(config, MACHINE)[0].key


def test_a_machine_without_a_gpu_says_why() -> None:
    gpus = look()
    assert bool(gpus.found) != bool(gpus.trouble)


def test_probe_looks_at_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet"
    config = tiers(f"{{dram: {{size: 1%}}, disk: {{size: 1%, path: {path}}}}}")
    probe = probe_machine(config, adopted_bytes={"/dev/shm": 5})
    assert probe.memory_total_bytes >= probe.memory_available_bytes > 0
    assert probe.volumes["/dev/shm"].ours_bytes == 5
    assert probe.volumes[str(path)].ours_bytes == 0
    path.mkdir(parents=True)
    (path / "data.mdb").write_bytes(b"x" * 100_000)
    assert probe_machine(config).volumes[str(path)].ours_bytes >= 100_000
    assert resolve_sizes(config, probe).tiers.dram.size_bytes > 0
    assert not isinstance(resolve_sizes(config, probe).tiers.dram.size, Share)
