"""Model profiles for `hicache replay --model`: bytes of KV per token, seconds of a prefill.

Seconds of a prefill of n new tokens on context c: (a·n + b·(n·c + n²/2)) / effective FLOP/s, with
a = 2 · active parameters and b = 4 · layers · heads · head dimension, on one H100 or H200 at half
of its dense BF16 peak. Modelled, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EFFECTIVE_FLOPS: Final = 4.95e14


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """`linear`, `quadratic`: FLOP per token, and per pair of tokens that attend."""

    name: str
    linear: float
    quadratic: float
    kv_bytes_per_token: int

    def prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """Seconds to prefill these tokens on this context."""
        pairs = new_tokens * context_tokens + new_tokens**2 / 2
        return (self.linear * new_tokens + self.quadratic * pairs) / EFFECTIVE_FLOPS

    def saved_s(self, input_tokens: int, hit_tokens: int) -> float:
        """Seconds of prefill that a hit saves: those of the prompt's first tokens."""
        return self.prefill_s(min(hit_tokens, input_tokens), 0)


MODELS: Final = {
    profile.name: profile
    for profile in (
        ModelProfile("llama-3.1-8b", 1.40e10, 5.24e5, 128 << 10),
        ModelProfile("qwen3-32b", 6.24e10, 2.10e6, 256 << 10),
        ModelProfile("llama-3.1-70b", 1.37e11, 2.62e6, 320 << 10),
        ModelProfile("deepseek-v3", 7.4e10, 5.0e6, 69 << 10),
    )
}
DEFAULT_MODEL: Final = "llama-3.1-8b"
