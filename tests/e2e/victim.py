"""A client that stops at a chosen moment, to be killed there. Run by `daemon_process.KilledClient`.

    python -m tests.e2e.victim put|match|fetch|late-put|late-read ENDPOINT TRANSPORT SPEC TOKENS

It says one word on stdout when it is there. The late ones go on at a line on stdin, as one that was
stopped for a long time does, and say how they fared.
"""

import json
import signal
import sys

import numpy as np
import numpy.typing as npt

from hicache.client import Client, NamespaceSpec
from tests.e2e.daemon_process import Tokens, blocks_of


def halt(word: str) -> None:
    print(word, flush=True)
    while True:
        signal.pause()


def wait_for_a_word(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def put_late(client: Client, tokens: Tokens) -> None:
    """Writes into all its slots once more, long after they were given, and commits."""
    views: list[npt.NDArray[np.uint8]] = []

    def fill(index: int, view: npt.NDArray[np.uint8]) -> None:
        view[:] = 0xAB
        views.append(view)
        if index == 2:
            wait_for_a_word("writing")
        for mine in views:
            mine[:] = 0xCD

    result = client.put(tokens, fill)
    print(f"stored-{result.stored}", flush=True)


def read_late(client: Client, tokens: Tokens) -> None:
    """Copies what it was told of long ago, and asks whether it may use that."""
    match = client.match(tokens)
    (run,) = client.fetch_runs(match)
    wait_for_a_word("running")
    copies = [view.copy() for view in run.views]
    is_good = run.verify()
    is_right = np.array_equal(np.stack(copies), blocks_of(tokens))
    print("right" if is_good and is_right else "wrong" if is_good else "unusable", flush=True)


def main(what: str, endpoint: str, transport: str, spec_json: str, tokens_json: str) -> None:
    spec = NamespaceSpec.from_wire(json.loads(spec_json))
    tokens = np.array(json.loads(tokens_json), np.uint32)
    assert transport in ("arena", "frames")
    with Client(
        spec,
        endpoint,
        transport="arena" if transport == "arena" else "frames",
        timeout_s=10.0,
        fetch_timeout_s=30.0,
    ) as client:
        if what.startswith("late"):
            {"late-put": put_late, "late-read": read_late}[what](client, tokens)
            halt("done")
        if what == "put":  # dies with the slots in its hands, half of them written

            def fill(index: int, view: object) -> None:
                assert isinstance(view, np.ndarray)
                view[:] = 0xAB
                if index >= 2:
                    halt("writing")

            client.put(tokens, fill)
        match = client.match(tokens)
        assert match.lease, match
        if what == "match":
            halt("leased")
        print("fetching", flush=True)
        for _ in client.fetch_runs(match):
            halt("running")
    halt("done")


main(*sys.argv[1:])
