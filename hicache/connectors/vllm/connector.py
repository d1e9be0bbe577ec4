"""The class that vLLM loads, `HiCacheConnector`. Only this file and `metrics` import vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

Two sides, in two processes or in one. Each has its own thread that calls the daemon:

    scheduler ──orders──▶ worker (one per rank)        loads, and stores of new whole blocks
        │ match ▲ reports     │ fetch, put
        ▼       └─────────────▼
      daemon ◀───────────────────

    scheduler_side, tracked_request   what to load and store, for each request
    lookup                            the daemon's answer for a prompt
    worker_side, rank_clients         loads and stores, and the client of each rank
    vllm_pages                        how blocks lie in vLLM's cache
    namespace, weights                which model the blocks belong to
    step_messages                     what the two sides send each other
    published_hashes                  which block hashes vLLM publishes for routers
    options, background, metrics      an operator's settings, the thread, vLLM's metrics

The daemon is optional at every step: whatever fails there is a miss. An exception in
`get_num_new_matched_tokens` would end the inference engine, one in a worker the step. So each
method that vLLM calls while it serves catches errors and returns "nothing"; a wrong setting is
refused at start.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache.client import AsyncClient
from hicache.client.gpu_pages import SharedPages
from hicache.connectors.vllm.background import Background, Trouble
from hicache.connectors.vllm.lookup import PromptLookup
from hicache.connectors.vllm.metrics import HiCacheProm, HiCacheStats
from hicache.connectors.vllm.namespace import (
    EngineFacts,
    namespace_spec,
    refuse_by_cache,
    refuse_by_config,
)
from hicache.connectors.vllm.options import Options, check_failure_policy
from hicache.connectors.vllm.published_hashes import PublishedHashes
from hicache.connectors.vllm.scheduler_side import Counters, SchedulerSettings, SchedulerSide
from hicache.connectors.vllm.step_messages import Orders, WorkerReport
from hicache.connectors.vllm.vllm_pages import UnsupportedLayout, pages_of, share
from hicache.connectors.vllm.worker_side import WorkerSide
from hicache.protocol.keys import NamespaceSpec

log = logging.getLogger("hicache.vllm")

CLOSE_S: Final = 3.0
TROUBLE: Final = Trouble()
"""One for both sides, which may run in one process: it should warn once."""
_WORKERS: Final[WeakValueDictionary[str, WorkerSide]] = WeakValueDictionary()
"""The worker in this process, by vLLM's engine id."""
_SOURCES: Final = {
    "hbm": CacheHitSource.HOST,
    "dram": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
}


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc] # nor is its type
    """What a rank sends to the scheduler's side once: its namespace, or why it has none."""

    spec: dict[str, Any] | None
    refusal: str = ""


class HiCacheConnector(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is not installed here
    """See the head of this file and docs/vllm.md. Raises ValueError for a wrong setting."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = Options.of(transfer.kv_connector_extra_config)
        check_failure_policy(transfer.kv_load_failure_policy)
        self._refusal = ""
        self._worker: WorkerSide | None = None
        self._spec: NamespaceSpec | None = None
        self._side: SchedulerSide | None = None
        self._engine = str(transfer.engine_id)
        self._bad_pages: set[int] = set()
        self._troubles = 0
        try:
            refuse_by_config(vllm_config)
            refuse_by_cache(kv_cache_config.kv_cache_groups)
        except UnsupportedLayout as why:
            self._refuse(str(why))
            return
        if role == KVConnectorRole.SCHEDULER:
            self._side = self._scheduler_side(transfer)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is computed again."""
        return False

    def _refuse(self, why: str) -> None:
        self._refusal = why
        log.warning("hicache: vLLM serves without it: %s", why)

    # --- the scheduler's side -------------------------------------------------------------------

    def _scheduler_side(self, transfer: Any) -> SchedulerSide:
        config = self._kv_cache_config
        block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        events = self._vllm_config.kv_events_config
        has_events = (
            events is not None
            and events.enable_kv_cache_events
            and config.hash_block_size in (None, block_tokens)
        )
        settings = SchedulerSettings(
            block_tokens=block_tokens,
            num_blocks=config.num_blocks,
            num_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            lookup_s=self._options.lookup_s,
            store_share=self._options.store_share,
            may_load=transfer.is_kv_consumer,
            may_store=transfer.is_kv_producer,
        )
        published = PublishedHashes() if has_events else None
        return SchedulerSide(settings, published=published, trouble=TROUBLE)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Every rank has sent its namespace: from now on prompts can be looked up."""
        if self._side is None:
            return
        with TROUBLE.harmless("the ranks' namespaces"):
            ranks = [metadata[rank] for rank in sorted(metadata)]
            refusals = [rank.refusal for rank in ranks if rank.refusal]
            if refusals or len(ranks) != self._vllm_config.parallel_config.tensor_parallel_size:
                self._refuse((refusals or ["not all ranks sent their namespace"])[0])
                return
            specs = [NamespaceSpec.from_wire(rank.spec) for rank in ranks]
            background = Background("hicache-ask", TROUBLE)
            self._side.lookup = PromptLookup(specs, self._lookup_client, background)
            name, block_bytes = specs[0].name, specs[0].block_bytes
            log.info("hicache: %s, blocks of %d bytes, %d ranks", name, block_bytes, len(specs))

    def _lookup_client(self, spec: NamespaceSpec) -> AsyncClient:
        options = self._options
        wait_s = options.lookup_s
        name = "vllm scheduler"
        return AsyncClient(spec, options.endpoint or None, timeout_s=wait_s, name=name)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM cannot empty its cache while blocks of a store are held (before `sleep` it raises),
        and it calls a connector only afterwards. So the pool's method finishes the stores first."""
        if self._side is None:
            return
        self._side.pool = gpu_block_pool
        empty = gpu_block_pool.reset_prefix_cache

        def settle_and_empty() -> bool:
            self._settle()
            is_empty: bool = empty()
            return is_empty

        gpu_block_pool.reset_prefix_cache = settle_and_empty

    def _settle(self) -> None:
        worker = _WORKERS.get(self._engine)
        if self._side is not None and worker is not None and worker.is_alone:
            with TROUBLE.harmless("stores before a reset"):
                self._side.settle(worker, self._options.store_s + CLOSE_S)

    def on_new_request(self, request: Any) -> None:
        if self._side is not None:
            with TROUBLE.harmless("a new request"):
                self._side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._side is not None:
            with TROUBLE.harmless("a lookup"):
                return self._side.matched(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # Errors are raised here: otherwise vLLM would wait for a load that was not started.
        if self._side is not None:
            self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = {}
        with TROUBLE.harmless("the sources of a hit"):
            if self._side is not None and num_external_tokens:
                for tier, tokens in self._side.sources(request, num_external_tokens).items():
                    source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                    sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        side = self._side
        if side is None:
            return Orders()
        state = scheduler_output.kv_connector_block_state

        def pages_of_request(request_id: str) -> Sequence[int]:
            pages: Sequence[int] = state.resolve_block_ids(request_id)[0]
            return pages

        return side.orders(scheduler_output.num_scheduled_tokens, pages_of_request)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._side is not None and isinstance(report, WorkerReport):
            with TROUBLE.harmless("a report"):
                self._side.reported(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._side is not None:
            with TROUBLE.harmless("the end of a request"):
                is_good = request.status.name != "FINISHED_ERROR"
                reason = str(request.get_finished_reason() or "")
                self._side.finished(request, block_ids, reason=reason, is_good=is_good)
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._side is not None and self._side.will_free_soon

    def has_pending_push_work(self) -> bool:
        return self._side is not None and self._side.holds_blocks

    def reset_cache(self) -> bool | None:
        """vLLM empties its own cache, as after an update of the weights: from now on blocks belong
        to a namespace that no other process can have."""
        if self._side is not None:
            self._side.start_over(secrets.randbits(62))
        return True

    def take_events(self) -> Iterable[Any]:
        if self._side is None or self._side.published is None:
            return ()
        block_tokens = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        events: list[Any] = []
        with TROUBLE.harmless("events"):
            for change in self._side.published.take():
                hashes = [maybe_convert_block_hash(name) for name in change.hashes]
                if change.is_gone:
                    events.append(BlockRemoved(block_hashes=hashes, medium=change.medium))
                    continue
                parent = None if change.parent is None else maybe_convert_block_hash(change.parent)
                events.append(
                    BlockStored(
                        block_hashes=hashes,
                        parent_block_hash=parent,
                        token_ids=[],
                        block_size=block_tokens,
                        lora_id=None,
                        medium=change.medium,
                        lora_name=None,
                    )
                )
        return events

    # --- the worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._refusal:
            return
        try:
            names = self._kv_cache_config.kv_cache_groups[0].layer_names
            # Layers that share one cache count once.
            caches = list({kv_caches[name].data_ptr(): kv_caches[name] for name in names}.values())
            pages = pages_of(caches, self._kv_cache_config.num_blocks)
            self._spec = namespace_spec(self._facts(names[0]), caches)
        except (UnsupportedLayout, KeyError) as why:
            self._refuse(str(why))
            return
        before = self._worker
        if before is not None:  # vLLM has replaced its tensors
            before.close(CLOSE_S)
        background = Background("hicache-move", TROUBLE)
        rank, load_s = self._spec.tp_rank, self._options.load_s
        shared: SharedPages | None = None
        with TROUBLE.harmless("sharing vLLM's pages"):
            may_sleep = self._vllm_config.model_config.enable_sleep_mode
            shared = share(pages, may_sleep=may_sleep)
        self._worker = WorkerSide(
            self._spec, rank, pages, self._transfer_client, background, load_s, shared
        )
        if before is not None:
            self._worker.take_over(before)
        _WORKERS[self._engine] = self._worker

    def _transfer_client(self, spec: NamespaceSpec, group: bytes) -> AsyncClient:
        options = self._options
        return AsyncClient(
            spec,
            options.endpoint or None,
            timeout_s=options.lookup_s,
            fetch_timeout_s=options.load_s,
            put_timeout_s=options.store_s,
            name=f"vllm worker {spec.tp_rank}",
            group=group,
        )

    def _facts(self, layer: str) -> EngineFacts:
        config = self._vllm_config
        model = config.model_config
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        parallel = config.parallel_config
        attention = config.compilation_config.static_forward_context[layer]
        arranging = [attention.get_attn_backend().get_name(), getattr(attention, "isa", "")]
        layout = getattr(self._kv_cache_config, "kv_cache_layout", None)
        return EngineFacts(
            vllm_version=vllm_version,
            hf_config=model.hf_config.to_dict(),
            architectures=model.architectures,
            model_dtype=str(model.dtype),
            cache_dtype=str(config.cache_config.cache_dtype),
            quantisation=str(model.quantization or ""),
            max_model_len=model.max_model_len,
            attention=[*arranging, str(layout or "")],
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            block_tokens=spec.block_size,
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=parallel.tensor_parallel_size,
            model=model.model,
            revision=model.revision,
            load_format=str(config.load_config.load_format),
            weights_digest=self._options.weights_digest,
        )

    def get_handshake_metadata(self) -> RankHandshake:
        spec = self._spec.to_wire() if self._spec is not None else None
        return RankHandshake(spec, self._refusal)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are started by `bind_connector_metadata`, before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: stores start after the whole step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.after(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        outcome = self._worker.finished(is_idle=self._orders().is_idle)
        self._bad_pages = outcome.bad_pages
        return KVConnectorTransferResults(
            finished_recving=outcome.loaded, failed_recving=outcome.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.report() if self._worker is not None else None

    def _orders(self) -> Orders:
        orders = self._connector_metadata
        assert isinstance(orders, Orders)
        return orders

    # --- both -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(CLOSE_S)
        if self._side is not None:
            self._side.close(CLOSE_S)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._side is None:
            return None
        counters, self._side.counters = self._side.counters, Counters()
        troubles, self._troubles = TROUBLE.count - self._troubles, TROUBLE.count
        return HiCacheStats(data={**asdict(counters), "troubles": troubles})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return HiCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> KVConnectorPromMetrics | None:
        return HiCacheProm(*arguments, *named.values())
