"""Counters of hicache in vLLM's log and Prometheus endpoint: `vllm:hicache_…_total`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "lookups": "Prompts that were looked up in the daemon.",
    "lookups_unanswered": "Lookups without an answer in time: computed as without hicache.",
    "loads": "Requests for which blocks were loaded.",
    "load_tokens": "Tokens that were to be loaded.",
    "stores": "Runs of blocks offered to the daemon.",
    "store_tokens": "Tokens offered to the daemon.",
    "stores_refused": "Runs not stored completely: the daemon is full or does not answer.",
    "troubles": "Failures of the daemon or of the connection to it.",
}


class HiCacheStats(KVConnectorStats):  # type: ignore[misc] # vLLM is not installed here
    """`data`: the increase of the counters since the last call."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> HiCacheStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"hicache {name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HiCacheProm(KVConnectorPromMetrics):  # type: ignore[misc] # vLLM is not installed here
    """One Prometheus counter for each, per inference engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, help_text in COUNTERS.items():
            metric = self._counter_cls(
                name=f"vllm:hicache_{name}", documentation=help_text, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: metric.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)
