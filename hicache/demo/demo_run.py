"""The course of the demo: two agents, turn by turn, with hicache and without; squeezes; a restart.

turn 1, 2   hits in hbm          (ada's first turn is cold)
squeeze hbm
turn 3      hits in dram
squeeze hbm and dram
turn 4, 5   hits on disk, and in the tiers they were promoted to
squeeze hbm and dram, stop, start
turn 6      hits on disk, after the restart
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hicache.client import Client
from hicache.connectors.transformers import CachedModel, Generation
from hicache.demo.conversation import (
    SCRIPTS,
    TURNS_BEFORE_RESTART,
    Conversation,
    Prompt,
    shared_tokens,
)
from hicache.demo.demo_daemon import PrivateDaemon
from hicache.demo.demo_model import DemoModel
from hicache.demo.squeeze import Squeezer
from hicache.protocol.keys import NamespaceSpec

NEW_TOKENS = 16
FETCH_TIMEOUT_S = 30.0
TIERS = ("hbm", "dram", "disk")
SQUEEZES: dict[int, tuple[str, ...]] = {2: ("hbm",), 3: ("hbm", "dram"), 5: ("hbm", "dram")}
"""After this turn, these tiers are filled with other prompts."""
WARM_SUFFIX = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn with hicache beside the same prompt without. `hit_tokens` has every tier."""

    agent: str
    turn: int
    prompt_tokens: int
    new_share: float
    hit_tokens: dict[str, int]
    decision: str
    reason: str
    ttft_s: float
    ttft_without_s: float
    outputs_equal: bool
    reply: str

    @property
    def reloaded(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def speedup(self) -> float:
        return self.ttft_without_s / self.ttft_s


@dataclass(slots=True)
class Result:
    """The results of the demo. `stats`: the daemon's counters before its stop and at the end.

    `held_tokens`: tokens in whole blocks of both conversations when the daemon was stopped;
    `after_restart_hit_tokens`: how many of them the next turn of each agent reloaded.
    """

    turns: list[Turn] = field(default_factory=list)
    held_tokens: int = 0
    after_restart_hit_tokens: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outputs_equal(self) -> bool:
        return all(turn.outputs_equal for turn in self.turns)

    @property
    def demoted_blocks(self) -> int:
        return sum(row["demotions"] for stats in self.stats for row in stats["tiers"])

    def unused_tiers(self) -> list[str]:
        """Tiers without a hit: the demo then shows less than it should."""
        return [t for t in TIERS if not any(turn.hit_tokens[t] for turn in self.turns)]


class DemoObserver(Protocol):
    """Receives the progress of the demo (`DemoReport`)."""

    def phase(self, what: str) -> None:
        """A step starts that takes some time."""

    def note(self, what: str) -> None: ...
    def turn(self, turn: Turn) -> None: ...


def run_demo(load: Callable[[], DemoModel], config_file: Path, observer: DemoObserver) -> Result:
    """Raises ModelMissing, DaemonFailed, ConfigError; leaves no process and no file behind."""
    with ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(config_file))
        observer.phase("loading the model")
        demo_model = load()
        observer.note(f"model: {demo_model.name}")
        observer.phase("starting the daemon")
        observer.note(f"daemon: ready after {daemon.start():.1f} s, from {config_file}")
        demo = _Demo(demo_model, daemon, observer)
        stack.callback(demo.close)
        return demo.play()


class _Demo:
    def __init__(
        self, demo_model: DemoModel, daemon: PrivateDaemon, observer: DemoObserver
    ) -> None:
        self._daemon = daemon
        self._observer = observer
        self._model = demo_model
        block_tokens = daemon.config.block_tokens
        connect = partial(_connect, daemon.endpoint)
        self._served = CachedModel(demo_model.model, connect, block_tokens=block_tokens)
        self._bare = CachedModel(demo_model.model, None, block_tokens=block_tokens)
        self._squeezer = Squeezer(self._served.spec, daemon.endpoint, daemon.stats)
        self._result = Result()
        self._held: dict[str, int] = {}

    def play(self) -> Result:
        shared = shared_tokens(self._model.encode)
        self._warm_up(shared)
        agents = [
            Conversation(
                agent,
                shared,
                self._model.encode,
                self._model.stop,
                has_been_sent=bool(number),
            )
            for number, agent in enumerate(SCRIPTS)
        ]
        for turn in range(1, TURNS_BEFORE_RESTART + 1):
            for agent in agents:
                self._take_turn(agent)
            if turn in SQUEEZES:
                self._squeeze(*SQUEEZES[turn])
        self._restart()
        before = len(self._result.turns)
        for agent in agents:
            self._take_turn(agent)
        self._result.after_restart_hit_tokens = sum(
            turn.reloaded for turn in self._result.turns[before:]
        )
        self._result.stats.append(self._daemon.stats())
        return self._result

    def close(self) -> None:
        self._served.close()
        self._squeezer.close()

    def _warm_up(self, shared: list[int]) -> None:
        """The first calls of a shape are slow: a whole prompt, a suffix and single tokens."""
        self._observer.phase("warming the model up")
        self._served.warm_up(shared, WARM_SUFFIX)
        self._bare.generate(shared, 2)

    def _take_turn(self, agent: Conversation) -> None:
        prompt = agent.next_prompt()
        self._squeezer.settle()  # blocks of the last turn may still be moving down
        self._observer.phase(f"{prompt.agent}, turn {prompt.turn}: with hicache")
        served = self._served.generate(prompt.tokens, NEW_TOKENS, stop=self._model.stop)
        self._observer.phase(f"{prompt.agent}, turn {prompt.turn}: the same without hicache")
        bare = self._bare.generate(prompt.tokens, NEW_TOKENS, stop=self._model.stop)
        agent.add_reply(bare.tokens)
        # The KV of the last generated token was not computed.
        blocks = (len(prompt.tokens) + len(served.tokens) - 1) // self._served.spec.block_tokens
        self._held[agent.agent] = blocks * self._served.spec.block_tokens
        turn = _compared(prompt, served, bare, self._model.decode(bare.tokens))
        self._result.turns.append(turn)
        self._observer.turn(turn)

    def _squeeze(self, *tiers: str) -> None:
        names = " and ".join(tiers)
        self._observer.phase(f"squeezing: filling {names} with other prompts")
        stored = self._squeezer.squeeze(*tiers)
        self._observer.note(f"squeeze: {stored / 2**20:,.0f} MiB of other prompts into {names}")

    def _restart(self) -> None:
        self._result.stats.append(self._daemon.stats())
        self._result.held_tokens = sum(self._held.values())
        self._observer.phase("stopping the daemon")
        stopped_s = self._daemon.stop()
        self._observer.phase("starting it again")
        started_s = self._daemon.start()
        self._observer.note(
            f"restart: stopped in {stopped_s:.1f} s, ready again after {started_s:.1f} s"
        )


def _connect(endpoint: str, spec: NamespaceSpec) -> Client:
    return Client(spec, endpoint, name="demo", fetch_timeout_s=FETCH_TIMEOUT_S)


def _compared(prompt: Prompt, served: Generation, bare: Generation, reply: str) -> Turn:
    assert served.decision is not None
    return Turn(
        agent=prompt.agent,
        turn=prompt.turn,
        prompt_tokens=len(prompt.tokens),
        new_share=prompt.new_share,
        hit_tokens={tier: served.hit_tokens.get(tier, 0) for tier in TIERS},
        decision=served.decision.name,
        reason=served.decision.sentence,
        ttft_s=served.ttft_s,
        ttft_without_s=bare.ttft_s,
        outputs_equal=served.tokens == bare.tokens,
        reply=reply,
    )
