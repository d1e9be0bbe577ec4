"""An operation that exists only in the tests, 2 of 3: a daemon that serves `count`.

python -m tests.e2e.counting_daemon serve --config FILE
"""

from __future__ import annotations

from hicache import cli
from hicache.daemon.gate import Asked, Gate, handles
from hicache.engine import plan as p
from tests.e2e.count_operation import COUNT, CountReply, CountRequest


@handles(COUNT)
def count(gate: Gate, asked: Asked[CountRequest]) -> None:
    """How many blocks of a prompt are held. Leases nothing."""
    request = asked.request
    gate.check_tokens(request.tokens)
    wanted = p.MatchPrompt(asked.session.namespace, request.tokens, asked.owner, asked.now_s, 0.0)
    blocks = gate.engine.score(wanted).hit_blocks
    gate.reply(asked.peer, CountReply(blocks=blocks, note=request.note))


if __name__ == "__main__":
    cli.main()
