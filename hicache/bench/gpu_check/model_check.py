"""A Transformers model on the GPU, of random weights, through the connector and a real daemon whose
tiers are small enough for its KV to come back from each of them: the same tokens with the cache as
without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from hicache.bench.gpu_check.check import Check, CheckStep
from hicache.bench.gpu_check.through_daemon import daemon
from hicache.client import Client
from hicache.demo.demo_daemon import PrivateDaemon
from hicache.demo.demo_model import check_engine

VOCABULARY = 4096
NEW_TOKENS = 24


def run(check: Check) -> None:
    check_engine()
    import torch
    import transformers

    check.note("libraries", f"torch {torch.__version__}, transformers {transformers.__version__}")
    sizes = (16, 8, 64) if check.is_dry else (128, 96, 512)
    mib = dict(zip(("hbm", "dram", "disk"), sizes, strict=True))
    with check.step("a daemon for the model") as whole, daemon(check, **mib) as server:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            with check.step(f"outputs in {name}, with hits and without") as step:
                _compare(check, server, _model(check, dtype), step, is_judged=name == "float32")
        whole.value = "ran to its end"


def _model(check: Check, dtype: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    size = 1 if check.is_dry else 4
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256 * size,
        intermediate_size=512 * size,
        num_hidden_layers=2 * size,
        num_attention_heads=4 * size,
        num_key_value_heads=2 * size,
        max_position_embeddings=4096,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(device="cpu" if check.is_dry else "cuda", dtype=dtype).eval()


def _compare(
    check: Check, server: PrivateDaemon, model: Any, step: CheckStep, is_judged: bool
) -> None:
    """Conversations of growing prompts: turn by turn, then all of them again, when they are in
    every tier. Counts wrong tokens, and reports the first."""
    from hicache.connectors.transformers import CachedModel

    conversations, turns, length = (2, 2, 130) if check.is_dry else (6, 3, 500)
    rng = np.random.default_rng(3)
    texts = rng.integers(1, VOCABULARY, (conversations, turns * length)).tolist()
    prompts = [text[: length * (turn + 1)] for turn in range(turns) for text in texts]
    plain = CachedModel(model, None)
    expected = [plain.generate(prompt, NEW_TOKENS).tokens for prompt in prompts]
    served = CachedModel(model, lambda spec: Client(spec, server.endpoint, timeout_s=5.0))
    hits: Counter[str] = Counter()
    wrong: list[str] = []
    for number, prompt in enumerate([*prompts, *prompts]):
        right = expected[number % len(prompts)]
        found = served.generate(prompt, NEW_TOKENS)
        hits.update(found.hit_tokens)
        if found.tokens != right:
            at = next(n for n, (a, b) in enumerate(zip(found.tokens, right, strict=True)) if a != b)
            wrong.append(f"request {number} (hits {found.hit_tokens}) at token {at}")
    served.close()
    assert not served.last_trouble, served.last_trouble
    step.figures = {"hit_tokens": dict(hits), "requests": 2 * len(prompts), "wrong": len(wrong)}
    step.value = (
        f"{len(wrong)} of {2 * len(prompts)} outputs differ; tokens reloaded {dict(hits)}"
        f"{'; first: ' + wrong[0] if wrong else ''}"
    )
    assert hits, "nothing was reloaded"
    if is_judged:
        assert not wrong, step.value
    else:
        step.status = "told"
