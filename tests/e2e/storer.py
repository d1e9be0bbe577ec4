"""A client that stores prompts and writes down which were acknowledged as durable, until killed.

    python -m tests.e2e.storer ENDPOINT SPEC FIRST_SEED      run by tests/e2e/test_crash.py

A line on stdout is a seed whose prompt is durable.
"""

import itertools
import json
import sys

from hicache.client import Client, NamespaceSpec
from tests.e2e.daemon_process import blocks_of, prompt

NUM_BLOCKS = 6


def main(endpoint: str, spec_json: str, first_seed: str) -> None:
    spec = NamespaceSpec.from_wire(json.loads(spec_json))
    with Client(spec, endpoint, timeout_s=5.0, put_timeout_s=5.0) as client:
        for seed in itertools.count(int(first_seed)):
            tokens = prompt(seed, NUM_BLOCKS)
            result = client.put(tokens, blocks_of(tokens, spec), durable=True)
            if result.durable:
                print(seed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
