"""`match`: finds a prompt's held blocks, and leases those worth reloading."""

from __future__ import annotations

import xxhash

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.conversations import Conversations
from hicache.daemon.sessions import RememberedMatch
from hicache.engine import plan as p
from hicache.protocol.operations import MATCH, DecisionReply, MatchReply, MatchRequest


@handles(MATCH)
def match(gate: Gate, asked: Asked[MatchRequest]) -> None:
    """A repeated request with the same id and prompt gets the same lease while that lasts."""
    wanted, session = asked.request, asked.session
    tokens, request, skip_blocks = wanted.tokens, wanted.request, wanted.skip_blocks
    gate.check_tokens(tokens)
    digest = b""
    if request:
        digest = xxhash.xxh3_128_digest(tokens)
        known = session.matches.get(request)
        if (
            known is not None
            and known.tokens == digest
            and known.skip_blocks == skip_blocks
            and gate.engine.queries.has_lease(known.lease)
        ):
            gate.reply(asked.peer, known.reply)
            return
    gate.check_leases()
    owner = session.group.number
    event = p.MatchPrompt(
        session.namespace,
        tokens,
        owner,
        asked.now_s,
        gate.limits.lease_ttl_s,
        wanted.hop_bytes_per_s,
        skip_blocks,
        by_worker=(owner, session.namespace) in gate.page_owners,
    )
    matched = gate.do(event)
    decision = matched.decision
    reply = MatchReply(
        lease=matched.lease,
        hit_blocks=matched.hit_blocks,
        runs=[(run.tier, run.num_blocks) for run in matched.runs],
        decision=DecisionReply(
            decision.name,
            decision.reload_blocks,
            decision.reason,
            decision.reload_s,
            decision.prefill_s,
            decision.recompute_s,
            decision.sentence if wanted.explain else "",
        ),
    )
    gate.reply(asked.peer, reply)
    if request and matched.lease:
        session.remember(request, RememberedMatch(digest, skip_blocks, matched.lease, reply))
    conversation = wanted.conversation
    if conversation:
        gate.state(Conversations).went_on(session.namespace, conversation, tokens)
    gate.observers.note(lambda o: o.asked(session, tokens, conversation, asked.now_s))
