"""The Transformers connector on tiny random models: what hicache holds never changes what comes
out, every fault is a miss, and what differs in any KV byte has another namespace."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.connectors.memory_client import Memory

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="needs the extra: pip install .[demo]")
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install .[demo]")

from hicache.connectors.transformers import CachedModel, Generation, Unsupported  # noqa: E402
from hicache.connectors.transformers.model_namespace import Forward  # noqa: E402

torch.set_num_threads(1)  # tiny models: threads only wait for each other

BLOCK_TOKENS = 4
NEW_TOKENS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama-gqa": ("LlamaConfig", {"num_key_value_heads": 2}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "qwen2-gqa": ("Qwen2Config", {"num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoXConfig", {}),
}
DTYPES = ("float32", "bfloat16", "float16")


def make_model(
    family: str = "llama-gqa", dtype: str = "float32", seed: int = 0, **sizes: Any
) -> Any:
    name, more = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **more, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(getattr(torch, dtype)).eval()


def serve(model: Any, memory: Memory | None, **more: Any) -> CachedModel:
    connect = memory.connect if memory else None
    return CachedModel(model, connect, block_tokens=BLOCK_TOKENS, **more)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 97, length).tolist()
    return tokens


def ask(model: Any, memory: Memory | None, prompt: list[int]) -> Generation:
    return serve(model, memory).generate(prompt, NEW_TOKENS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hit_and_miss_and_none_give_the_same_tokens(family: str, dtype: str) -> None:
    model, memory, prompt = make_model(family, dtype), Memory(), prompt_of(23)
    bare = ask(model, None, prompt)
    cold = ask(model, memory, prompt)
    hit = ask(model, memory, prompt)
    assert bare.tokens == cold.tokens
    # In 16 bits a suffix alone may round otherwise than the whole prompt, with hicache or without.
    assert hit.tokens == (cold.tokens if dtype == "float32" else local_hit(model, prompt, 20))
    assert len(hit.tokens) == NEW_TOKENS
    assert cold.hit_tokens == {}
    assert cold.stored == (23 + NEW_TOKENS - 1) // BLOCK_TOKENS
    assert hit.hit_tokens == {"dram": 20}
    assert hit.stored == 0
    assert bare.decision is None
    assert hit.decision is not None
    assert memory.leases == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_bytes_are_the_models_own_kv(dtype: str) -> None:
    model, memory, prompt = make_model(dtype=dtype), Memory(), prompt_of(9)
    served = serve(model, memory)
    served.generate(prompt, 1)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        Forward(model)(torch.tensor([prompt]), cache)
    shape = served.shape.block(BLOCK_TOKENS)
    for number, stored in enumerate(memory.blocks.values()):
        kv = torch.from_numpy(stored).view(served.shape.dtype).reshape(shape)
        tokens = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
        for layer, (keys, values) in zip(cache.layers, kv, strict=True):
            assert torch.equal(keys, layer.keys[0, :, tokens])
            assert torch.equal(values, layer.values[0, :, tokens])
    assert len(memory.blocks) == 2
    assert served.spec.block_bytes == 3 * 2 * 2 * 8 * BLOCK_TOKENS * served.shape.dtype.itemsize


def test_a_hit_of_the_whole_prompt_still_computes_its_last_token() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(5 * BLOCK_TOKENS)
    cold = ask(model, memory, prompt)
    hit = ask(model, memory, prompt)
    assert hit.tokens == cold.tokens
    assert hit.hit_tokens == {"dram": 5 * BLOCK_TOKENS - 1}


def test_generated_tokens_are_held_for_the_next_turn() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(13)
    first = ask(model, memory, prompt)
    longer = prompt + first.tokens + prompt_of(5, seed=2)
    hit = ask(model, memory, longer)
    assert hit.tokens == ask(model, None, longer).tokens
    assert hit.hit_tokens == {"dram": (13 + NEW_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS}
    assert hit.stored > 0


def test_tokens_are_counted_once_by_the_tier_they_came_from() -> None:
    model, prompt = make_model(), prompt_of(23)
    memory = Memory(tiers=lambda block: "hbm" if block < 2 else "disk", run_blocks=2)
    ask(model, memory, prompt)
    assert ask(model, memory, prompt).hit_tokens == {"hbm": 8, "disk": 12}


def local_hit(model: Any, prompt: list[int], held: int) -> list[int]:
    """What transformers alone makes of the prompt when it has kept its first `held` tokens' KV."""
    forward, cache = Forward(model), transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        forward(torch.tensor([prompt]), cache)
        cache.crop(held - len(prompt))
        step = prompt[held:]
        tokens: list[int] = []
        while len(tokens) < NEW_TOKENS:
            tokens.append(int(forward(torch.tensor([step]), cache)[0, -1].argmax()))
            step = tokens[-1:]
    return tokens


FAULTS: dict[str, tuple[Callable[[Memory], Memory], int]] = {
    # what goes wrong: how, and how many of the 20 tokens held are still reloaded
    "advice to reload a part": (lambda m: dataclasses.replace(m, reload=2), 8),
    "advice to recompute": (lambda m: dataclasses.replace(m, reload=0), 0),
    "first run overwritten": (lambda m: dataclasses.replace(m, spoil=lambda b: b == 0), 0),
    "second run overwritten": (lambda m: dataclasses.replace(m, spoil=lambda b: b == 4), 12),
    "second run lost": (lambda m: dataclasses.replace(m, lose=lambda b: b == 3), 12),
    "a hole, last run first": (
        lambda m: dataclasses.replace(m, lose=lambda b: b == 1, backwards=True),
        0,
    ),
    "last run first": (lambda m: dataclasses.replace(m, backwards=True), 20),
    "match fails": (lambda m: dataclasses.replace(m, fail=frozenset({"match"})), 0),
    "fetch fails": (lambda m: dataclasses.replace(m, fail=frozenset({"fetch"})), 0),
    "fetch fails midway": (
        lambda m: dataclasses.replace(m, lose=lambda b: b == 3, fail=frozenset({"fetch midway"})),
        12,
    ),
    "put fails": (lambda m: dataclasses.replace(m, fail=frozenset({"put"})), 20),
    "release, hint and observe fail": (
        lambda m: dataclasses.replace(m, fail=frozenset({"release", "hint", "observe"})),
        20,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_misses(fault: str) -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(23)
    bare = ask(model, memory, prompt)
    break_it, reloaded = FAULTS[fault]
    broken = break_it(memory)
    again = ask(model, broken, prompt)
    assert again.tokens == bare.tokens
    assert sum(again.hit_tokens.values()) == reloaded
    if "release" not in broken.fail:
        assert broken.leases == 0


def test_absent_daemon_is_a_miss(tmp_path: Any) -> None:
    from hicache.client import Client

    model, prompt = make_model(), prompt_of(23)
    endpoint = f"ipc://{tmp_path}/nobody.sock"
    served = CachedModel(model, lambda spec: Client(spec, endpoint, timeout_s=0.05))
    generation = served.generate(prompt, NEW_TOKENS)
    assert generation.tokens == ask(model, None, prompt).tokens
    assert generation.hit_tokens == {}
    served.close()


def test_the_lease_goes_back_when_the_model_fails() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(23)
    served = serve(model, memory)
    served.generate(prompt, 1)
    with pytest.raises(IndexError):
        served.generate([*prompt, 10_000], 1)  # no such token
    assert memory.released
    assert memory.leases == 0


def test_measurements_are_reported() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(23)
    served = serve(model, memory)
    served.generate(prompt, 1)
    served.generate(prompt, 1)
    (n, nc, seconds), (n_hit, nc_hit, _) = memory.observed
    assert (n, nc) == (23, 23 * 23 / 2)
    assert (n_hit, nc_hit) == (3, 3 * 20 + 3 * 3 / 2)
    assert seconds > 0
    ((hop_bytes, hop_s, total_s),) = memory.released
    assert hop_bytes == 5 * served.spec.block_bytes
    assert 0 < hop_s <= total_s


def test_it_says_why_an_answer_ended_after_how_much_and_of_which_conversation() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(23)
    served = serve(model, memory)
    (first,) = served.generate(prompt, 1).tokens
    served.generate(prompt, 4, stop={first}, conversation="a")
    assert memory.hinted == [(23, "", "length", 1), (None, "a", "stop", 1)]


def test_what_is_not_to_be_kept_is_not_stored() -> None:
    model, memory, prompt = make_model(), Memory(), prompt_of(23)
    generation = serve(model, memory).generate(prompt, 1, keep=False)
    assert (generation.stored, memory.blocks, memory.hinted) == (0, {}, [])


def test_stop_ends_the_answer_early() -> None:
    model, prompt = make_model(), prompt_of(23)
    tokens = ask(model, None, prompt).tokens
    stopped = serve(model, None).generate(prompt, NEW_TOKENS, stop={tokens[2]})
    assert stopped.tokens == tokens[: tokens.index(tokens[2]) + 1]


def test_an_empty_prompt_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        serve(make_model(), None).generate([], 1)


OTHERS: dict[str, Callable[[], CachedModel]] = {
    "weights": lambda: serve(make_model(seed=7), None),
    "one tensor": lambda: serve(nudged(make_model()), None),
    "dtype": lambda: serve(make_model(dtype="bfloat16"), None),
    "layers": lambda: serve(make_model(num_hidden_layers=2), None),
    "architecture": lambda: serve(make_model("qwen2-gqa"), None),
    "rope": lambda: serve(
        make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), None
    ),
    "block size": lambda: CachedModel(make_model(), None, block_tokens=8),
    "lora": lambda: serve(make_model(), None, lora_digest="ab"),
    "salt": lambda: serve(make_model(), None, cache_salt="tenant"),
    "weights version": lambda: serve(make_model(), None, weights_version=1),
}


def nudged(model: Any) -> Any:
    """A fine-tune of the same shape: one tensor differs."""
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.add_(1e-3)
    return model


@pytest.mark.parametrize("what", OTHERS)
def test_what_changes_kv_changes_the_namespace(what: str) -> None:
    assert OTHERS[what]().spec.digest() != serve(make_model(), None).spec.digest()


def test_what_changes_no_kv_keeps_the_namespace() -> None:
    model = make_model()
    model.config._name_or_path = "/somewhere/else"
    model.config.eos_token_id = 5
    assert serve(model, None).spec.digest() == serve(make_model(), None).spec.digest()


def test_another_models_blocks_are_never_a_hit() -> None:
    memory, prompt = Memory(), prompt_of(23)
    ask(make_model(), memory, prompt)
    assert ask(make_model(seed=7), memory, prompt).hit_tokens == {}


def training() -> Any:
    return make_model().train()


def quantised_cache() -> Any:
    model = make_model()
    model.generation_config.cache_implementation = "quantized"
    return model


def not_loaded() -> Any:
    with torch.device("meta"):
        return make_model()


def sliding(**more: Any) -> Any:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def hybrid() -> Any:
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def state_space() -> Any:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def encoder_decoder() -> Any:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_ff=48, num_layers=2, num_heads=4)
    return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()


def latent() -> Any:
    config = transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def moving_rope() -> Any:
    return make_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (training, "training mode"),
        (quantised_cache, "a quantized cache is not held"),
        (not_loaded, "meta device"),
        (sliding, "sliding-window layers are not held"),
        (hybrid, "sliding-window layers are not held"),
        (state_space, "not held"),
        (encoder_decoder, "encoder-decoder"),
        (latent, "latent attention"),
        (moving_rope, "dynamic RoPE is not held"),
    ],
)
def test_refusals_say_why(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(Unsupported, match=sentence):
        serve(make(), None)
