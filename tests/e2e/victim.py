"""A client that stops at a chosen moment and waits to be killed. Run by `household.Victim`.

    python -m tests.e2e.victim put|match|fetch ENDPOINT TRANSPORT SPEC TOKENS

It says one word on stdout when it is there.
"""

import json
import signal
import sys

import numpy as np

from hicache.client import Client, NamespaceSpec


def halt(word: str) -> None:
    print(word, flush=True)
    while True:
        signal.pause()


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
