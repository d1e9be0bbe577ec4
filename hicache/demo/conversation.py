"""The prompts of the demo's two agents: scripted messages, with the model's replies in between.

    ada  |-- system prompt with tools --|-- task --|reply|-- tool result --|reply| …
    ben  |-------- the same ------------|-- task --|reply|-- tool result --|reply| …

Every prompt begins with the agent's whole conversation, so at most MAX_NEW_SHARE of it is new,
except in ada's first. Works on token ids and appends to them: no text is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.demo.agent_tools import system_prompt

MAX_NEW_SHARE = 0.10
MIN_SYSTEM_TOKENS = 1500
TURNS_BEFORE_RESTART = 5

Encode = Callable[[str], list[int]]

# One message per turn; the last one is sent after the daemon was restarted.
SCRIPTS = {
    "ada": (
        "tests/test_dates.py::test_leap_day fails since yesterday: parse('29 Feb 2024') raises "
        "ValueError. Find the cause and fix it.",
        "read_file src/dates.py: 41 def parse(text): 42 day, month, year = text.split() 43 return "
        "date(1900, MONTHS[month], int(day)).replace(year=int(year))",
        "edit_file: replaced 1 passage in src/dates.py. Line 43 is now: return date(int(year), "
        "MONTHS[month], int(day))",
        "run_tests tests/test_dates.py: 14 passed, 0 failed in 0.31 s. Not covered: a year of two "
        "digits, such as '29 Feb 24'.",
        "The user says: years of two digits are from 2000 on. Add that, with a test.",
        "run_tests: 16 passed, 0 failed in 0.35 s. Commit now. What is the subject of the commit?",
    ),
    "ben": (
        "Add an option --max-rows to the export command, 1000 by default, and refuse zero and "
        "negative numbers with a clear message.",
        "grep 'add_argument' src/export.py: 18: add_argument('--format', default='csv') 19: "
        "add_argument('--output', required=True)",
        "edit_file: replaced 1 passage in src/export.py. Line 20 is now: "
        "add_argument('--max-rows', type=positive, default=1000)",
        "run_tests tests/test_export.py: 8 passed, 1 failed: test_help, whose expected text lacks "
        "the new option.",
        "edit_file: replaced 1 passage in tests/expected_help.txt. run_tests: 9 passed, 0 failed.",
        "The user asks: what happens with --max-rows 0 now, and which test shows it?",
    ),
}


@dataclass(slots=True)
class Prompt:
    """One turn's prompt. `known`: how many tokens at its front were sent or generated before."""

    agent: str
    turn: int
    tokens: list[int]
    known: int

    @property
    def new_share(self) -> float:
        return 1 - self.known / len(self.tokens)


class Conversation:
    """One agent's side. `shared` is the system prompt's tokens, the same for every agent;
    `has_been_sent` says whether another agent has sent it already."""

    def __init__(
        self,
        agent: str,
        shared: Sequence[int],
        encode: Encode,
        stop: frozenset[int],
        *,
        has_been_sent: bool,
    ) -> None:
        self.agent = agent
        self._tokens = list(shared)
        self._known = len(shared) if has_been_sent else 0
        self._encode = encode
        self._stop = stop
        self._turn = 0

    def next_prompt(self) -> Prompt:
        """The conversation so far and the next scripted message. Raises ValueError if more than
        MAX_NEW_SHARE of it is new, because then the demo would prove less than it claims."""
        message = SCRIPTS[self.agent][self._turn]
        self._turn += 1
        end = "<|im_end|>\n" if self._turn > 1 else ""  # of the reply before
        self._tokens += self._encode(
            f"{end}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompt = Prompt(self.agent, self._turn, list(self._tokens), self._known)
        if self._known and prompt.new_share > MAX_NEW_SHARE:
            raise ValueError(
                f"{self.agent}, turn {self._turn}: {prompt.new_share:.0%} of the prompt is new"
            )
        self._known = len(self._tokens)
        return prompt

    def add_reply(self, reply: Sequence[int]) -> None:
        """The model's reply becomes part of the conversation."""
        self._tokens += [token for token in reply if token not in self._stop]


def shared_tokens(encode: Encode) -> list[int]:
    """The system prompt. Raises ValueError if this tokenizer makes too few tokens of it."""
    tokens = encode(f"<|im_start|>system\n{system_prompt()}<|im_end|>\n")
    if len(tokens) < MIN_SYSTEM_TOKENS:
        raise ValueError(f"the system prompt has {len(tokens)} tokens, not {MIN_SYSTEM_TOKENS}")
    return tokens
