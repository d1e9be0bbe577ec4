"""What a client says to the daemon and does with the answers; sockets and waiting are a Port's.

Written once, as coroutines: `blocking` runs them over a port that blocks, `aio` over one that
awaits. The promises are kept here:

- every call has one deadline, and ends by it (a put may have a copy to end first: `storing`);
- a daemon that is absent, dies, answers garbage or refuses is a miss: no exception leaves `match`,
  `score`, `warm`, `pin`, `fetch`, `put`, `release`, `observe` (a caller's own mistake, such as a
  wrong shape, raises);
- after a failure the circuit breaker answers for the daemon, so a dead one costs one timeout and
  not one per request;
- leases and tickets go only to the session that got them: another daemon's lease of the same
  number must never be fetched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np

from hicache.client.put import Fill, PutCall, Source
from hicache.client.results import (
    Bytes2D,
    Decision,
    Fetched,
    FetchedRun,
    Match,
    Ping,
    Pinned,
    PutResult,
    Score,
    Warmed,
    read_count,
    read_match,
    read_ping,
    read_pinned,
    read_plain_match,
    read_runs,
    read_scores,
    read_unpinned,
    read_warmed,
)
from hicache.client.session import TROUBLE, Body, Connection
from hicache.client.transport import Reply
from hicache.protocol.keys import TOKEN_BYTES, Tokens, encode_tokens
from hicache.protocol.messages import WireError
from hicache.protocol.operations import (
    MAX_DEADLINE_S,
    MAX_SCORED_PROMPTS,
    MAX_SCORED_TOKENS,
    MatchRequest,
)
from hicache.tiers.arena import Arena

T = TypeVar("T")
Ended = Literal["", "turn", "tool_call", "conversation"]
"""What has ended with an answer: a turn that waits for a person, a turn that waits for a tool, or
the whole conversation."""


def waiting(wait_s: float) -> Mapping[str, Any]:
    """The fields of a `warm` that is answered after so long at the latest: the daemon answers 5 %
    and a tick before the deadline that it is told."""
    if not wait_s > 0:
        return {"wait": False}
    return {"wait": True, "deadline_s": min(MAX_DEADLINE_S, (wait_s + 0.1) / 0.95)}


class Dialogue:
    """One client's conversation with one daemon about one namespace."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._storing = PutCall(connection)

    @cached_property
    def _namespace(self) -> bytes:
        return self._connection.spec.digest()

    async def match(
        self,
        tokens: Tokens,
        request: str,
        skip_blocks: int,
        hop_bytes_per_s: float,
        explain: bool,
        conversation: str,
    ) -> Match:
        packed = encode_tokens(tokens)
        started_s = time.monotonic()
        asks = MatchRequest(
            tokens=packed,
            request=request,
            skip_blocks=skip_blocks,
            hop_bytes_per_s=hop_bytes_per_s,
            explain=bool(explain),
            conversation=conversation,
        )
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.call_s
            greeting = self._connection.greeting or await self._connection.greeted(deadline_s)
            if len(packed) > greeting.max_prompt_tokens * TOKEN_BYTES:
                whole = greeting.max_prompt_tokens // greeting.block_tokens * greeting.block_tokens
                asks.tokens = packed[: whole * TOKEN_BYTES]
            asked, match = self._connection.ask_at_once(
                "match", asks, deadline_s, greeting, read_plain_match
            )
            if match is None:
                greeting, reply, _ = await self._connection.ask("match", asks, deadline_s, asked)
                match = read_match(reply)
            match.session = greeting.session
        except TROUBLE as trouble:
            return Match.miss(self._connection.failed(trouble, started_s))
        self._connection.succeeded()
        return match

    async def score(self, prompts: Sequence[Tokens]) -> list[Score]:
        """Asked without a session: who only asks this takes none."""
        packed = [encode_tokens(tokens)[: MAX_SCORED_TOKENS * TOKEN_BYTES] for tokens in prompts]
        if not packed:
            return []
        started_s = time.monotonic()
        scores: list[Score] = []
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.call_s
            for some in _portions(packed):
                lengths = [len(tokens) // TOKEN_BYTES for tokens in some]
                body = {
                    "namespace": self._namespace,
                    "tokens": b"".join(some),
                    "lengths": encode_tokens(lengths),
                }
                reply, _ = await self._connection.exchange("score", body, deadline_s, None)
                scores += read_scores(reply, len(some))
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
        else:
            self._connection.succeeded()
        return scores + [Score(is_answered=False)] * (len(packed) - len(scores))

    async def warm(self, tokens: Tokens, wait_s: float) -> Warmed:
        """Asked without a session, like `score`."""
        body = {"namespace": self._namespace, "tokens": encode_tokens(tokens), **waiting(wait_s)}
        patience_s = max(0.0, wait_s) + self._connection.timeouts.call_s
        return await self._ask("warm", body, patience_s, read_warmed) or Warmed(is_answered=False)

    async def pin(self, tokens: Tokens, ttl_s: float, name: str) -> Pinned:
        body = {
            "namespace": self._namespace,
            "tokens": encode_tokens(tokens),
            "ttl_s": float(ttl_s),
            "name": name,
        }
        patience_s = self._connection.timeouts.call_s
        return await self._ask("pin", body, patience_s, read_pinned) or Pinned()

    async def unpin(self, pin: Pinned | str) -> bool:
        body = {"pin": pin.pin if isinstance(pin, Pinned) else pin}
        patience_s = self._connection.timeouts.call_s
        return bool(await self._ask("unpin", body, patience_s, read_unpinned))

    async def _ask(
        self, op: str, body: Body, patience_s: float, read: Callable[[Reply], T]
    ) -> T | None:
        """Without a session; None where no daemon answers as it should."""
        started_s = time.monotonic()
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + patience_s
            reply, _ = await self._connection.exchange(op, body, deadline_s, None)
            answer = read(reply)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
            return None
        self._connection.succeeded()
        return answer

    async def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match:
        started_s = time.monotonic()
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.call_s
            greeting = await self._connection.greeted(deadline_s)
        except TROUBLE as trouble:
            return Match.miss(self._connection.failed(trouble, started_s))
        self._connection.succeeded()
        if greeting.epoch != epoch or greeting.group != group:
            return Match.miss("the lease is of another group, or of another run of the daemon")
        return Match(
            lease, blocks, (), Decision("reload", blocks, "adopted"), session=greeting.session
        )

    async def fetch_runs(self, match: Match) -> AsyncGenerator[FetchedRun, None]:
        """Ends early on any trouble: what did not come is a miss."""
        started_s = time.monotonic()
        deadline_s = started_s + self._connection.timeouts.fetch_s
        try:
            self._connection.begin(started_s)
            greeting = self._connection.session_of(match)
            if greeting is None:
                return
            arenas: Mapping[str, Arena] = self._connection.arenas
            request_id = await self._connection.send(
                "fetch", {"lease": match.lease}, deadline_s, greeting
            )
            try:
                is_last = False
                while not is_last:
                    reply, parts = await self._connection.answer(request_id, deadline_s, greeting)
                    for run in read_runs(reply, parts, arenas, greeting.block_bytes):
                        yield run
                    is_last = not reply.get("more")
            finally:
                self._connection.mailbox.done(request_id)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)
        else:
            self._connection.succeeded()

    async def fetch(self, match: Match, out: Bytes2D) -> Fetched:
        self._check_blocks(out, "out")
        started_s = time.monotonic()
        wanted = min(match.decision.reload_blocks, len(out))
        tier_of: list[str] = [""] * wanted
        runs = self.fetch_runs(match)
        try:
            async for run in runs:
                rows = out[run.first : min(run.first + run.num_blocks, wanted)]
                if not len(rows):
                    continue
                is_valid = await self._connection.copy(partial(_copy_and_verify, run, rows))
                if not is_valid:
                    self._connection.last_error = "blocks were reused while they were copied"
                span = slice(run.first, run.first + len(rows))
                tier_of[span] = [run.tier if is_valid else ""] * len(rows)
        finally:
            await runs.aclose()
        blocks = tier_of.index("") if "" in tier_of else wanted
        by_tier = dict(Counter(tier_of[:blocks]))
        return Fetched(blocks, time.monotonic() - started_s, by_tier)

    async def release(self, match: Match, hop_bytes: float, hop_s: float, total_s: float) -> None:
        """Sent, not waited for, like `observe`."""
        started_s = time.monotonic()
        body = {
            "lease": match.lease,
            "hop_bytes": float(hop_bytes),
            "hop_s": float(hop_s),
            "total_s": float(total_s),
        }
        try:
            self._connection.begin(started_s)
            greeting = self._connection.session_of(match)
            if greeting is not None:
                deadline_s = started_s + self._connection.timeouts.call_s
                await self._connection.post("release", body, deadline_s, greeting)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)

    async def put(
        self,
        tokens: Tokens,
        blocks: Bytes2D | Fill,
        first: int,
        last: int | None,
        durable: bool,
    ) -> PutResult:
        packed = encode_tokens(tokens)
        whole = len(packed) // (TOKEN_BYTES * self._connection.spec.block_tokens)
        last = whole if last is None else last
        if not 0 <= first <= last <= whole:
            raise ValueError(f"blocks {first} … {last} of a prompt of {whole} whole blocks")
        source = Source(blocks, first, self._connection.spec.block_bytes)
        if not callable(blocks):
            self._check_blocks(blocks, "blocks")
            if len(blocks) != last - first:
                raise ValueError(f"{len(blocks)} blocks given for {first} … {last}")
        return await self._storing.put(packed, first, last, source, durable)

    async def observe(
        self, num_requests: int, sum_n: float, sum_nc: float, decode_tokens: int, seconds: float
    ) -> None:
        """Sent, not waited for: it stands between an inference engine and its next step."""
        started_s = time.monotonic()
        body = {
            "num_requests": num_requests,
            "sum_n": float(sum_n),
            "sum_nc": float(sum_nc),
            "decode_tokens": decode_tokens,
            "seconds": float(seconds),
        }
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.call_s
            await self._connection.post(
                "observe", body, deadline_s, await self._connection.greeted(deadline_s)
            )
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)

    async def hint(
        self,
        tokens: Tokens | None,
        conversation: str,
        ended: Ended,
        finish_reason: str,
        return_s: float,
        keep: bool,
        answer_tokens: int,
    ) -> None:
        """Sent, not waited for, like `observe`."""
        started_s = time.monotonic()
        body: dict[str, Any] = {"tokens": b"" if tokens is None else encode_tokens(tokens)}
        if conversation:
            body["conversation"] = conversation
        if ended:
            body["ended"] = ended
        if finish_reason:
            body["finish_reason"] = finish_reason
        if return_s:
            body["return_s"] = float(return_s)
        if not keep:
            body["keep"] = False
        if answer_tokens:
            body["answer_tokens"] = int(answer_tokens)
        try:
            self._connection.begin(started_s)
            deadline_s = started_s + self._connection.timeouts.call_s
            greeting = await self._connection.greeted(deadline_s)
            body["tokens"] = body["tokens"][: greeting.max_prompt_tokens * TOKEN_BYTES]
            await self._connection.post("hint", body, deadline_s, greeting)
        except TROUBLE as trouble:
            self._connection.failed(trouble, started_s)

    async def ping(self) -> Ping | None:
        started_s = time.monotonic()
        reply = await self._connection.ask_plain("ping")
        if reply is None:
            return None
        try:
            ping = read_ping(reply, time.monotonic() - started_s)
        except WireError as trouble:
            self._connection.failed(trouble, started_s)
            return None
        if self._connection.greeting is not None and self._connection.greeting.epoch != ping.epoch:
            self._connection.lose(self._connection.greeting)
        return ping

    async def stats(self) -> dict[str, Any] | None:
        return await self._connection.ask_plain("stats")

    async def health(self) -> dict[str, Any] | None:
        return await self._connection.ask_plain("health")

    async def heartbeat(self) -> bool:
        return await self._connection.ask_in_session("heartbeat") is not None

    async def clear(self) -> int:
        reply = await self._connection.ask_in_session("clear")
        try:
            return 0 if reply is None else read_count(reply, "cleared")
        except WireError as trouble:
            self._connection.last_error = str(trouble)
            return 0

    def _check_blocks(self, blocks: Bytes2D, name: str) -> None:
        block_bytes = self._connection.spec.block_bytes
        if (
            not isinstance(blocks, np.ndarray)
            or blocks.dtype != np.uint8
            or blocks.ndim != 2
            or blocks.shape[1] != block_bytes
            or not blocks.flags.c_contiguous
        ):
            found = f"{getattr(blocks, 'dtype', type(blocks).__name__)}"
            found += f" {getattr(blocks, 'shape', '')}"
            raise ValueError(f"{name} must be C-contiguous uint8 [n, {block_bytes}], not {found}")


def _portions(prompts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """As many at a time as one `score` takes, in order."""
    some: list[bytes] = []
    room = MAX_SCORED_TOKENS * TOKEN_BYTES
    for tokens in prompts:
        if some and (len(some) == MAX_SCORED_PROMPTS or len(tokens) > room):
            yield some
            some, room = [], MAX_SCORED_TOKENS * TOKEN_BYTES
        some.append(tokens)
        room -= len(tokens)
    if some:
        yield some


def _copy_and_verify(run: FetchedRun, rows: Bytes2D) -> bool:
    try:
        run.copy_to(rows)
    except ValueError:  # another task opened a new session, whose arena took this one's place
        return False
    return run.verify()
