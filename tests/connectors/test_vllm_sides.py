"""The connector's two sides under an engine that schedules as vLLM does (tests/connectors/
vllm_engine.py): what comes out is what a model without a cache says, whatever the daemon does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hicache.client.gpu_pages import SharedPages
from hicache.connectors.vllm import background
from hicache.connectors.vllm.published_hashes import PublishedHashes
from hicache.connectors.vllm.scheduler_side import MAX_LOADING
from tests.connectors.vllm_engine import BLOCK_TOKENS, Engine
from tests.connectors.vllm_memory import AsyncMemory
from tests.connectors.vllm_scenes import Make, check, request, tokens, until


@pytest.fixture
def memory() -> AsyncMemory:
    return AsyncMemory()


@pytest.fixture
def engine(memory: AsyncMemory) -> Iterator[Make]:
    """Makes engines on the same memory, and closes them."""
    made: list[Engine] = []

    def make(**more: Any) -> Engine:
        made.append(Engine(memory.asker, memory.mover, **more))
        return made[-1]

    yield make
    for gate in memory.gates.values():
        gate.set()
    for one in made:
        one.close()


# --- store and load -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_one_engine_stores_another_loads(
    memory: AsyncMemory, engine: Make, num_ranks: int
) -> None:
    prompts = [tokens(seed, 5 + 7 * seed) for seed in range(6)]
    first = engine(num_ranks=num_ranks)
    check(first.run(*(request(f"a{i}", p) for i, p in enumerate(prompts))), num_ranks)
    second = engine(num_ranks=num_ranks)
    again = second.run(*(request(f"b{i}", p) for i, p in enumerate(prompts)))
    check(again, num_ranks)
    for one, prompt in zip(again, prompts, strict=True):
        assert one.num_cached == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert not memory.leases, "a lease was not given back"


def test_generated_blocks_are_stored_too(engine: Make) -> None:
    (first,) = engine().run(request("a", tokens(1, 9), max_tokens=12))
    conversation = first.all_token_ids[:-1] + tokens(2, 5)
    (again,) = engine().run(request("b", conversation))
    check([first, again])
    assert again.num_cached == (len(first.all_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_only_what_the_engine_lacks_is_loaded(memory: AsyncMemory, engine: Make) -> None:
    long = tokens(1, 41)
    engine().run(request("a", long))
    one = engine()
    one.run(request("b", long[:21]))  # from now on its own
    memory.calls.clear()
    (again,) = one.run(request("c", long))
    check([again])
    assert again.num_cached == 40
    assert one.side.counters.load_tokens == 20 + 20
    assert not memory.leases


def test_a_local_hit_of_everything_loads_nothing(memory: AsyncMemory, engine: Make) -> None:
    one = engine()
    one.run(request("a", tokens(1, 41)))
    (again,) = one.run(request("b", tokens(1, 41)))
    check([again])
    assert again.num_cached == 40
    assert one.side.counters.loads == 0
    assert not memory.leases


def test_the_planners_decision_is_the_number_of_tokens(memory: AsyncMemory, engine: Make) -> None:
    engine().run(request("a", tokens(1, 41)))
    memory.advice = 3
    (part,) = engine().run(request("b", tokens(1, 41)))
    memory.advice = 0
    (none,) = engine().run(request("c", tokens(1, 41)))
    check([part, none])
    assert (part.num_cached, none.num_cached) == (12, 0)


def test_chunked_prefill(engine: Make) -> None:
    prompts = [tokens(seed, 50) for seed in range(3)]
    check(engine(budget=7).run(*(request(f"a{i}", p) for i, p in enumerate(prompts))))
    again = engine(budget=7).run(*(request(f"b{i}", p) for i, p in enumerate(prompts)))
    check(again)
    assert [one.num_cached for one in again] == [48] * 3


def test_guessed_tokens_are_not_stored(engine: Make) -> None:
    """A step of speculative decoding computes more tokens than the request has: four guesses would
    fill its second block."""
    one, asked = engine(), request("a", tokens(1, 6))
    asked.pages = [one.pool.take() for _ in range(3)]
    one.add(asked)
    asked.num_computed_tokens = 5
    orders = one.side.orders({"a": 1 + 4}, lambda name: asked.pages)
    assert [(store.first, store.pages) for store in orders.stores] == [(0, tuple(asked.pages[:1]))]


def test_requests_that_share_a_prompt(memory: AsyncMemory, engine: Make) -> None:
    """n > 1: the same prompt several times at once."""
    engine().run(request("a", tokens(1, 41)))
    same = engine().run(*(request(f"b_{i}", tokens(1, 41)) for i in range(4)))
    check(same)
    assert not memory.leases


def test_one_token_and_short_prompts(memory: AsyncMemory, engine: Make) -> None:
    warm_ups = [request(f"w{n}", tokens(n, n), max_tokens=1) for n in range(1, 6)]
    check(engine().run(*warm_ups))
    assert len(memory.blocks) == 2  # of four and of five tokens


# --- whose blocks -------------------------------------------------------------------------------


def test_salts_and_adapters_are_namespaces_of_their_own(
    memory: AsyncMemory, engine: Make, tmp_path: Any
) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"an adapter" * 100)
    lora = SimpleNamespace(
        lora_name="l", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False
    )
    one, prompt = engine(), tokens(1, 21)
    plain = request("a", prompt)
    salted = request("b", prompt, cache_salt="mine")
    adapted = request("c", prompt, lora_request=lora)
    check(one.run(plain, salted, adapted))
    two = engine()
    again = [
        request("d", prompt),
        request("e", prompt, cache_salt="mine"),
        request("f", prompt, cache_salt="other's"),
        request("g", prompt, lora_request=lora),
    ]
    check(two.run(*again))
    assert [r.num_cached for r in again] == [20, 20, 0, 20]
    assert len({(s.cache_salt, s.lora_digest) for s in memory.specs}) == 4
    assert not any("mine" in spec.cache_salt for spec in memory.specs), "a salt is a secret"


@pytest.mark.parametrize(
    "what",
    [
        {"mm_features": ["an image"]},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"pooling_params": object()},
        {
            "lora_request": SimpleNamespace(
                lora_name="l", lora_int_id=1, lora_path="/x", load_inplace=True
            )
        },
        {
            "lora_request": SimpleNamespace(
                lora_name="l", lora_int_id=1, lora_path="/nowhere", load_inplace=False
            )
        },
    ],
    ids=["image", "embeddings", "session", "pooling", "replaced adapter", "adapter without files"],
)
def test_what_tokens_do_not_tell_is_not_cached(
    memory: AsyncMemory, engine: Make, what: dict[str, Any]
) -> None:
    check(engine().run(request("a", tokens(1, 21), **what)))
    assert not memory.blocks
    assert memory.count("match") == memory.count("put") == 0


def test_after_a_reset_nothing_old_is_found_and_nothing_new_is_added_to_it(
    memory: AsyncMemory, engine: Make
) -> None:
    one = engine()
    one.run(request("a", tokens(1, 21)))
    one.side.start_over(77)
    one.forget_local()
    (fresh,) = one.run(request("b", tokens(1, 21)))
    assert fresh.num_cached == 0
    one.forget_local()
    (again,) = one.run(request("c", tokens(1, 21)))
    assert again.num_cached == 20
    assert {spec.weights_version for spec in memory.specs} == {0, 77}


# --- vLLM takes things back ----------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_preemption_and_resumption(memory: AsyncMemory, engine: Make, num_ranks: int) -> None:
    """Room for two of four requests: pages change hands while stores are under way."""
    prompts = [tokens(seed, 21) for seed in range(4)]
    one = engine(num_ranks=num_ranks, num_blocks=16)
    requests = [request(f"a{i}", p, max_tokens=16) for i, p in enumerate(prompts)]
    check(one.run(*requests), num_ranks)
    assert any(r.num_preemptions for r in requests)
    again = engine(num_ranks=num_ranks).run(*(request(f"b{i}", p) for i, p in enumerate(prompts)))
    check(again, num_ranks)
    assert not memory.leases


def test_pages_are_held_while_they_are_being_stored(memory: AsyncMemory, engine: Make) -> None:
    """The request has ended and its pages would be overwritten by the next."""
    gate = memory.gates["put"] = threading.Event()
    one = engine(num_blocks=16)
    first = request("a", tokens(1, 29), max_tokens=1)
    one.add(first)
    until(one, first, "finished")
    assert one.pool.num_free == 15 - 7
    other = request("b", tokens(2, 25), max_tokens=1)
    one.add(other)
    until(one, other, "finished")
    gate.set()
    check([first, other, *one.run(request("c", tokens(3, 9)))])
    again = engine().run(request("d", tokens(1, 29)))
    check(again)
    assert again[0].num_cached == 28


def test_a_worker_that_is_replaced_owes_nothing(memory: AsyncMemory, engine: Make) -> None:
    """vLLM registers other tensors while blocks of two requests are stored, and one's are loaded:
    who waits for a load is told of it, and pages that are held come back."""
    engine().run(request("a", tokens(1, 21)))
    for op in ("put", "fetch"):
        memory.gates[op] = threading.Event()
    one = engine()
    stored, loading = (
        [request(f"b{i}", tokens(2 + i, 21)) for i in range(2)],
        request("c", tokens(1, 21)),
    )
    one.add(*stored, loading)
    while any(r.status != "finished" for r in stored) or loading.status != "loading":
        one.step()
    assert one.side.holds_blocks
    one.replace_workers(patience_s=0.1)
    for gate in memory.gates.values():
        gate.set()
    one.run()
    check([*stored, loading])
    assert one.num_loads_failed == 1
    assert one.side.counters.stores_refused


def test_a_worker_is_replaced_while_it_copies(
    memory: AsyncMemory, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in a thread goes on beyond all patience; nobody waits for what comes of it."""
    monkeypatch.setattr(background, "ENDING_S", 0.0)
    engine().run(request("a", tokens(1, 21)))
    one = engine()
    pages = one.ranks[0].pages
    begun, may_end, write = threading.Event(), threading.Event(), pages.write

    def slow(*arguments: Any) -> None:
        begun.set()
        may_end.wait()
        write(*arguments)

    monkeypatch.setattr(pages, "write", slow)
    loading = request("b", tokens(1, 21))
    one.add(loading)
    until(one, loading, "loading")
    begun.wait()
    monkeypatch.setattr(pages, "write", write)
    try:
        one.replace_workers(patience_s=0.0)
        one.run()
        check([loading])
        assert one.num_loads_failed == 1
    finally:
        may_end.set()


def test_a_reset_waits_for_stores(memory: AsyncMemory, engine: Make) -> None:
    """vLLM ends with the last request, and steps no more: its last blocks are still to be stored,
    and a cache of which blocks are held cannot be emptied."""
    one = engine()
    one.add(request("a", tokens(1, 21)))
    while one.requests:
        one.step()
    assert one.side.holds_blocks
    assert one.empty_local()
    assert not one.side.holds_blocks
    (again,) = one.run(request("b", tokens(1, 21)))
    check([again])
    assert again.num_cached == 20
    assert len(memory.blocks) == 24 // 4


def test_a_reset_does_not_wait_for_ever(memory: AsyncMemory, engine: Make) -> None:
    gate = memory.gates["put"] = threading.Event()
    one = engine()
    one.add(request("a", tokens(1, 21)))
    while one.requests:
        one.step()
    assert not one.empty_local(patience_s=0.05)
    gate.set()
    assert one.empty_local()


def test_aborted_while_waiting_for_an_answer(memory: AsyncMemory, engine: Make) -> None:
    engine().run(request("a", tokens(1, 21)))
    gate = memory.gates["match"] = threading.Event()
    one = engine()
    gone = request("b", tokens(1, 21))
    one.add(gone)
    one.step()
    one.abort(gone)
    gate.set()
    check(one.run(request("c", tokens(2, 9))))
    one.close()
    assert not memory.leases


def test_aborted_while_its_blocks_are_loading(memory: AsyncMemory, engine: Make) -> None:
    engine().run(request("a", tokens(1, 21)))
    gate = memory.gates["fetch"] = threading.Event()
    one = engine()
    gone = request("b", tokens(1, 21))
    one.add(gone)
    until(one, gone, "loading")
    one.abort(gone)
    blocks = len(memory.blocks)
    one.step()
    gate.set()
    check(one.run(request("c", tokens(2, 9))))
    assert gone.request_id not in one.requests
    assert len(memory.blocks) == blocks + 3, "pages that were never filled were stored"


# --- the daemon fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["lose", "spoil"])
@pytest.mark.parametrize("block", [0, 2, 9])
def test_blocks_that_do_not_come_are_computed(
    memory: AsyncMemory, engine: Make, way: str, block: int, num_ranks: int
) -> None:
    engine(num_ranks=num_ranks).run(request("a", tokens(1, 41)))
    setattr(memory, way, lambda number: number == block)
    one = engine(num_ranks=num_ranks)
    check(one.run(request("b", tokens(1, 41))), num_ranks)
    assert one.num_loads_failed == 1
    assert memory.count("match") <= 3 * num_ranks, "the same bad block was asked for again"
    assert not memory.leases


@pytest.mark.parametrize("op", ["match", "adopt", "fetch", "fetch more", "put"])
def test_a_client_that_raises(memory: AsyncMemory, engine: Make, op: str) -> None:
    engine().run(request("a", tokens(1, 21)))
    memory.failing.add(op)
    one = engine()
    check(one.run(request("b", tokens(1, 21)), request("c", tokens(2, 21))))
    assert one.trouble.count


def test_an_absent_daemon(memory: AsyncMemory, engine: Make, caplog: Any) -> None:
    memory.absent = True
    one = engine()
    check(one.run(*(request(f"a{i}", tokens(i, 21)) for i in range(4))))
    said = [record.message for record in caplog.records if record.name == "hicache.vllm"]
    assert len(said) == 1
    assert "goes on without it" in said[0]
    memory.absent = False
    check(one.run(request("b", tokens(9, 21))))
    one.forget_local()
    (again,) = one.run(request("c", tokens(9, 21)))
    assert again.num_cached == 20


def test_a_daemon_that_thinks_too_long(memory: AsyncMemory, engine: Make) -> None:
    """The request goes on after `lookup_s`, others were never kept; the late lease is released."""
    engine().run(request("a", tokens(1, 21)))
    gate = memory.gates["match"] = threading.Event()
    now = [1.0]
    one = engine(lookup_s=2.0, clock=lambda: now[0])
    slow = request("b", tokens(1, 21))
    one.add(slow)
    for _ in range(4):
        one.step()
        assert slow.status == "waiting"
        now[0] += 0.5
    one.step()
    assert slow.status == "running"
    gate.set()
    one.run()
    check([slow])
    one.close()
    assert not memory.leases


@pytest.mark.parametrize("step_s", [1.9, 20.0])
def test_a_long_queue_costs_no_hit(memory: AsyncMemory, engine: Make, step_s: float) -> None:
    """There is no room for the request for a while: it is asked for again, since a lease ends, and
    the time in the queue does not count as waiting for the daemon. Nor does a step that takes its
    time: an answer is not too old when it is looked at for the first time."""
    engine().run(request("a", tokens(1, 21)))
    now = [1.0]
    one = engine(num_blocks=12, lookup_s=2.0, clock=lambda: now[0])
    long = request("b", tokens(2, 33), max_tokens=8)
    queued = request("c", tokens(1, 21))
    one.add(long, queued)
    assert one.side.lookup is not None
    while one.requests:
        one.side.lookup.wait_for_answer(10.0)  # the daemon itself is quick
        one.step()
        now[0] += step_s
    one.run()
    check([long, queued])
    assert queued.num_cached == 20
    assert memory.count("match") > 4
    assert not memory.leases


def test_a_queue_does_not_load_all_at_once(memory: AsyncMemory, engine: Make) -> None:
    """Every load holds a lease: the daemon's memory would be full of them."""
    prompts = [tokens(seed, 9) for seed in range(12)]
    engine().run(*(request(f"a{i}", p) for i, p in enumerate(prompts)))
    gate = memory.gates["fetch"] = threading.Event()
    one = engine()
    again = [request(f"b{i}", p) for i, p in enumerate(prompts)]
    one.add(*again)
    assert one.side.lookup is not None
    for _ in range(20):
        one.side.lookup.wait_for_answer(10.0)
        one.step()
    assert sum(r.status == "loading" for r in again) == MAX_LOADING
    gate.set()
    one.run()
    check(again)
    assert [r.num_cached for r in again] == [8] * 12
    assert not memory.leases


def test_a_load_ends_by_its_deadline(memory: AsyncMemory, engine: Make) -> None:
    engine().run(request("a", tokens(1, 41)))
    memory.gates["fetch more"] = threading.Event()
    one = engine(load_s=0.2)
    (late,) = one.run(request("b", tokens(1, 41)))
    check([late])
    assert one.num_loads_failed == 1


class NotMine:
    """A GPU that the daemon has no worker for."""

    def numbers(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def share(self, layers: Sequence[torch.Tensor]) -> SharedPages:
        return SharedPages("0000:99:00.0", (), np.zeros((len(layers), 4), np.uint64), 1, 1)


def test_without_a_gpu_worker_this_process_copies(
    memory: AsyncMemory, engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """And says why, once for each rank."""
    caplog.set_level("INFO", "hicache.vllm")
    engine(device=NotMine()).run(request("a", tokens(1, 21)))
    one = engine(device=NotMine())
    (again,) = one.run(request("b", tokens(1, 21)))
    check([again])
    assert again.num_cached == 20
    one.forget_local()
    check(one.run(request("c", tokens(1, 21))))
    said = [message for message in caplog.messages if "blocks are copied by" in message]
    assert said == ["hicache: blocks are copied by this process itself: no GPU worker here"] * 2


def test_a_gpu_worker_that_hangs_is_not_waited_for(memory: AsyncMemory, engine: Make) -> None:
    """Whatever has been asked of it: nothing comes too late."""
    prompts = [tokens(seed, 21) for seed in range(3)]
    engine().run(*(request(f"a{i}", p) for i, p in enumerate(prompts)))
    memory.gates["share pages"] = threading.Event()
    one = engine(device=NotMine(), load_s=8.0)
    again = one.run(*(request(f"b{i}", p) for i, p in enumerate(prompts)))
    check(again)
    assert [r.num_cached for r in again] == [20, 20, 20]
    assert one.num_loads_failed == 0


def test_a_daemon_that_was_started_anew(memory: AsyncMemory, engine: Make) -> None:
    """Leases of the one before are not used; sessions and groups are made anew by themselves."""
    one = engine()
    one.run(request("a", tokens(1, 41)))
    one.forget_local()
    gate = memory.gates["adopt"] = threading.Event()
    caught = request("b", tokens(1, 41))
    one.add(caught)
    until(one, caught, "loading")
    memory.start_anew("second")
    gate.set()
    one.run()
    check([caught])
    assert one.num_loads_failed == 1
    one.forget_local()
    (again,) = one.run(request("c", tokens(1, 41)))
    check([again])
    assert again.num_cached == 40
    assert not memory.leases


def test_a_full_daemon(memory: AsyncMemory, engine: Make) -> None:
    """Refused blocks are offered again later, and none is held for ever."""
    memory.room = 3
    one = engine()
    check(one.run(request("a", tokens(1, 21), max_tokens=12)))
    assert len(memory.blocks) == 3
    memory.room = 1 << 30
    one.run(request("b", tokens(1, 21), max_tokens=12))
    (again,) = engine().run(request("c", tokens(1, 21)))
    check([again])
    assert again.num_cached == 20


def test_stores_take_a_share_of_the_blocks(memory: AsyncMemory, engine: Make) -> None:
    gate = memory.gates["put"] = threading.Event()
    one = engine(num_blocks=41, store_share=0.1)
    one.add(request("a", tokens(1, 61), max_tokens=2))
    while one.requests:
        one.step()
    assert one.pool.num_free == 40 - 4
    gate.set()
    one.run()


# --- what is reported ----------------------------------------------------------------------------


def test_steps_with_prefill_are_observed(memory: AsyncMemory, engine: Make) -> None:
    one = engine(budget=12)
    one.run(request("a", tokens(1, 9), max_tokens=1))
    one.run(request("b", tokens(2, 18), max_tokens=3))
    one.close()
    assert memory.observed == [
        (1, 9.0, 40.5, 0),
        (1, 12.0, 72.0, 0),
        (1, 6.0, 6 * 12 + 18.0, 0),
    ]


def test_why_an_answer_ended_and_how_long_it_was_is_sent(memory: AsyncMemory, engine: Make) -> None:
    one = engine()
    one.run(request("a", tokens(1, 9), session_id="a talk"))
    one.run(request("b", tokens(2, 5), mm_features=["an image"]))
    one.close()
    assert memory.hints == [(13, "a talk", "length", 4)]


def test_sources_of_a_hit(memory: AsyncMemory, engine: Make) -> None:
    engine().run(request("a", tokens(1, 21)))
    memory.tier = "disk"
    one = engine()
    loading = request("b", tokens(1, 21))
    one.add(loading)
    until(one, loading, "loading")
    assert one.side.sources(loading, 20) == {"disk": 20}
    one.run()


def test_announcements(memory: AsyncMemory, engine: Make) -> None:
    published = PublishedHashes()
    one = engine(published=published)
    (first,) = one.run(request("a", tokens(1, 21), max_tokens=1))
    hashes = first.block_hashes[:5]
    news = list(published.take())
    assert [name for n in news for name in n.hashes] == hashes
    assert {(n.medium, n.is_gone) for n in news} == {("CPU", False)}
    memory.tier = "disk"
    one.forget_local()
    one.run(request("b", tokens(1, 21), max_tokens=1))
    news = list(published.take())
    assert [(list(n.hashes), n.medium, n.is_gone) for n in news] == [
        (hashes, "STORAGE", False),
        (hashes, "CPU", True),
    ]
    memory.blocks.clear()
    one.forget_local()
    one.run(request("c", tokens(1, 21), max_tokens=1))
    gone = [n for n in published.take() if n.is_gone]
    assert [(list(n.hashes), n.medium) for n in gone] == [(hashes, "STORAGE")]
