"""A blocking client of the daemon, for use inside an inference engine's process.

    with Client(spec) as client:
        match = client.match(tokens)
        fetched = client.fetch(match, buffer)       # whole blocks at the front of `buffer`
        client.release(match)
        ...                                         # prefill the rest
        client.put(tokens, blocks, first=fetched.blocks)

Every call has a deadline, and a daemon that is absent, dies, refuses or talks nonsense is a miss:
an inference engine is never worse off than without it. Connections are made on the first call.
Not thread-safe: one client per thread. After a fork the child's client opens a session of its own.
Loads no lmdb, cupy or daemon; `hicache.client.aio` has the same names for asyncio.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from hicache.client.calls import Dialogue, Ended
from hicache.client.gpu_pages import (
    LoadedPages,
    LoadedPart,
    Paged,
    PageShare,
    PageTable,
    SharedPages,
)
from hicache.client.put import Fill
from hicache.client.results import (
    Bytes2D,
    Decision,
    Fetched,
    FetchedRun,
    Greeting,
    Match,
    Ping,
    Pinned,
    PutResult,
    Score,
    Warmed,
)
from hicache.client.session import Connection, DaemonError, Timeouts, Transport
from hicache.client.transport import Channel, DaemonAbsent, run_now
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import default_endpoint
from hicache.protocol.keys import LayerGroup, NamespaceSpec, Tokens
from hicache.protocol.messages import pack

__all__ = [
    "AdminLine",
    "Client",
    "CurveKeys",
    "DaemonAbsent",
    "DaemonError",
    "Decision",
    "Ended",
    "Fetched",
    "FetchedRun",
    "LayerGroup",
    "LoadedPages",
    "LoadedPart",
    "Match",
    "NamespaceSpec",
    "PageShare",
    "Ping",
    "Pinned",
    "PutResult",
    "Score",
    "SharedPages",
    "Warmed",
    "admin_call",
]


class Client:
    """Calls with a deadline; see the module's docstring.

    `endpoint` defaults to HICACHE_ENDPOINT, or the user's own daemon. `timeout_s` bounds an
    ordinary call, `fetch_timeout_s` a whole fetch, `put_timeout_s` a whole put: a copy that is
    under way then (of at most 1 GiB) is not interrupted, and the daemon is told of it within 0.4 s.
    `transport`: `arena` maps the daemon's memory, `frames` sends blocks through the socket, `auto`
    prefers the first on `ipc://`. `name` shows in logs. `curve`: the keys for a daemon on `tcp://`
    that asks for them; without the right ones every call is a miss. `group`: another client's
    `greeting.group`, to share its leases.
    """

    def __init__(
        self,
        spec: NamespaceSpec,
        endpoint: str | None = None,
        *,
        timeout_s: float = 1.0,
        fetch_timeout_s: float = 5.0,
        put_timeout_s: float = 5.0,
        transport: Transport = "auto",
        name: str = "",
        curve: CurveKeys | None = None,
        group: bytes = b"",
    ) -> None:
        self.endpoint = endpoint or default_endpoint(os.environ, os.getuid())
        port = Channel(self.endpoint, spec.block_bytes, curve)
        timeouts = Timeouts(timeout_s, fetch_timeout_s, put_timeout_s)
        self._connection = Connection(spec, self.endpoint, port, timeouts, transport, name, group)
        self._dialogue = Dialogue(self._connection)
        self._paged = Paged(self._connection)

    @property
    def connected(self) -> bool:
        """Whether a session is open, as far as is known without asking (`ping` asks)."""
        return self._connection.connected

    @property
    def last_error(self) -> str:
        """The last trouble as a sentence; empty if there was none."""
        return self._connection.last_error

    @property
    def greeting(self) -> Greeting | None:
        """What the daemon agreed to when the session was opened; None without a session."""
        return self._connection.greeting

    def match(
        self,
        tokens: Tokens,
        *,
        request: str = "",
        skip_blocks: int = 0,
        hop_bytes_per_s: float = 0.0,
        explain: bool = False,
        conversation: str = "",
    ) -> Match:
        """What the cache has of this prompt, and how much of it to reload.

        `request`: the same id and prompt again get the same lease. `skip_blocks` blocks at the
        front are held by the inference engine itself. `hop_bytes_per_s`: the speed of its own copy
        from the fetched bytes to where it needs them, 0 if that costs nothing or is not known.
        `explain`: have the daemon word the decision's `sentence`. `conversation`: its name, so that
        a `hint` needs no tokens.
        """
        return run_now(
            self._dialogue.match(
                tokens, request, skip_blocks, hop_bytes_per_s, explain, conversation
            )
        )

    def score(self, prompts: Sequence[Tokens]) -> list[Score]:
        """What a match of each of these would find now, for who has to choose where a request goes:
        nothing is leased, and nothing changes. Opens no session.

        Any number of prompts, over 128 of them or 2,097,152 tokens by several requests within the
        one `timeout_s`; of a longer prompt so many tokens count. Those that nobody answered for in
        time are not `is_answered`."""
        return run_now(self._dialogue.score(prompts))

    def warm(self, tokens: Tokens, *, wait_s: float = 0.0) -> Warmed:
        """Have what is held of this prompt copied to where clients read, since it will be asked
        for: behind all demand, and into free room only. Opens no session.

        Returns as soon as it is planned, or, with `wait_s`, when no more will come or so long has
        passed. The copying ends after the daemon's `limits.lease_ttl` at the latest; what has come
        by then stays as any other block does."""
        return run_now(self._dialogue.warm(tokens, wait_s))

    def pin(self, tokens: Tokens, *, ttl_s: float = 3600.0, name: str = "") -> Pinned:
        """Have what is held of this prompt kept for `ttl_s` (at most 30 days), whoever comes and
        goes, until `unpin`. It does not end with this client, and ends with the daemon: where
        `ping().epoch` is another than the pin's, pin again. All pins share `limits.max_pinned` of
        each tier. `name` shows in `stats`. Opens no session."""
        return run_now(self._dialogue.pin(tokens, ttl_s, name))

    def unpin(self, pin: Pinned | str) -> bool:
        """Let a pin go, given as it was got, or by its `pin`. False where there was none."""
        return run_now(self._dialogue.unpin(pin))

    def adopt(self, lease: int, blocks: int, group: bytes, epoch: str) -> Match:
        """A match that another session of the same group made: its lease can be fetched and
        released here. `blocks` of it will be read; `group`, `epoch`: as its maker's greeting says.
        A miss if this client is not of that group, or the daemon is another by now."""
        return run_now(self._dialogue.adopt(lease, blocks, group, epoch))

    def fetch_runs(self, match: Match) -> Generator[FetchedRun, None, None]:
        """The leased blocks as they become readable, in runs; ends early on any trouble.

        Runs may come out of order. Other calls may be made in between.
        """
        runs = self._dialogue.fetch_runs(match)
        try:
            while True:
                try:
                    run = run_now(runs.__anext__())
                except StopAsyncIteration:
                    return
                yield run
        finally:
            run_now(runs.aclose())

    def fetch(self, match: Match, out: Bytes2D) -> Fetched:
        """Copy the blocks worth reloading into `out`: uint8 [n, block_bytes], C-contiguous."""
        return run_now(self._dialogue.fetch(match, out))

    def release(
        self, match: Match, *, hop_bytes: float = 0.0, hop_s: float = 0.0, total_s: float = 0.0
    ) -> None:
        """Give the lease back and tell what the hit cost: bytes and seconds of the inference
        engine's own last copy, and seconds from match to usable KV (0: not measured)."""
        run_now(self._dialogue.release(match, hop_bytes, hop_s, total_s))

    def put(
        self,
        tokens: Tokens,
        blocks: Bytes2D | Fill,
        *,
        first: int = 0,
        last: int | None = None,
        durable: bool = False,
    ) -> PutResult:
        """Store blocks `first … last-1` of this prompt (`last` defaults to all whole blocks).

        `blocks`: uint8 [last - first, block_bytes], C-contiguous; or `fill(index, view)`, called
        only for blocks the cache lacks, which writes block `index` of the prompt into `view`. What
        `fill` raises comes out of here, and nothing of that ticket is stored.
        """
        return run_now(self._dialogue.put(tokens, blocks, first, last, durable))

    def share_pages(self, pages: SharedPages) -> PageShare | None:
        """Let the daemon's GPU worker copy from and to the inference engine's own KV tensors
        (client/gpu_pages.py). None where that cannot be, and `last_error` says why in one sentence:
        then `fetch` and `put`, and copy through the mapped arena."""
        return run_now(self._paged.share(pages))

    def load_pages(self, match: Match, share: PageShare, pages: PageTable) -> LoadedPages:
        """The blocks worth reloading into `pages`: int32 [blocks, pages per block]. Other pages of
        the table hold nothing of value; not `is_at_rest`: they may not be used yet."""
        return run_now(self._paged.load(match, share, pages))

    def load_pages_by_part(
        self, match: Match, share: PageShare, pages: PageTable, *, planes_per_part: int
    ) -> Generator[LoadedPart, None, None]:
        """The same, told after every `planes_per_part` planes: attention of a layer may start while
        the next ones load. Planes are the layers in order, or K and V of each."""
        parts = self._paged.parts(match, share, pages, planes_per_part)
        try:
            while True:
                try:
                    part = run_now(parts.__anext__())
                except StopAsyncIteration:
                    return
                yield part
        finally:
            run_now(parts.aclose())

    def save_pages(
        self,
        tokens: Tokens,
        share: PageShare,
        pages: PageTable,
        *,
        first: int = 0,
        durable: bool = False,
    ) -> PutResult:
        """Store blocks `first …` of this prompt from `pages`: int32 [blocks, pages per block]."""
        return run_now(self._paged.save(tokens, share, pages, first, durable))

    def unshare_pages(self, share: PageShare) -> bool:
        """Have the worker let go of the pages. True when nothing is on its way any more."""
        return run_now(self._paged.unshare(share))

    def observe(
        self,
        *,
        num_requests: int = 1,
        sum_n: float,
        sum_nc: float,
        seconds: float,
        decode_tokens: int = 0,
    ) -> None:
        """Report one prefill step: Σn new tokens and Σ(n·c + n²/2) over its requests, each on a
        context of c tokens, took `seconds`. Sent without waiting."""
        run_now(self._dialogue.observe(num_requests, sum_n, sum_nc, decode_tokens, seconds))

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
    ) -> None:
        """Say what is known about when, and whether, this prompt will go on. Advice only: a wrong
        hint costs hits, never correctness. Sent without waiting.

        Without `tokens` it is about the newest prompt that was matched under this `conversation`.
        `ended`: with this answer ended a turn, a turn that waits for a tool call, or the whole
        conversation. `finish_reason`: why the answer ended, in the inference engine's own word.
        `return_s`: the next turn is expected in so many seconds. `keep=False`: what was stored of
        it, and nobody has asked for since, need not be kept. `answer_tokens`: how long the answer
        was.
        """
        hint = self._dialogue.hint(
            tokens, conversation, ended, finish_reason, return_s, keep, answer_tokens
        )
        run_now(hint)

    def ping(self) -> Ping | None:
        """None if no daemon answers."""
        return run_now(self._dialogue.ping())

    def stats(self) -> dict[str, Any] | None:
        """The daemon's counters (docs/protocol.md); None if none answers."""
        return run_now(self._dialogue.stats())

    def health(self) -> dict[str, Any] | None:
        return run_now(self._dialogue.health())

    def heartbeat(self) -> bool:
        """A sign of life, needed only where the daemon cannot see this process and nothing else is
        asked for longer than `greeting.heartbeat_s`."""
        return run_now(self._dialogue.heartbeat())

    def clear(self) -> int:
        """Forget this namespace's blocks that nobody holds; how many."""
        return run_now(self._dialogue.clear())

    def close(self) -> None:
        """Say bye, give everything back. Leases of this session end."""
        run_now(self._connection.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AdminLine:
    """Requests without a session, one after another over one connection. Not thread-safe."""

    def __init__(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        self._channel = Channel(endpoint, curve=curve)
        self._last_id = 0

    def call(
        self, op: str, body: Mapping[str, Any] | None = None, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """The reply's fields. Raises DaemonAbsent or DaemonError, whose texts are sentences for
        people."""
        now_s = time.monotonic()
        channel, deadline_s = self._channel, now_s + timeout_s
        self._last_id = number = self._last_id + 1
        head = {"op": op, "id": number, "deadline_s": timeout_s, "sent_s": now_s, **(body or {})}
        run_now(channel.send([pack(head)], deadline_s))
        channel.mailbox.expect(number)
        try:
            reply, _ = run_now(channel.receive(number, deadline_s))
        finally:
            channel.mailbox.done(number)
        if not reply["ok"]:
            raise DaemonError(reply["error"], str(reply.get("message", "")))
        return {name: value for name, value in reply.items() if name not in ("id", "ok")}

    def __enter__(self) -> AdminLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def admin_call(
    endpoint: str,
    op: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 5.0,
    curve: CurveKeys | None = None,
) -> dict[str, Any]:
    """One request without a session, such as stats or reload; its reply's fields.

    Raises DaemonAbsent or DaemonError, whose texts are sentences for people.
    """
    with AdminLine(endpoint, curve) as line:
        return line.call(op, body, timeout_s)
