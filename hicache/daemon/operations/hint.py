"""`hint`: whether and when a prompt will be extended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hicache.daemon.gate import Asked, Gate, handles
from hicache.daemon.operations.conversations import Conversations
from hicache.engine import plan as p
from hicache.protocol.messages import WireError
from hicache.protocol.operations import HINT, HintReply, HintRequest

ENDED: Final[Mapping[str, p.Ended]] = {
    "": "",
    "turn": "turn",
    "tool_call": "tool_call",
    "conversation": "conversation",
}


@handles(HINT)
def hint(gate: Gate, asked: Asked[HintRequest]) -> None:
    """A hint about the prompt `tokens`, or the conversation's newest one."""
    request, session = asked.request, asked.session
    tokens, conversation = request.tokens, request.conversation
    ended = ENDED.get(request.ended)
    if ended is None:
        raise WireError("malformed", f"ended: must be one of {', '.join(ENDED)[2:]}")
    gate.check_tokens(tokens)
    conversations = gate.state(Conversations)
    if conversation and tokens:
        conversations.went_on(session.namespace, conversation, tokens)
    known = tokens or conversations.newest(session.namespace, conversation)
    if known:
        event = p.Hint(
            session.namespace,
            known,
            asked.now_s,
            ended,
            request.finish_reason,
            request.return_s,
            request.keep,
            request.answer_tokens,
        )
        gate.do(event)
    stop = " ".join(filter(None, (ended, request.finish_reason)))
    noted = session, conversation, stop, request.answer_tokens, asked.now_s
    gate.observers.note(lambda observer: observer.hinted(*noted))
    if conversation and ended == "conversation":
        conversations.ended(session.namespace, conversation)
    gate.confirm(asked, HintReply(known=bool(known)))
