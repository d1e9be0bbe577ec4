"""The connector that docs/adding.md shows: the answers with it are those without it."""

import pytest

from tests.docs.toy_connector import NOTHING, ToyConnector, ToyEngine
from tests.e2e.daemon_process import DaemonProcess

pytestmark = pytest.mark.e2e
CONVERSATION = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 0, 3, 9]


def test_answers_are_the_same_and_less_is_computed() -> None:
    plain, cached = ToyEngine(1), ToyEngine(1)
    with DaemonProcess() as server:
        connector = ToyConnector(cached, server.endpoint)
        for turn in range(1, len(CONVERSATION)):
            tokens = CONVERSATION[:turn]
            expected = plain.next_token(plain.prefill(tokens, NOTHING))
            assert connector.answer(tokens) == expected
        assert cached.num_computed < plain.num_computed / 2
        other = ToyConnector(ToyEngine(2), server.endpoint)
        assert other.client.match(CONVERSATION).hit_blocks == 0
        connector.client.close()
        other.client.close()


def test_without_a_daemon_it_computes_everything() -> None:
    engine = ToyEngine(1)
    connector = ToyConnector(engine, "ipc:///nowhere/h.sock")
    plain = ToyEngine(1)
    assert connector.answer(CONVERSATION) == plain.next_token(plain.prefill(CONVERSATION, NOTHING))
    assert engine.num_computed == len(CONVERSATION)
    connector.client.close()
