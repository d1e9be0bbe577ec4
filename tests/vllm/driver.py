"""A real vLLM `LLM` in a process of its own, which does what it is told by lines of JSON.

    told:    {"prompts": [[ids], …], "max_tokens": 8, …}    {"reset": true}
    answers: ANSWER {"outputs": [[ids], …], "cached": [n, …], "seconds": s}

`Driver` is the test's end of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import msgpack
import zmq

from tests.e2e.household import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
ANSWER: Final = "ANSWER "

ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of every vLLM that a test starts."""
ARGUMENTS: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4608,
    "max_num_batched_tokens": 4608,
    "max_num_seqs": 4,
}


PATIENT: Final = {"lookup_s": 60.0, "load_s": 120.0, "store_s": 60.0}
"""Where deadlines are not what is tested: this machine may be busy with other things."""


def transfer_config(endpoint: str, **extra: Any) -> dict[str, Any]:
    """What an operator gives to --kv-transfer-config."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


class Events:
    """What vLLM publishes of its blocks. It connects to an endpoint that names a host, so the
    subscriber binds."""

    def __init__(self) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.bind(self.endpoint)

    def take(self) -> list[dict[str, Any]]:
        """All that has come. Each event is a map with its kind as `type`."""
        events: list[dict[str, Any]] = []
        while self._socket.poll(200):
            _, _, payload = self._socket.recv_multipart()
            events += msgpack.unpackb(payload)[1]
        return events

    def close(self) -> None:
        self._context.destroy(linger=0)


@dataclass(frozen=True)
class Said:
    """Of each prompt in order: the tokens that came out, and how many of its own were cached."""

    outputs: list[list[int]]
    cached: list[int]
    seconds: float


class Driver:
    """`endpoint` "" serves without hicache. `more`: arguments of vLLM's `LLM`."""

    def __init__(
        self,
        model: Path,
        endpoint: str,
        log: Path,
        *,
        dtype: str = "float32",
        in_process: bool = True,
        extra: dict[str, Any] = PATIENT,
        **more: Any,
    ) -> None:
        arguments = {**ARGUMENTS, "model": str(model), "dtype": dtype, **more}
        if endpoint:
            arguments["kv_transfer_config"] = transfer_config(endpoint, **extra)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}
        self.log = log
        self._sink = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.driver", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment},
            text=True,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._tell(quit=True)
            self.process.wait(60)
        self.process.kill()
        self.process.wait(60)
        self._sink.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def generate(self, prompts: list[list[int]], **more: Any) -> Said:
        self.begin(prompts, **more)
        return self.end()

    def begin(self, prompts: list[list[int]], **more: Any) -> None:
        self._tell(prompts=prompts, **more)

    def end(self) -> Said:
        return Said(**self._answer())

    def reset(self) -> None:
        """vLLM's own prefix cache is emptied."""
        self._tell(reset=True)
        assert self._answer()["done"], f"vLLM did not reset; see {self.log}"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def _tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        raise AssertionError(f"vLLM ended:\n{self.said()[-4000:]}")


# --- the process itself ---------------------------------------------------------------------------


def _generate(llm: Any, told: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in told["prompts"]]
    for prompt in prompts:
        if "salt" in told:
            prompt["cache_salt"] = told["salt"]
    several = told.get("n", 1)
    sampling = SamplingParams(
        max_tokens=told.get("max_tokens", 8),
        n=several,
        temperature=0.0 if several == 1 else 0.8,
        seed=7 if several > 1 else None,
        ignore_eos=True,
    )
    started_s = time.perf_counter()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "outputs": [list(out.token_ids) for result in results for out in result.outputs],
        "cached": [result.num_cached_tokens for result in results],
        "seconds": time.perf_counter() - started_s,
    }


def _reset(llm: Any) -> dict[str, Any]:
    """Blocks on their way to the daemon are vLLM's until it has stepped once more."""
    for _ in range(100):
        if llm.reset_prefix_cache():
            return {"done": True}
        _generate(llm, {"prompts": [[1, 2, 3]], "max_tokens": 1})
    return {"done": False}


def main(arguments: dict[str, Any], told: IO[str]) -> None:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    for name, kind in (
        ("kv_transfer_config", KVTransferConfig),
        ("kv_events_config", KVEventsConfig),
    ):
        if name in arguments:
            arguments[name] = kind(**arguments[name])
    llm = LLM(**arguments)
    print(ANSWER + "{}", flush=True)
    for line in told:
        what = json.loads(line)
        if "quit" in what:
            break
        answer = _reset(llm) if "reset" in what else _generate(llm, what)
        print(ANSWER + json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.stdin)
