"""The demo's prompts prove what the demo says: long shared beginnings, little that is new."""

import json
from collections.abc import Callable

import pytest

from hicache.demo.agent_tools import TOOLS, system_prompt
from hicache.demo.conversation import (
    MAX_NEW_SHARE,
    MIN_SYSTEM_TOKENS,
    SCRIPTS,
    TURNS_BEFORE_RESTART,
    Conversation,
    Prompt,
    shared_tokens,
)
from hicache.demo.demo_model import encode_bytes

STOP = frozenset({2})
REPLY = [5] * 15 + [2]


def talk(agent: str, *, has_been_sent: bool, reply: list[int] = REPLY) -> list[Prompt]:
    shared = shared_tokens(encode_bytes)
    conversation = Conversation(agent, shared, encode_bytes, STOP, has_been_sent=has_been_sent)
    prompts = []
    for _ in SCRIPTS[agent]:
        prompts.append(conversation.next_prompt())
        conversation.add_reply(reply)
    return prompts


def test_the_system_prompt_is_long_enough_and_its_tools_are_json() -> None:
    assert len(shared_tokens(encode_bytes)) >= MIN_SYSTEM_TOKENS
    tools = system_prompt().split("Tools:\n")[1].splitlines()
    assert [json.loads(line)["name"] for line in tools] == [tool["name"] for tool in TOOLS]
    for tool in TOOLS:
        parameters = tool["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])


def test_a_tokenizer_that_makes_too_little_of_it_is_refused() -> None:
    with pytest.raises(ValueError, match="the system prompt has"):
        shared_tokens(lambda text: [0] * (len(text) // 100))


def test_two_agents_share_the_system_prompt_and_have_a_turn_after_the_restart() -> None:
    ada, ben = talk("ada", has_been_sent=False), talk("ben", has_been_sent=True)
    shared = len(shared_tokens(encode_bytes))
    assert ada[0].tokens[:shared] == ben[0].tokens[:shared]
    assert ada[0].tokens[: shared + 40] != ben[0].tokens[: shared + 40]
    assert len(ada) == len(ben) == TURNS_BEFORE_RESTART + 1


@pytest.mark.parametrize("agent", SCRIPTS)
def test_prompts_grow_and_little_of_each_is_new(agent: str) -> None:
    prompts = talk(agent, has_been_sent=agent != "ada")
    for number, prompt in enumerate(prompts):
        assert (prompt.agent, prompt.turn) == (agent, number + 1)
        if number:
            before = prompts[number - 1]
            assert prompt.tokens[: len(before.tokens)] == before.tokens
            assert len(prompt.tokens) > len(before.tokens) + len(REPLY) - 1
            assert prompt.known == len(before.tokens)
        if agent != "ada" or number:
            assert 0 < prompt.new_share <= MAX_NEW_SHARE


def test_the_reply_is_part_of_the_next_prompt_without_its_stop_token() -> None:
    first, second, *_ = talk("ada", has_been_sent=False)
    said = second.tokens[len(first.tokens) : len(first.tokens) + len(REPLY) - 1]
    assert said == REPLY[:-1]


def test_a_reply_too_long_to_show_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="of the prompt is new"):
        talk("ben", has_been_sent=True, reply=[5] * 400)


def test_four_bytes_are_a_token_of_the_substitute() -> None:
    tokens: Callable[[str], list[int]] = encode_bytes
    assert len(tokens("abcdefgh-")) == 3
    assert tokens("abcdefgh") == tokens("abcd") + tokens("efgh")
    assert tokens("abcd") != tokens("abce")
