"""An operation that exists only in the tests, 1 of 3: what `count` asks and answers."""

from __future__ import annotations

from hicache.protocol.messages import Operation, Reply, Request, U32s, declare
from hicache.protocol.operations import Count, Name


class CountRequest(Request, tag="count"):
    tokens: U32s
    note: Name = ""


class CountReply(Reply):
    blocks: Count
    note: str


COUNT = declare(Operation(CountRequest, CountReply, capability="count"))
