"""What `stats`, `explain` and `tree` answer: of the cache engine, the mover and the front door."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hicache.daemon.dispatch import Service
from hicache.daemon.operations.warm import pin_rows
from hicache.daemon.upkeep.health import Condition
from hicache.engine.core import CacheEngine
from hicache.engine.index.snapshot import page
from hicache.engine.plan import Priority
from hicache.engine.planner.decision_log import Record
from hicache.engine.residency.blocks import CopyState
from hicache.engine.residency.pinned import pinned_bytes
from hicache.protocol.messages import TOKEN_BYTES
from hicache.protocol.operations import TreeRequest
from hicache.tiers.block import slot_bytes_for
from hicache.transfer.mover import Mover

NODE_BYTES: Final = 400
"""Of the index, without its symbols: about (`make bench-index BENCH_ARGS=--scale` measures it)."""


def report(
    service: Service, mover: Mover, condition: Condition, media: Mapping[str, str]
) -> dict[str, Any]:
    """The answer to `stats`, but for what names the process. `media`: of each tier."""
    engine = service.engine
    book = engine.residency.leases
    notes, states = condition.tier_notes(), condition.tier_states()
    namespaces = namespace_rows(service)
    index = index_row(engine, namespaces)
    return {
        "sessions": len(service.sessions),
        "leases": len(book.leases),
        "pins": pin_rows(engine, service.epoch, time.monotonic()),
        "pinned_blocks": len(book.kept),
        "tickets": len(book.tickets),
        "waiting": len(service.waiting) + len(service.clearances),
        "namespaces": namespaces,
        "index": index,
        "tiers": tier_rows(engine, media, notes, states),
        "links": link_rows(engine),
        "planner": planner_row(service),
        "requests": dict(service.requests),
        "errors": dict(service.errors),
        "puts": dict(service.puts),
        "gate": gate_row(engine),
        "history": history_row(engine),
        "dropped_blocks": engine.evictor.dropped,
        "workers": mover.pids(),
        "memory": memory_row(service, mover, index["tokens"]),
        "pages": service.paging.counts(),
        "queues": queue_rows(service, mover),
    }


def tier_rows(
    engine: CacheEngine,
    media: Mapping[str, str],
    notes: Mapping[str, str],
    states: Mapping[str, str],
) -> list[dict[str, Any]]:
    """One row per tier, fastest first."""
    residency = engine.residency
    rows = []
    for number, spec in enumerate(residency.tiers):
        pool = residency.pools[number]
        counts = engine.ledger.tiers[spec.name]
        states_of = residency.blocks.counts[number]
        into = [m for m in residency.moves.values() if m.dst == spec.name]
        rows.append(
            {
                "name": spec.name,
                "medium": media.get(spec.name, ""),
                "state": states.get(spec.name, "up" if residency.is_up(number) else "down"),
                "note": notes.get(spec.name, ""),
                "capacity_bytes": pool.capacity_bytes,
                "used_bytes": pool.used_bytes,
                "given_back_bytes": len(pool.withheld) * pool.slab_bytes,
                "quarantined_bytes": pool.quarantined_bytes,
                "pinned_bytes": pinned_bytes(residency, number),
                "blocks": int(states_of[CopyState.READY] + states_of[CopyState.DRAINING]),
                "hits": counts.hits,
                "hit_tokens": counts.hit_tokens,
                "bytes_served": counts.bytes_served,
                "seconds_saved": counts.seconds_saved,
                "promotions": residency.promoted[number],
                "demotions": residency.demoted[number],
                "evictions": residency.evicted[number],
                "corrupt": residency.corrupt[number],
                "queue_depth": len(into),
                "queue_bytes": sum(move.block_bytes for move in into),
            }
        )
    return rows


def link_rows(engine: CacheEngine) -> list[dict[str, Any]]:
    """What each link is believed to do, and what is on it."""
    residency = engine.residency
    return [
        {
            "src": residency.tiers[src].name,
            "dst": residency.tiers[dst].name,
            "bytes_per_s": cost.bytes_per_s,
            "latency_s": cost.latency_s,
            "measurements": cost.num_measured,
            "queued_bytes": residency.bytes_moving((src, dst), Priority.DEMOTION),
        }
        for (src, dst), cost in engine.links.items()
    ]


def namespace_rows(service: Service) -> list[dict[str, Any]]:
    """One row per namespace, those without a client included."""
    residency = service.engine.residency
    rows = []
    for namespace in residency.namespaces:
        spec = service.namespaces.get(namespace.digest)
        prefill = service.engine.prefill[namespace.number]
        rows.append(
            {
                "digest": namespace.digest.hex(),
                "name": spec.name if spec is not None else "",
                "block_tokens": namespace.block_tokens,
                "block_bytes": namespace.block_bytes,
                "blocks": residency.index.num_blocks[namespace.number],
                "prefill_tokens_per_s": prefill.tokens_per_s() if prefill.num_observed else None,
                "loads": _loads(service.engine, namespace.number),
            }
        )
    return rows


def tree_rows(
    service: Service, body: TreeRequest, now_s: float, *, with_tokens: bool
) -> dict[str, Any]:
    """A page of the index's nodes (engine/index/snapshot.py), and the namespaces that are in it."""
    residency = service.engine.residency
    after, most, digest = body.after, body.most, body.namespace
    found = page(residency, after, most, now_s, digest, with_tokens=with_tokens)
    spaces = [residency.namespaces[number] for number in found.namespaces]
    names = [service.namespaces.get(space.digest) for space in spaces]
    return {
        "tiers": [tier.name for tier in residency.tiers],
        "namespaces": [
            {
                "digest": space.digest.hex(),
                "name": spec.name if spec is not None else "",
                "block_tokens": space.block_tokens,
                "block_bytes": space.block_bytes,
                "slot_bytes": slot_bytes_for(space.block_bytes),
            }
            for space, spec in zip(spaces, names, strict=True)
        ],
        "nodes": found.runs,
        "next": found.next,
        "end": found.end,
    }


def _loads(engine: CacheEngine, namespace: int) -> dict[str, Any] | None:
    """What the GPU worker's loads into an inference engine's pages are believed to do; None before
    there was one."""
    load = engine.estimates.loads.get(namespace)
    if load is None or not load.num_measured:
        return None
    tiers = engine.residency.tiers
    speeds = {tiers[tier].name: speed for tier, speed in load.bytes_per_s.items()}
    return {"measurements": load.num_measured, "bytes_per_s": speeds}


def planner_row(service: Service) -> dict[str, Any]:
    """The planner's decisions, how well it foresaw what they took, and what they should have
    been."""
    engine = service.engine
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
                "namespace": engine.residency.namespaces[namespace].digest.hex(),
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


def decision_rows(service: Service, last: int, now_s: float) -> list[dict[str, Any]]:
    """The last decisions on hits, the youngest first."""
    engine = service.engine
    rows = []
    for record in engine.record.last(last):
        namespace = engine.residency.namespaces[record.hit.namespace]
        spec = service.namespaces.get(namespace.digest)
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
    """What is written to disk now of what memory gives up; empty where all of it is."""
    gate = engine.gate
    if gate.is_open:
        return {}
    return {"demanded_return": gate.demanded, "refused_blocks": gate.refused_blocks}


def history_row(engine: CacheEngine) -> dict[str, Any]:
    """What is known of earlier requests; empty where no policy wants to."""
    history = engine.history
    if history is None:
        return {}
    return {
        "requests": history.num_requests,
        "fits": history.num_fits,
        "is_fitting": history.is_fitting or history.is_fit_due(),
    }


def memory_row(service: Service, mover: Mover, index_tokens: int) -> dict[str, Any]:
    """Where the daemon's memory is: shared (the arenas) and its own. The index is estimated; all
    that is its own is in `private_bytes`, libraries included."""
    residency = service.engine.residency
    symbols = TOKEN_BYTES * index_tokens
    return {
        "arena_bytes": {tier: arena.memory_bytes for tier, arena in service.arenas.items()},
        "index_bytes": residency.blocks.num_bytes()
        + symbols
        + NODE_BYTES * residency.index.num_nodes,
        "buffer_bytes": {
            "waiting puts": service.waiting.put_bytes(),
            "frames not read": sum(s.unread.num_bytes() for s in service.sessions),
            "for workers": mover.unsent_bytes(),
            "conversations": service.conversations.num_bytes,
        },
        "private_bytes": _private_bytes(),
    }


def _private_bytes() -> int:
    """Resident and not shared: neither the arenas nor mapped files."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def queue_rows(service: Service, mover: Mover) -> list[dict[str, Any]]:
    """Everything that may grow with what clients ask for: how much there is, at most, by which key
    of the configuration, and how often it was refused for that."""
    limits, residency, waiting = service.limits, service.engine.residency, service.waiting
    turned = service.turned_away
    rows = [
        ("sessions", len(service.sessions), limits.max_sessions, "max_sessions"),
        ("namespaces", len(residency.namespaces), limits.max_namespaces, "max_namespaces"),
        ("leases", len(residency.leases.leases), limits.max_leases, "max_leases"),
        ("leased memory", round(service.leased_share, 4), limits.max_leased, "max_leased"),
        ("pinned memory", _pinned_share(service), limits.max_pinned, "max_pinned"),
        ("waiting puts", len(waiting.puts), limits.max_waiting, "max_waiting"),
    ]
    told = [(*row, turned[row[0]]) for row in rows]
    for device, length in mover.num_queued().items():
        bound = limits.max_queued_moves
        told.append((f"moves of {device}", length, bound, "max_queued_moves", mover.num_refused))
    for session in service.sessions:
        unread = session.unread.num_bytes()
        if unread:
            name = f"unread by {session.client}"
            told.append((name, unread, limits.max_unread_bytes, "max_unread", 0))
    keys = ("name", "length", "bound", "key", "refused")
    return [dict(zip(keys, (*row[:3], f"limits.{row[3]}", row[4]), strict=True)) for row in told]


def _pinned_share(service: Service) -> float:
    """Of the tier where it is most."""
    residency = service.engine.residency
    pools = enumerate(residency.pools)
    return round(
        max(pinned_bytes(residency, n) / max(1, pool.capacity_bytes) for n, pool in pools), 4
    )


def index_row(engine: CacheEngine, namespaces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The size of the index. `namespaces`: their rows."""
    residency = engine.residency
    tokens = sum(row["blocks"] * row["block_tokens"] for row in namespaces)
    return {"blocks": len(residency.blocks), "nodes": residency.index.num_nodes, "tokens": tokens}
