"""`stats`, `explain`, `what_if`: counters, decisions and sampled requests for operators."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache import __version__
from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.clear import Clearances
from hicache.daemon.operations.conversations import Conversations
from hicache.daemon.operations.gpu_pages import GpuPages
from hicache.daemon.operations.pin import pin_rows
from hicache.daemon.operations.put import PutCounts
from hicache.engine.core import CacheEngine
from hicache.engine.planner.decision_log import Record
from hicache.protocol.messages import TOKEN_BYTES, WireError
from hicache.protocol.operations import (
    EXPLAIN,
    STATS,
    WHAT_IF,
    ExplainReply,
    ExplainRequest,
    StatsReply,
    StatsRequest,
    WhatIfReply,
    WhatIfRequest,
)


@handles(STATS)
def stats(gate: Gate, asked: Asked[StatsRequest]) -> None:
    """All counters."""
    upkeep, engine, queries = gate.upkeep, gate.engine, gate.engine.queries
    namespaces = namespace_rows(gate)
    index = index_row(engine, namespaces)
    publisher = upkeep.publisher
    reply = StatsReply(
        uptime_s=asked.now_s - upkeep.health.started_s,
        epoch=gate.epoch,
        pid=os.getpid(),
        version=__version__,
        events=publisher.counts() if publisher is not None else {},
        sessions=len(gate.sessions),
        leases=gate.engine.num_leases,
        pins=pin_rows(gate, asked.now_s),
        pinned_blocks=queries.num_pinned_blocks(),
        tickets=len(queries.tickets()),
        waiting=len(gate.waiting) + len(gate.state(Clearances)),
        namespaces=namespaces,
        index=index,
        tiers=tier_rows(gate),
        links=link_rows(engine),
        planner=planner_row(engine),
        requests=dict(gate.requests),
        errors=dict(gate.errors),
        puts=dict(gate.state(PutCounts).blocks),
        gate=gate_row(engine),
        history=history_row(engine),
        dropped_blocks=engine.evictor.dropped,
        workers=upkeep.mover.pids(),
        memory=memory_row(gate, index["tokens"]),
        pages=gate.state(GpuPages).counts(),
        queues=queue_rows(gate),
    )
    gate.reply(asked.peer, reply)


@handles(EXPLAIN)
def explain(gate: Gate, asked: Asked[ExplainRequest]) -> None:
    """The planner's last decisions on hits, in words and as data."""
    gate.engine.matching.settle()
    rows = decision_rows(gate, asked.request.last, asked.now_s)
    gate.reply(asked.peer, ExplainReply(decisions=rows))


@handles(WHAT_IF)
def what_if(gate: Gate, asked: Asked[WhatIfRequest]) -> None:
    """A sample of the last requests, from which a client computes the hits of other sizes."""
    upkeep = gate.upkeep
    gate.observers.deliver()
    if upkeep.sample is None:
        raise WireError("refused", "what_if is false in the configuration")
    tiers: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "bytes": pool.capacity_bytes,
            "eviction": getattr(upkeep.serving.config.tiers, spec.name).eviction,
        }
        for spec, pool in zip(upkeep.parts.tiers, upkeep.parts.pools, strict=True)
    ]
    gate.reply(asked.peer, WhatIfReply(tiers=tiers, **upkeep.sample.report()))


def tier_rows(gate: Gate) -> list[dict[str, Any]]:
    """One row per tier, fastest first."""
    upkeep, rows = gate.upkeep, []
    notes, states = upkeep.health.tier_notes(), upkeep.health.tier_states()
    for name, counters in gate.engine.queries.tier_counters().items():
        counts, is_up = gate.engine.ledger.tiers[name], counters.pop("is_up")
        rows.append(
            {
                "name": name,
                "medium": upkeep.parts.media.get(name, ""),
                "state": states.get(name, "up" if is_up else "down"),
                "note": notes.get(name, ""),
                **counters,
                "hits": counts.hits,
                "hit_tokens": counts.hit_tokens,
                "bytes_served": counts.bytes_served,
                "seconds_saved": counts.seconds_saved,
            }
        )
    return rows


def link_rows(engine: CacheEngine) -> list[dict[str, Any]]:
    """Each link's estimated speed, and its queue."""
    tiers, queries = engine.queries.tiers(), engine.queries
    return [
        {
            "src": tiers[src].name,
            "dst": tiers[dst].name,
            "bytes_per_s": cost.bytes_per_s,
            "latency_s": cost.latency_s,
            "measurements": cost.num_measured,
            "queued_bytes": queries.queued_bytes((src, dst)),
        }
        for (src, dst), cost in engine.links.items()
    ]


def namespace_rows(gate: Gate) -> list[dict[str, Any]]:
    """One row per namespace, including those without a client."""
    engine, rows = gate.engine, []
    for namespace in engine.queries.namespaces():
        spec = gate.namespaces.get(namespace.digest)
        prefill = engine.prefill[namespace.number]
        rows.append(
            {
                "digest": namespace.digest.hex(),
                "name": spec.name if spec is not None else "",
                "block_tokens": namespace.block_tokens,
                "block_bytes": namespace.block_bytes,
                "blocks": engine.queries.num_blocks_of(namespace.number),
                "prefill_tokens_per_s": prefill.tokens_per_s() if prefill.num_observed else None,
                "loads": _loads(engine, namespace.number),
            }
        )
    return rows


def _loads(engine: CacheEngine, namespace: int) -> dict[str, Any] | None:
    """The estimated speed of the GPU worker's loads into an inference engine's pages; None before
    the first."""
    load = engine.estimates.loads.get(namespace)
    if load is None or not load.num_measured:
        return None
    tiers = engine.queries.tiers()
    speeds = {tiers[tier].name: speed for tier, speed in load.bytes_per_s.items()}
    return {"measurements": load.num_measured, "bytes_per_s": speeds}


def planner_row(engine: CacheEngine) -> dict[str, Any]:
    """The planner's decisions, the errors of its estimates, and its regret."""
    record, planner = engine.record, engine.planner
    observed = [cost.tokens_per_s() for cost in engine.prefill if cost.num_observed]
    reloads = record.reload_errors()
    regrets = record.regrets
    errors = reloads.summary() if reloads.num else {"judged": 0}
    return {
        "mode": engine.settings.planner.mode,
        **engine.ledger.planner_summary(),
        "judged": reloads.num,
        "mean_abs_error_s": errors.get("mean_abs_error_s"),
        "mean_relative_error": errors.get("mean_relative_error"),
        "prefill_tokens_per_s": observed[-1] if observed else None,
        "errors": [
            {
                "namespace": engine.queries.namespace(namespace).digest.hex(),
                "of": what,
                **errors.summary(),
            }
            for (namespace, what), errors in record.errors.items()
        ],
        "regret": {
            "judged": regrets.num,
            "wrong": regrets.num_wrong,
            "regret_s": regrets.regret_s,
            "share": regrets.regret_s / regrets.taken_s if regrets.taken_s else None,
        },
        "tried": {"decisions": planner.num_tried, "expected_cost_s": planner.tried_s},
        "cut_short": record.num_cut_short,
    }


def decision_rows(gate: Gate, last: int, now_s: float) -> list[dict[str, Any]]:
    """The last decisions on hits, newest first."""
    engine = gate.engine
    rows = []
    for record in engine.record.last(last):
        namespace = engine.queries.namespace(record.hit.namespace)
        spec = gate.namespaces.get(namespace.digest)
        hit, decision = record.hit, record.decision
        rows.append(
            {
                "number": record.number,
                "age_s": now_s - record.now_s,
                "namespace": namespace.digest.hex(),
                "name": spec.name if spec is not None else "",
                "prompt_tokens": hit.prompt_tokens,
                "skipped_tokens": hit.skipped_tokens,
                "runs": [[run.tier, run.num_blocks] for run in hit.runs],
                "decision": decision.name,
                "reason": decision.reason,
                "reload_blocks": decision.reload_blocks,
                "blocks_came": record.blocks_came,
                "predicted": {
                    "reload_s": decision.reload_s,
                    "prefill_s": decision.prefill_s,
                    "recompute_s": decision.recompute_s,
                },
                "actual": {"reload_s": record.reload_s, "prefill_s": record.prefill_s},
                "regret_s": record.regret_s,
                "sentence": f"{decision.sentence} {_what_came(record)}".strip(),
            }
        )
    return rows


def _what_came(record: Record) -> str:
    told = []
    if record.blocks_came is not None and record.blocks_came < record.decision.reload_blocks:
        came = f"{record.blocks_came} of {record.decision.reload_blocks} blocks came in time"
        told.append(came)
    for what, seconds in (("reload", record.reload_s), ("prefill", record.prefill_s)):
        if seconds is not None:
            told.append(f"the {what} took {seconds * 1e3:.1f} ms")
    if record.regret_s is not None:
        told.append(
            f"another way would have been {record.regret_s * 1e3:.1f} ms faster"
            if record.regret_s > 0
            else "no other way would have been faster"
        )
    text = ", ".join(told)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def gate_row(engine: CacheEngine) -> dict[str, Any]:
    """The first write gate's state; empty where all evicted blocks are written."""
    gate = next(iter(engine.gates().values()), None)
    if gate is None or gate.is_open:
        return {}
    return {"demanded_return": gate.demanded, "refused_blocks": gate.refused_blocks}


def history_row(engine: CacheEngine) -> dict[str, Any]:
    """The history's counters; empty where no policy uses a history."""
    history = engine.history
    if history is None:
        return {}
    return {
        "requests": history.num_requests,
        "fits": history.num_fits,
        "is_fitting": history.is_fitting or history.is_fit_due(),
    }


def memory_row(gate: Gate, index_tokens: int) -> dict[str, Any]:
    """The daemon's memory: shared (the arenas) and private. The index's part is estimated;
    `private_bytes` is all private memory, including libraries."""
    return {
        "arena_bytes": {tier: arena.memory_bytes for tier, arena in gate.arenas.items()},
        "index_bytes": gate.engine.queries.index_counters()["bytes"] + TOKEN_BYTES * index_tokens,
        "buffer_bytes": {
            "waiting puts": gate.waiting.put_bytes(),
            "frames not read": sum(s.unread.num_bytes() for s in gate.sessions),
            "for workers": gate.upkeep.mover.unsent_bytes(),
            "conversations": gate.state(Conversations).num_bytes,
        },
        "private_bytes": _private_bytes(),
    }


def _private_bytes() -> int:
    """Resident private memory: without the arenas and mapped files."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def queue_rows(gate: Gate) -> list[dict[str, Any]]:
    """Everything that grows with clients' requests: its length, its limit, the configuration key of
    the limit, and how often a request was refused because of it."""
    limits, queries, mover = gate.limits, gate.engine.queries, gate.upkeep.mover
    pinned_share, num_spaces = round(queries.pinned_share(), 4), len(queries.namespaces())
    rows = [
        ("sessions", len(gate.sessions), limits.max_sessions, "max_sessions"),
        ("namespaces", num_spaces, limits.max_namespaces, "max_namespaces"),
        ("leases", gate.engine.num_leases, limits.max_leases, "max_leases"),
        ("leased memory", round(gate.leased_share, 4), limits.max_leased, "max_leased"),
        ("pinned memory", pinned_share, limits.max_pinned, "max_pinned"),
        ("waiting puts", len(gate.waiting.puts), limits.max_waiting, "max_waiting"),
    ]
    found = [(*row, gate.turned_away[row[0]]) for row in rows]
    for device, length in mover.num_queued().items():
        bound = limits.max_queued_moves
        found.append((f"moves of {device}", length, bound, "max_queued_moves", mover.num_refused))
    for session in gate.sessions:
        unread = session.unread.num_bytes()
        if unread:
            name = f"unread by {session.client}"
            found.append((name, unread, limits.max_unread_bytes, "max_unread", 0))
    keys = ("name", "length", "bound", "key", "refused")
    return [dict(zip(keys, (*row[:3], f"limits.{row[3]}", row[4]), strict=True)) for row in found]


def index_row(engine: CacheEngine, namespaces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The size of the index. `namespaces`: their rows."""
    counters = engine.queries.index_counters()
    tokens = sum(row["blocks"] * row["block_tokens"] for row in namespaces)
    return {"blocks": counters["blocks"], "nodes": counters["nodes"], "tokens": tokens}
