"""A client's operations, without I/O: each method is one operation.

Written once; `Client` and `AsyncClient` inherit them (see `steps`). What they promise:

- every call has one deadline, and ends by it (a put may have to finish a copy first: `put`);
- a daemon that is absent, dies, sends garbage or refuses is a miss, and `last_error` says why: a
  call raises only for mistakes of its caller, such as a wrong shape;
- after a failure the circuit breaker skips the daemon for a while, so a dead one costs one timeout,
  not one per request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final, Literal, TypeVar

import msgspec

from hicache.client.put import Fill, PutCall, Source, check_blocks
from hicache.client.replies import (
    read_match,
    read_pinned,
    read_reply,
    read_runs,
    read_scores,
    read_warmed,
)
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
)
from hicache.client.session import TROUBLE, Connection
from hicache.client.steps import Give, ReplyMap, Send, Steps, Stream, operation, stream
from hicache.protocol.messages import TOKEN_BYTES, Tokens, encode_tokens
from hicache.protocol.operations import (
    MAX_DEADLINE_S,
    MAX_SCORED_PROMPTS,
    MAX_SCORED_TOKENS,
    ClearReply,
    ClearRequest,
    Count,
    FetchRequest,
    HealthRequest,
    HeartbeatRequest,
    HintRequest,
    MatchRequest,
    ObserveRequest,
    Operation,
    PingReply,
    PingRequest,
    PinRequest,
    ReleaseRequest,
    Reply,
    Request,
    ScoreRequest,
    StatsRequest,
    UnpinReply,
    UnpinRequest,
    WarmRequest,
    operation_of,
)

T = TypeVar("T")
Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)
Ended = Literal["", "turn", "tool_call", "conversation"]
"""What has ended with an answer: a turn (next: a person), a turn (next: a tool's result), or the
conversation."""


def warm_deadline_s(wait_s: float) -> float:
    """The deadline of a `warm` that is to be answered within `wait_s`: the daemon answers 5 % and
    one tick before the deadline that it is given."""
    return min(MAX_DEADLINE_S, (wait_s + 0.1) / 0.95)


class AnsweredMatch(Match, kw_only=True):
    """A match decoded directly from its reply's bytes, for speed: an inference engine waits for it
    before its first token."""

    id: Count
    ok: bool


_plain_match: Final = msgspec.msgpack.Decoder(AnsweredMatch)


def read_plain_match(data: bytes, request_id: int) -> Match | None:
    """Decode a plain match. None for anything else: then use `read_match`."""
    try:
        match = _plain_match.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if match.id != request_id or not match.ok or match.decision.reload_blocks > match.hit_blocks:
        return None
    return match


class Calls:
    """Base of the classes that declare operations."""

    _connection: Connection

    def _ask(
        self, request: Request, read: Callable[[ReplyMap], T], timeout_s: float = 0.0
    ) -> Steps[T | None]:
        """Send a request, and return `read` of the reply; None after a failure. `timeout_s`
        defaults to that of an ordinary call."""
        connection = self._connection
        attempt = connection.attempt(timeout_s or connection.timeouts.call_s)
        with attempt:
            attempt.admit()
            if operation_of(request).needs_session:
                _, reply = yield from connection.ask(request, attempt.deadline_s)
            else:
                reply, _ = yield from connection.exchange(request, attempt.deadline_s)
            return read(reply)
        return None


class PromptCalls(Calls):
    """Operations about one prompt, or several."""

    @operation
    def match(
        self,
        tokens: Tokens,
        *,
        request: str = "",
        skip_blocks: int = 0,
        hop_bytes_per_s: float = 0.0,
        explain: bool = False,
        conversation: str = "",
    ) -> Steps[Match]:
        """Find the held blocks of this prompt, and how many of them to reload.

        `request`: the same id and prompt again get the same lease. `skip_blocks` blocks at the
        front are held by the inference engine itself. `hop_bytes_per_s`: the speed of its copy of
        the fetched bytes to their destination, 0 if there is none or it is unknown. `explain`: let
        the daemon compose the decision's `sentence`. `conversation`: its name, so that a `hint`
        needs no tokens.
        """
        connection, packed = self._connection, encode_tokens(tokens)
        wanted = MatchRequest(
            tokens=packed,
            request=request,
            skip_blocks=skip_blocks,
            hop_bytes_per_s=hop_bytes_per_s,
            explain=bool(explain),
            conversation=conversation,
        )
        # An inference engine waits for this before it can compute its first token: what `attempt`,
        # `ask` and `exchange` do stands here where nothing is unusual (2 µs less).
        started_s = connection.clock()
        deadline_s = started_s + connection.timeouts.call_s
        try:
            connection.admit(started_s)
            greeting = connection.greeting or (yield from connection.greeted(deadline_s))
            if len(packed) > greeting.max_prompt_tokens * TOKEN_BYTES:
                whole = greeting.max_prompt_tokens // greeting.block_tokens * greeting.block_tokens
                wanted.tokens = packed[: whole * TOKEN_BYTES]
            if connection.late:
                yield from connection.clean_up()
            request_id, head = connection.packed(wanted, deadline_s, greeting.session)
            frames = yield Send((head,), deadline_s)
            match = None if frames is None else read_plain_match(frames[0], request_id)
            if match is None:
                sent = request_id, frames
                greeting, reply = yield from connection.ask(wanted, deadline_s, greeting, sent)
                match = read_match(reply)
            match.session = greeting.session
        except TROUBLE as trouble:
            connection.record_failure(trouble, started_s)
            return Match.miss(connection.last_error)
        connection.record_success()
        return match

    @operation
    def score(self, prompts: Sequence[Tokens]) -> Steps[list[Score]]:
        """What a match of each prompt would find now, to choose a daemon for a request. Leases and
        changes nothing. Opens no session.

        Any number of prompts; more than 128, or 2,097,152 tokens, take several requests within one
        `timeout_s`. Of a longer prompt the first 2,097,152 tokens count. Prompts without an answer
        in time are not `is_answered`."""
        packed = [encode_tokens(tokens)[: MAX_SCORED_TOKENS * TOKEN_BYTES] for tokens in prompts]
        if not packed:
            return []
        connection = self._connection
        scores: list[Score] = []
        attempt = connection.attempt(connection.timeouts.call_s)
        with attempt:
            attempt.admit()
            for portion in _portions(packed):
                wanted = ScoreRequest(
                    namespace=self._namespace,
                    tokens=b"".join(portion),
                    lengths=encode_tokens([len(tokens) // TOKEN_BYTES for tokens in portion]),
                )
                reply, _ = yield from connection.exchange(wanted, attempt.deadline_s)
                scores += read_scores(reply, len(portion))
        return scores + [Score(is_answered=False)] * (len(packed) - len(scores))

    @operation
    def warm(self, tokens: Tokens, *, wait_s: float = 0.0) -> Steps[Warmed]:
        """Copy this prompt's held blocks to where clients can read them, because a request for it
        is expected: with the lowest priority, and only into free room. Opens no session.

        Returns as soon as it is planned, or, with `wait_s`, when no more will come or that time has
        passed. Copying ends after the daemon's `limits.lease_ttl` at the latest; the blocks that
        have come stay like any others."""
        wanted = WarmRequest(
            namespace=self._namespace, tokens=encode_tokens(tokens), wait=wait_s > 0
        )
        if wanted.wait:
            wanted.deadline_s = warm_deadline_s(wait_s)
        timeout_s = max(0.0, wait_s) + self._connection.timeouts.call_s
        warmed = yield from self._ask(wanted, read_warmed, timeout_s)
        return warmed or Warmed(is_answered=False)

    @operation
    def pin(self, tokens: Tokens, *, ttl_s: float = 3600.0, name: str = "") -> Steps[Pinned]:
        """Keep this prompt's held blocks for `ttl_s` (at most 30 days), or until `unpin`. A pin
        does not end with this client, but with the daemon: if `ping().epoch` differs from the
        pin's, pin again. All pins together hold at most `limits.max_pinned` of each tier. `name`
        shows in `stats`. Opens no session."""
        wanted = PinRequest(
            namespace=self._namespace, tokens=encode_tokens(tokens), ttl_s=float(ttl_s), name=name
        )
        return (yield from self._ask(wanted, read_pinned)) or Pinned()

    @operation
    def unpin(self, pin: Pinned | str) -> Steps[bool]:
        """Remove a pin, given as `pin` returned it, or by its `pin`. False if it did not exist."""
        wanted = UnpinRequest(pin=pin.pin if isinstance(pin, Pinned) else pin)
        return bool((yield from self._ask(wanted, _unpinned)))

    @operation
    def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Steps[Match]:
        """A match for a lease of another session of the same group, to fetch and release it here.
        `blocks` of it will be read; `group`, `epoch`: of the other session's greeting. A miss if
        this client is not in that group, or the daemon was restarted."""
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.call_s)
        with attempt:
            attempt.admit()
            greeting = yield from connection.greeted(attempt.deadline_s)
            if greeting.epoch != epoch or greeting.group != group:
                return Match.miss("the lease is of another group, or of another run of the daemon")
            decision = Decision("reload", blocks, "adopted")
            return Match(lease, blocks, (), decision, session=greeting.session)
        return Match.miss(connection.last_error)

    @stream
    def fetch_runs(self, match: Match) -> Stream[FetchedRun]:
        """The leased blocks as they become readable, in runs; ends early on a failure.

        Runs may come out of order. Other calls may be made in between.
        """
        return self._each_run(match, give)

    @operation
    def fetch(self, match: Match, out: Bytes2D) -> Steps[Fetched]:
        """Copy the blocks worth reloading into `out`: uint8 [n, block_bytes], C-contiguous. If
        cancelled, ends only when nothing writes to `out` any more."""
        connection = self._connection
        check_blocks(out, "out", connection.spec.block_bytes)
        started_s = connection.clock()
        wanted = min(match.decision.reload_blocks, len(out))
        tier_of: list[str] = [""] * wanted

        def copy(run: FetchedRun) -> Steps[None]:
            rows = out[run.first : min(run.first + run.num_blocks, wanted)]
            if not len(rows):
                return
            is_valid = yield from connection.copy(partial(_copy_and_verify, run, rows))
            if not is_valid:
                connection.last_error = "blocks were reused while they were copied"
            span = slice(run.first, run.first + len(rows))
            tier_of[span] = [run.tier if is_valid else ""] * len(rows)

        yield from self._each_run(match, copy)
        blocks = tier_of.index("") if "" in tier_of else wanted
        by_tier = dict(Counter(tier_of[:blocks]))
        return Fetched(blocks, connection.clock() - started_s, by_tier)

    @operation
    def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> Steps[None]:
        """End the lease and report the hit's cost: bytes and seconds of the inference engine's last
        copy, and seconds from match to usable KV (0: not measured). Does not wait for a reply."""
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.call_s, is_answered=False)
        with attempt:
            attempt.admit()
            if connection.session_of(match) is not None:
                released = ReleaseRequest(
                    lease=match.lease,
                    hop_bytes=float(hop_bytes),
                    hop_s=float(hop_s),
                    total_s=float(total_s),
                )
                yield from connection.post(released, attempt.deadline_s, match.session)

    @operation
    def put(
        self,
        tokens: Tokens,
        blocks: Bytes2D | Fill,
        *,
        first: int = 0,
        last: int | None = None,
        durable: bool = False,
    ) -> Steps[PutResult]:
        """Store blocks `first … last-1` of this prompt (`last` defaults to all whole blocks).

        `blocks`: uint8 [last - first, block_bytes], C-contiguous; or `fill(index, view)`, called
        only for blocks the cache lacks, which writes block `index` of the prompt into `view` (for
        an AsyncClient in a thread). What `fill` raises comes out of here, and nothing of that
        ticket is stored.
        """
        spec, packed = self._connection.spec, encode_tokens(tokens)
        whole = len(packed) // (TOKEN_BYTES * spec.block_tokens)
        last = whole if last is None else last
        if not 0 <= first <= last <= whole:
            raise ValueError(f"blocks {first} … {last} of a prompt of {whole} whole blocks")
        source = Source(blocks, first, spec.block_bytes)
        if not callable(blocks):
            check_blocks(blocks, "blocks", spec.block_bytes)
            if len(blocks) != last - first:
                raise ValueError(f"{len(blocks)} blocks given for {first} … {last}")
        return (yield from PutCall(self._connection).put(packed, first, last, source, durable))

    @operation
    def hint(
        self,
        tokens: Tokens | None = None,
        *,
        conversation: str = "",
        ended: Ended = "",
        finish_reason: str = "",
        return_s: float = 0.0,
        keep: bool = True,
        answer_tokens: int = 0,
    ) -> Steps[None]:
        """Report whether and when this prompt will be extended. A wrong hint costs hits, never
        correctness. Does not wait for a reply.

        Without `tokens`, it is about the newest prompt matched under this `conversation`. `ended`:
        this answer ended a turn, a turn that waits for a tool, or the conversation.
        `finish_reason`: the inference engine's reason for the end of the answer. `return_s`:
        seconds until the next turn is expected. `keep=False`: its blocks that were not matched
        since they were stored may be evicted now. `answer_tokens`: the length of the answer.
        """
        hint = HintRequest(
            tokens=b"" if tokens is None else encode_tokens(tokens),
            conversation=conversation,
            ended=ended,
            finish_reason=finish_reason,
            return_s=float(return_s),
            keep=bool(keep),
            answer_tokens=int(answer_tokens),
        )
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.call_s, is_answered=False)
        with attempt:
            attempt.admit()
            greeting = yield from connection.greeted(attempt.deadline_s)
            hint.tokens = hint.tokens[: greeting.max_prompt_tokens * TOKEN_BYTES]
            yield from connection.post(hint, attempt.deadline_s, greeting.session)

    @cached_property
    def _namespace(self) -> bytes:
        return self._connection.spec.digest()

    def _each_run(
        self, match: Match, use: Callable[[FetchedRun], Generator[Any, Any, None]]
    ) -> Generator[Any, Any, None]:
        """Ends early on a failure: the blocks that did not come are misses."""
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.fetch_s)
        with attempt:
            attempt.admit()
            greeting = connection.session_of(match)
            if greeting is None:
                return
            arenas = connection.arenas
            wanted = FetchRequest(lease=match.lease)
            inbox = yield from connection.open(wanted, attempt.deadline_s, greeting.session)
            try:
                is_last = False
                while not is_last:
                    reply, parts = yield from connection.next_reply(inbox, attempt.deadline_s)
                    for run in read_runs(reply, parts, arenas, greeting.block_bytes):
                        yield from use(run)
                    is_last = not reply.get("more")
            finally:
                connection.close_inbox(inbox)


class DaemonCalls(Calls):
    """Operations about the daemon, the session and the namespace."""

    @operation
    def call(self, declared: Operation[Q, R], /, **fields: Any) -> Steps[R | None]:
        """Send any declared operation, given its request's fields. Returns its reply, or None after
        a failure. Operations of other packages need only this call."""
        request = declared.request(**fields)
        return (yield from self._ask(request, partial(read_reply, kind=declared.reply)))

    @operation
    def observe(
        self,
        *,
        num_requests: int = 1,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: int = 0,
    ) -> Steps[None]:
        """Report one prefill step: Σn new tokens and Σ(n·c + n²/2) over its requests, each on a
        context of c tokens, took `seconds`. Sent without waiting: the inference engine's next step
        comes after it."""
        step = ObserveRequest(
            num_requests=num_requests,
            sum_n=float(sum_n),
            sum_nc=float(sum_nc),
            decode_tokens=decode_tokens,
            seconds=float(seconds),
        )
        connection = self._connection
        attempt = connection.attempt(connection.timeouts.call_s, is_answered=False)
        with attempt:
            attempt.admit()
            greeting = yield from connection.greeted(attempt.deadline_s)
            yield from connection.post(step, attempt.deadline_s, greeting.session)

    @operation
    def ping(self) -> Steps[Ping | None]:
        """The daemon's version, pid, epoch and tiers; None if it does not answer."""
        connection = self._connection
        started_s = connection.clock()
        reply = yield from self._ask(PingRequest(), _ping)
        if reply is None:
            return None
        if connection.greeting is not None and connection.greeting.epoch != reply.epoch:
            connection.lose(connection.greeting.session)
        round_trip_s = connection.clock() - started_s
        return Ping(
            reply.epoch,
            reply.version,
            reply.pid,
            reply.uptime_s,
            reply.ready,
            reply.tiers,
            round_trip_s,
        )

    @operation
    def stats(self) -> Steps[dict[str, Any] | None]:
        """The daemon's counters (docs/protocol.md); None if it does not answer."""
        return self._ask(StatsRequest(), _as_map)

    @operation
    def health(self) -> Steps[dict[str, Any] | None]:
        """The health of the daemon's parts (docs/protocol.md); None if it does not answer."""
        return self._ask(HealthRequest(), _as_map)

    @operation
    def heartbeat(self) -> Steps[bool]:
        """Keep the session alive. Needed only where the daemon cannot see this process and no other
        call is made within `greeting.heartbeat_s`."""
        return (yield from self._ask(HeartbeatRequest(), _as_map)) is not None

    @operation
    def clear(self) -> Steps[int]:
        """Remove this namespace's blocks that are not leased or pinned. Returns how many."""
        return (yield from self._ask(ClearRequest(), _cleared)) or 0

    @operation
    def close(self) -> Steps[None]:
        """End the session and its leases, and close the connection."""
        return self._connection.close()


def give(item: T) -> Stream[T]:
    yield Give(item)


def _as_map(reply: ReplyMap) -> ReplyMap:
    return reply


def _ping(reply: ReplyMap) -> PingReply:
    return read_reply(reply, PingReply)


def _cleared(reply: ReplyMap) -> int:
    return read_reply(reply, ClearReply).cleared


def _unpinned(reply: ReplyMap) -> bool:
    return read_reply(reply, UnpinReply).unpinned


def _portions(prompts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The prompts in order, in portions that fit one `score` request."""
    portion: list[bytes] = []
    room = MAX_SCORED_TOKENS * TOKEN_BYTES
    for tokens in prompts:
        if portion and (len(portion) == MAX_SCORED_PROMPTS or len(tokens) > room):
            yield portion
            portion, room = [], MAX_SCORED_TOKENS * TOKEN_BYTES
        portion.append(tokens)
        room -= len(tokens)
    if portion:
        yield portion


def _copy_and_verify(run: FetchedRun, rows: Bytes2D) -> bool:
    try:
        run.copy_to(rows)
    except ValueError:  # another task opened a new session, whose arena took this one's place
        return False
    return run.verify()
