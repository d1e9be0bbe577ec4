"""The connector's parts that need no engine: weights, namespaces, pages, settings, refusals."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hicache.connectors.vllm as package
from hicache.client.aio import in_thread
from hicache.client.gpu_pages import SharedPages
from hicache.connectors.vllm.background import Background, Trouble
from hicache.connectors.vllm.namespace import (
    EngineFacts,
    namespace_spec,
    refuse_by_cache,
    refuse_by_config,
)
from hicache.connectors.vllm.options import Options, check_failure_policy
from hicache.connectors.vllm.rank_clients import RankClients
from hicache.connectors.vllm.step_messages import NamespaceIdentity, WorkerReport
from hicache.connectors.vllm.vllm_pages import (
    DevicePages,
    UnsupportedLayout,
    layout_of,
    page_rows,
    pages_of,
    share,
)
from hicache.connectors.vllm.weights import digest_adapter, digest_files
from hicache.protocol.keys import NamespaceSpec
from hicache.transfer.gpu_pages.cuda_ipc import NotShareable
from tests.connectors.vllm_memory import AsyncMemory, AsyncMemoryClient


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, values in tensors.items():
        offsets = [start, start + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        start += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def weights(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    return {f"layer.{i}": chance.random((64, 50), np.float32) for i in range(3)}


# --- weights -------------------------------------------------------------------------------------


def test_a_digest_is_of_the_content_and_not_of_the_path(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one" / "model.safetensors", weights(1))
    write_safetensors(tmp_path / "two" / "other-name.safetensors", weights(1))
    write_safetensors(tmp_path / "three" / "model.safetensors", weights(2))
    one, two, three = (digest_files(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = weights(1)
    write_safetensors(tmp_path / "one" / "model.safetensors", whole)
    for number, (name, values) in enumerate(whole.items()):
        write_safetensors(tmp_path / "two" / f"model-{number}.safetensors", {name: values})
    assert digest_files(tmp_path / "one") == digest_files(tmp_path / "two")


def test_a_fine_tune_of_one_tensor_differs(tmp_path: Path) -> None:
    tuned = weights(1)
    tuned["layer.1"] = tuned["layer.1"] * np.float32(1.001)
    write_safetensors(tmp_path / "one" / "model.safetensors", weights(1))
    write_safetensors(tmp_path / "two" / "model.safetensors", tuned)
    assert digest_files(tmp_path / "one") != digest_files(tmp_path / "two")


def test_other_files_and_adapters(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(np.random.default_rng(1).bytes(3 << 20))
    assert digest_files(file) == digest_files(tmp_path)
    before = digest_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert digest_adapter(tmp_path) != before
    with file.open("r+b") as data:
        data.seek(1 << 20)
        data.write(b"changed")
    assert digest_adapter(tmp_path) != before


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100])
def test_what_tells_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"no weights|no safetensors"):
        digest_files(tmp_path)


# --- namespaces ----------------------------------------------------------------------------------

FACTS = EngineFacts(
    vllm_version="0.32.0",
    hf_config={"model_type": "llama", "rope_theta": 1e4, "_name_or_path": "/here"},
    architectures=["LlamaForCausalLM"],
    model_dtype="torch.bfloat16",
    cache_dtype="auto",
    quantisation="",
    max_model_len=4096,
    attention=["CPU_ATTN", "vec"],
    kv_heads=3,
    head_dim=64,
    block_tokens=32,
    tp_rank=0,
    tp_size=1,
    model="/here",
    revision=None,
    load_format="auto",
    weights_digest="w",
)


def caches(layers: int = 2, shape: tuple[int, ...] = (5, 3, 32, 128)) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]


def test_geometry_comes_from_the_cache() -> None:
    spec = namespace_spec(FACTS, caches())
    assert spec.block_bytes == 2 * 3 * 32 * 128 * 2
    assert (spec.groups[0].layers, spec.groups[0].kv_heads, spec.block_tokens) == (2, 3, 32)
    moved = replace(FACTS, hf_config={**FACTS.hf_config, "_name_or_path": "/there"}, model="/there")
    assert namespace_spec(moved, caches()).digest() == spec.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"vllm_version": "0.33.0"},
        {"hf_config": {"model_type": "llama", "rope_theta": 1e5}},
        {"model_dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"attention": ["CPU_ATTN", "amx"]},
        {"quantisation": "awq"},
        {"weights_digest": "w2"},
        {"tp_rank": 1, "tp_size": 2},
    ],
    ids=str,
)
def test_what_changes_bytes_changes_the_namespace(change: dict[str, Any]) -> None:
    changed = namespace_spec(replace(FACTS, **change), caches())
    assert changed.digest() != namespace_spec(FACTS, caches()).digest()


def test_weights_that_nobody_can_tell() -> None:
    changes: list[dict[str, Any]] = [{"load_format": "dummy"}, {"model": "/nowhere/at/all"}]
    for change in changes:
        with pytest.raises(UnsupportedLayout, match="weights_digest"):
            namespace_spec(replace(FACTS, weights_digest="", **change), caches())


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="differ"):
        namespace_spec(FACTS, [*caches(1), *caches(1, (5, 4, 32, 128))])


def kind(name: str, **fields: Any) -> Any:
    return type(name, (), {"block_size": 16, "sliding_window": None, **fields})()


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([kind("FullAttentionSpec"), kind("SlidingWindowSpec")], "2 groups"),
        ([kind("SlidingWindowSpec", sliding_window=4096)], "sliding-window"),
        ([kind("ChunkedLocalAttentionSpec", attention_chunk_size=8192)], "chunked"),
        ([kind("MLAAttentionSpec")], "MLAAttentionSpec"),
        ([kind("MambaSpec")], "MambaSpec"),
        ([], "0 groups"),
    ],
)
def test_caches_that_are_refused(groups: list[Any], why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        refuse_by_cache([SimpleNamespace(kv_cache_spec=spec) for spec in groups])


def test_windows_beside_full_attention_are_held() -> None:
    """vLLM keeps such layers as it keeps the others, and writes the window down."""
    spec = kind("FullAttentionSpec", sliding_window=4096)
    refuse_by_cache([SimpleNamespace(kv_cache_spec=spec)])


def config(**changes: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in parallel.items()}),
        cache_config=SimpleNamespace(calculate_kv_scales=changes.get("scales", False)),
        speculative_config=changes.get("speculative"),
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"decode_context_parallel_size": 2}, "context"),
        ({"scales": True}, "scales"),
        ({"speculative": SimpleNamespace(method="eagle")}, "eagle"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], why: str) -> None:
    refuse_by_config(config())
    refuse_by_config(config(speculative=SimpleNamespace(method="ngram")))
    with pytest.raises(UnsupportedLayout, match=why):
        refuse_by_config(config(**changes))


# --- pages ---------------------------------------------------------------------------------------


def test_blocks_go_into_pages_and_out_again() -> None:
    chance = np.random.default_rng(1)
    # One allocation for all layers; heads and tokens within a page have changed places.
    whole = torch.zeros((2, 7, 4, 3, 8), dtype=torch.float32)
    layers = [whole[i].permute(0, 2, 1, 3) for i in range(2)]
    pages = pages_of(layers, 7)
    assert pages.block_bytes == 2 * 4 * 3 * 8 * 4
    blocks = [np.frombuffer(chance.bytes(pages.block_bytes), np.uint8) for _ in range(3)]
    pages.write([6, 0, 3], blocks)
    assert not whole[:, [1, 2, 4, 5]].any()
    read = pages.reader([6, 0, 3])
    for index, block in enumerate(blocks):
        out = np.zeros(pages.block_bytes, np.uint8)
        read(index, out)
        assert np.array_equal(out, block)
    first = whole[0, 6].contiguous().view(torch.uint8).flatten().numpy()
    assert np.array_equal(first, blocks[0][: pages.block_bytes // 2])


def test_pages_that_are_no_piece_of_memory() -> None:
    with pytest.raises(UnsupportedLayout, match="gaps"):
        page_rows(torch.zeros((5, 4, 8))[:, :, :6], 5)
    with pytest.raises(UnsupportedLayout, match="begin with"):
        page_rows(torch.zeros((2, 5, 4, 8)), 5)  # K and V apart, as vLLM once had them


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_the_gpu_worker_is_told_where_each_page_lies(order: str) -> None:
    """By vLLM's names of its layouts: the logical shape is [layer, block, head, token, content]."""
    sizes = {"L": 3, "B": 7, "H": 2, "N": 4, "C": 10}
    whole = torch.arange(3 * 7 * 2 * 4 * 10, dtype=torch.int16)
    logical = whole.reshape([sizes[name] for name in order]).permute(
        [order.index(name) for name in "LBHNC"]
    )
    layers = [page_rows(layer, 7) for layer in logical]
    layout = layout_of(layers)
    assert layout.block_bytes == 3 * 2 * 4 * 10 * 2
    copied = np.zeros(layout.block_bytes, np.uint8)
    addresses = np.array([copied.ctypes.data], np.uint64)
    planes, page = range(3), np.array([[5]], np.int32)
    for to, source, size in layout.pieces(addresses, page, planes, to_blocks=True).tolist():
        ctypes.memmove(to, source, size)
    expected = np.concatenate([rows[5].numpy() for rows in layers])
    assert np.array_equal(copied, expected)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_heads_outside_the_blocks_are_refused(order: str) -> None:
    sizes = {"L": 3, "B": 7, "H": 2, "N": 4, "C": 10}
    whole = torch.zeros([sizes[name] for name in order])
    logical = whole.permute([order.index(name) for name in "LBHNC"])
    with pytest.raises(UnsupportedLayout, match="gaps"):
        page_rows(logical[0], 7)


def test_pages_that_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    """Each with a sentence; in host memory nobody expects it."""
    caplog.set_level("INFO", "hicache.vllm")
    rows = [page_rows(cache, 5) for cache in caches()]
    assert share(pages_of(caches(), 5), may_sleep=True) is None
    assert not caplog.messages
    assert share(DevicePages(rows), may_sleep=False) is None
    shared = SharedPages("0000:00:00.0", (), np.zeros((0, 4), np.uint64), 1, 1)
    assert share(SimpleNamespace(shared=lambda: shared), may_sleep=True) is None
    assert share(SimpleNamespace(shared=lambda: shared), may_sleep=False) is shared
    for message, reason in zip(caplog.messages, ("CuPy", "may sleep"), strict=True):
        assert message.startswith("hicache: blocks are copied by this process itself: ")
        assert reason in message
    with pytest.raises(NotShareable, match="several sizes"):
        layout_of([torch.zeros((5, 16), dtype=torch.uint8), torch.zeros((5, 8), dtype=torch.uint8)])


# --- settings ------------------------------------------------------------------------------------


def test_settings() -> None:
    assert Options.of({}) == Options()
    assert Options.of({"lookup_s": 1, "endpoint": "ipc:///x"}).lookup_s == 1.0
    for wrong in ({"lookups_s": 1}, {"lookup_s": "1"}, {"load_s": 0}, {"store_share": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options.of(wrong)


def test_the_failure_policy_is_checked_at_the_start() -> None:
    check_failure_policy("recompute")
    with pytest.raises(ValueError, match="kv_load_failure_policy"):
        check_failure_policy("fail")


def test_reports_of_ranks_are_added_up() -> None:
    one = WorkerReport({1: 1, 2: 1}, {2}, {1: 3})
    assert one.aggregate(WorkerReport({1: 1}, {1}, {1: 2})) == WorkerReport(
        {1: 2, 2: 1}, {1, 2}, {1: 3}
    )
    doubts = WorkerReport(doubted=[7, 8]).aggregate(WorkerReport(doubted=[7], rested=[3]))
    assert (doubts.doubted, doubts.rested) == ([7, 8, 7], [3])
    assert doubts
    assert not WorkerReport()


class Leaving(AsyncMemoryClient):
    """One of several, whose goodbye takes for ever, fails or is said."""

    number, said = 0, False

    async def close(self) -> None:
        if self.number == 0:
            await asyncio.Event().wait()
        if self.number == 1:
            raise RuntimeError("no goodbye")
        self.said = True


def test_a_goodbye_that_hangs_or_fails_costs_no_other() -> None:
    memory, trouble, made = AsyncMemory(), Trouble(), list[Leaving]()
    background = Background("test-close", trouble)

    def connect(spec: NamespaceSpec, group: bytes) -> Leaving:
        made.append(Leaving(memory, spec, group))
        made[-1].number = len(made) - 1
        return made[-1]

    clients = RankClients(namespace_spec(FACTS, caches()), connect, background, None)

    async def close() -> None:
        for version in range(3):
            clients.storer(NamespaceIdentity(weights_version=version))
        await clients.close()

    background.submit(partial(asyncio.sleep, 0))
    background.close(close, 0.2)
    assert [one.said for one in made] == [False, False, True]
    assert trouble.count == 2, "the first and the second"


def test_nothing_is_left_under_way_by_a_close(caplog: pytest.LogCaptureFixture) -> None:
    """A load that was ended began another task, to tell of its pages, and nobody ended that one:
    "Task was destroyed but it is pending!"."""

    def closed() -> None:
        background = Background("test-close", Trouble())

        async def load() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                background.submit(rest)

        async def rest() -> None:
            await asyncio.Event().wait()

        background.submit(load)
        background.close(partial(asyncio.sleep, 0), 5.0)

    closed()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_nothing_begins_after_a_close() -> None:
    background = Background("test-closed", Trouble())
    begun: list[str] = []

    async def task() -> None:
        begun.append("task")

    background.submit(task)
    background.close(partial(asyncio.sleep, 0), 5.0)
    background.submit(task)
    background.close(task, 5.0)
    assert begun == ["task"]
    assert "test-closed" not in {thread.name for thread in threading.enumerate()}


def test_a_close_takes_nothing_back_under_a_copy() -> None:
    """The copy's own task was ended, and not the copy: slots of a store were given back to the
    daemon while a thread still wrote them."""
    background = Background("test-close", Trouble())
    begun, may_end = threading.Event(), threading.Event()
    steps: list[str] = []

    def copy() -> None:
        begun.set()
        may_end.wait()
        steps.append("copied")

    async def store() -> None:
        try:
            await in_thread(copy)
        finally:
            steps.append("given back")

    async def last() -> None:
        background.submit(store)
        await asyncio.to_thread(begun.wait)
        asyncio.get_running_loop().call_later(0.02, may_end.set)

    background.submit(partial(asyncio.sleep, 0))
    background.close(last, 60.0)
    may_end.set()
    assert steps == ["copied", "given back"]


def test_the_package_is_importable_without_vllm() -> None:
    with pytest.raises(AttributeError):
        _ = package.Nothing
