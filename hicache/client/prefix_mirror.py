"""A router's copy of the prefixes that a daemon holds, kept up to date by its KV events.

    held = HeldPrefixes(endpoint, spec.digest(), spec.block_tokens)
    ...
    held.poll()                              # apply the events since the last call
    held.match(token_ids)                    # [("dram", 12), ("disk", 40)]: its first 52 blocks

    absent ──subscribe──▶ reading ──last page──▶ current ──gap, garbage──▶ reading
      ▲                                             │
      └──── no answer, another run of the daemon ───┘

It subscribes first, then reads the held blocks page by page from the clients' socket, then applies
every message from the number on that the first page named. In `reading` after a gap it answers from
its old state; in `absent` it holds nothing. If no message came for QUIET_S, it checks the sequence
number with a request: so it notices a dead daemon, a restarted one, and a lost last message. Its
state is a little old: a match decides.

Every wait has a limit, and no message raises an exception. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Literal

import zmq

from hicache.client.blocking import AdminLine
from hicache.client.session import TROUBLE
from hicache.protocol.curve import CurveKeys
from hicache.protocol.endpoint import tcp_address
from hicache.protocol.keys import ROOT_KEY, block_key
from hicache.protocol.kv_events import HEADER_ONLY, EventsPage, KvEvent, read_message, read_page
from hicache.protocol.messages import TOKEN_BYTES, Tokens, WireError, encode_tokens

QUIET_S: Final = 2.0
SOON_S: Final = 0.2
"""The first check after reading: ZeroMQ may have received the subscription late."""
GRACE_S: Final = 0.5
"""How long a message may take that a page reports as published."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
STEADY_S: Final = 10.0
"""After this time without a failure, pauses are short again."""
MAX_TAKEN: Final = 256
"""The most messages handled in one `poll`."""
MAX_QUEUED: Final = 1000
"""Messages of at most 64 KiB that wait while pages are read; further ones are lost, as a gap."""
RECONNECT_MS: Final = 2000
"""The longest interval between attempts to reach a daemon that is absent or refuses."""
MAX_MESSAGE_BYTES: Final = 1 << 20

State = Literal["absent", "reading", "current"]


class HeldPrefixes:
    """One namespace of one daemon. `endpoint`: its clients' socket, which reports the publisher's
    endpoint; `events_endpoint`: the publisher's endpoint as seen from here, if different.
    `request_s`: the timeout of a request.

    `epoch`: the run of the daemon; `error`: the last failure, for people; `num_gaps`,
    `num_malformed`: how often everything was read again, by reason."""

    def __init__(
        self,
        endpoint: str,
        namespace: bytes,
        block_tokens: int,
        *,
        events_endpoint: str = "",
        curve: CurveKeys | None = None,
        request_s: float = 1.0,
    ) -> None:
        self.state: State = "absent"
        self.epoch = ""
        self.error = ""
        self.num_gaps = 0
        self.num_malformed = 0
        self._endpoint = endpoint
        self._events_endpoint = events_endpoint
        self._namespace = namespace
        self._step = block_tokens * TOKEN_BYTES
        self._curve = curve
        self._request_s = request_s
        self._line = AdminLine(endpoint, curve)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._held: dict[bytes, int] = {}
        self._read: dict[bytes, int] = {}
        self._tiers: list[str] = []
        self._after = 0
        self._expected = 0
        self._num_failures = 0
        self._retry_s = 0.0
        self._since_s = 0.0
        self._heard_s = 0.0

    def __len__(self) -> int:
        """The number of held blocks, in any tier."""
        return len(self._held)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply waiting messages, after waiting up to `timeout_s` for the first one; a request, if
        one is due, may take `request_s` more. Returns the number of messages and pages."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            num_taken = self._listen(give_up_s) if self.state == "current" else self._read_on()
            now_s = time.monotonic()
            if num_taken or now_s >= give_up_s:
                return num_taken
            if self.state != "current" and self._retry_s > now_s:
                time.sleep(min(self._retry_s, give_up_s) - now_s)

    def match(self, tokens: Tokens) -> list[tuple[str, int]]:
        """The longest held prefix of a prompt as (tier, blocks), front to back, by each block's
        fastest tier."""
        runs: list[tuple[str, int]] = []
        for key in self._keys_of(encode_tokens(tokens)):
            bits = self._held.get(key, 0)
            if not bits:
                break
            tier = self._tiers[(bits & -bits).bit_length() - 1]
            count = runs.pop()[1] if runs and runs[-1][0] == tier else 0
            runs.append((tier, count + 1))
        return runs

    def close(self) -> None:
        self._line.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> HeldPrefixes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys_of(self, packed: bytes) -> Iterator[bytes]:
        parent = ROOT_KEY
        for start in range(0, len(packed) - self._step + 1, self._step):
            parent = block_key(self._namespace, parent, packed[start : start + self._step])
            yield parent

    # --- reading pages --------------------------------------------------------------------------

    def _read_on(self) -> int:
        """Read one page, unless in a pause."""
        if time.monotonic() < self._retry_s:
            return 0
        page = self._ask(self._after)
        if page is None:
            return 0
        if page.endpoint is None:
            self._fail("nothing is published there: events.endpoint is not configured", "absent")
            return 0
        is_same = page.epoch == self.epoch and page.tier_names == self._tiers
        if not is_same or self._socket is None:
            self._begin(page)  # the pages are read only after the subscription
            return 0
        if self._after == 0:
            self._expected = page.sequence
            self._read = {}
        self._read.update(page.blocks())
        self._after = page.next or 0
        if page.next is None:
            self._held, self._read = self._read, {}
            self.state = "current"
            self._since_s = time.monotonic()
            self._heard_s = self._since_s - QUIET_S + SOON_S
        return 1

    def _begin(self, page: EventsPage) -> None:
        """Another run of the daemon: drop the state, and subscribe."""
        self._held, self._read, self._after = {}, {}, 0
        self.epoch = page.epoch
        self._tiers = page.tier_names
        if self._socket is not None:
            self._socket.close(0)
        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
        if self._curve is not None:
            self._curve.apply(socket)
        where = self._events_endpoint or seen_from(self._endpoint, page.endpoint or "")
        try:
            socket.connect(where)
        except zmq.ZMQError as error:
            socket.close(0)
            self._socket = None
            self._fail(f"cannot subscribe at {where}: {error.strerror}", "absent")
            return
        socket.subscribe(page.topic)
        self._socket = socket
        self.state = "reading"

    def _ask(self, after: int) -> EventsPage | None:
        """Request a page. Returns None after a failure, which is recorded."""
        body = {"namespace": self._namespace, "after": after}
        try:
            reply = self._line.call("events", body, self._request_s)
            return read_page(reply, after if after < HEADER_ONLY else 0)
        except TROUBLE as trouble:
            self._fail(str(trouble), "absent")
            return None

    def _fail(self, why: str, state: State) -> None:
        """Read everything again, after a growing pause."""
        now_s = time.monotonic()
        if self.state == "current" and now_s - self._since_s > STEADY_S:
            self._num_failures = 0
        self._retry_s = now_s + min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 9))
        self._num_failures += 1
        self.error = why
        self.state = state
        self._read, self._after = {}, 0
        if state == "absent":
            self._held = {}
            self.epoch = ""

    # --- listening ------------------------------------------------------------------------------

    def _listen(self, give_up_s: float) -> int:
        """Handle messages that come before `give_up_s`; then check the sequence if it is due."""
        now_s = time.monotonic()
        quiet_s = self._heard_s + QUIET_S
        wait_s = max(0.0, min(give_up_s, quiet_s) - now_s)
        num_taken = 0
        while self.state == "current" and num_taken < MAX_TAKEN and self._take(wait_s):
            num_taken += 1
            wait_s = 0.0
        if not num_taken and time.monotonic() >= quiet_s:
            self._check_sequence()
        return num_taken

    def _check_sequence(self) -> None:
        page = self._ask(HEADER_ONLY)
        if page is None:
            return
        if page.epoch != self.epoch:
            self._fail("the daemon was restarted", "absent")
            return
        for _ in range(MAX_TAKEN):  # messages in flight
            if self._expected >= page.sequence or not self._take(GRACE_S):
                break
            if self.state != "current":
                return
        if self._expected != page.sequence:
            self._miss(page.sequence)
        self._heard_s = time.monotonic()

    def _take(self, wait_s: float) -> bool:
        """Handle one message, if one comes in time."""
        assert self._socket is not None
        if not self._socket.poll(round(wait_s * 1000)):
            return False
        parts = self._socket.recv_multipart()
        try:
            message = read_message(parts)
            if any(event.epoch != self.epoch for event in message.events):
                self._fail("the daemon was restarted", "absent")
            elif message.number > self._expected:
                self._miss(message.number)
            elif message.number == self._expected:
                for event in message.events:
                    self._apply(event)
                self._expected += 1
                self._heard_s = time.monotonic()
        except WireError as error:
            self.num_malformed += 1
            self._fail(str(error), "reading")
        return True

    def _miss(self, number: int) -> None:
        self.num_gaps += 1
        self._fail(f"messages were lost: {self._expected} … {number - 1}", "reading")

    def _apply(self, event: KvEvent) -> None:
        """Apply an event; unknown kinds are ignored."""
        held = self._held
        if event.type == "AllBlocksCleared":
            held.clear()
        elif event.type == "BlockStored":
            bit = self._bit(event)
            for key in event.block_hashes:
                held[key] = held.get(key, 0) | bit
        elif event.type == "BlockRemoved":
            bit = self._bit(event)
            for key in event.block_hashes:
                left = held.get(key, 0) & ~bit
                if left:
                    held[key] = left
                else:
                    held.pop(key, None)

    def _bit(self, event: KvEvent) -> int:
        if event.tier not in self._tiers:
            raise WireError("malformed", f"a block in a tier {event.tier[:40]!r}")
        return 1 << self._tiers.index(event.tier)


def seen_from(front_door: str, events: str) -> str:
    """The endpoint to subscribe at: a wildcard address is replaced by that of the clients'
    socket."""
    there, published = tcp_address(front_door), tcp_address(events)
    if there is None or published is None or published[0] not in ("*", "0.0.0.0", "::"):
        return events
    host = f"[{there[0]}]" if ":" in there[0] else there[0]
    return f"tcp://{host}:{published[1]}"
