"""A real vLLM `LLM` in a process of its own, which does what it is told by lines of JSON.

    told:    {"prompts": [[ids], …], "max_tokens": 8, …}    {"reset": …}    {"metric": name} …
    answers: ANSWER {"outputs": [[ids], …], "cached": [n, …], "seconds": s}

`Driver` is the test's end of it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import msgpack
import zmq

from tests.e2e.daemon_process import free_port, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
ANSWER: Final = "ANSWER "

ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Two cores, perhaps with other work on them: threads that are bound or that spin lose most.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "1",
}
"""Of every vLLM that a test starts."""
ARGUMENTS: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4608,
    "max_num_batched_tokens": 4608,
    "max_num_seqs": 4,
    "disable_log_stats": False,
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


def end_family(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of a session of processes. vLLM's engines and workers outlive a parent that
    was killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


class Events:
    """What vLLM publishes of its blocks. It connects to an endpoint that names a host, so the
    subscriber binds: then its subscription reaches a publisher that has connected only when the
    subscriber is used, and what was published before is lost. So a thread looks all the time."""

    def __init__(self) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
        }
        self._come: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._context = zmq.Context()
        self._reader = threading.Thread(target=self._read, name="events", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.subscribe(b"")
            socket.bind(self.endpoint)
            while not self._is_over.is_set():
                if socket.poll(50):
                    self._come.put(socket.recv_multipart()[-1])

    def take(self) -> list[dict[str, Any]]:
        """All that has come. Each event is a map with its kind as `type`."""
        events: list[dict[str, Any]] = []
        with suppress(queue.Empty):
            while True:
                events += msgpack.unpackb(self._come.get(timeout=0.5))[1]
        return events

    def close(self) -> None:
        self._is_over.set()
        self._reader.join()
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
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._tell(quit=True)
            self.process.wait(60)
        end_family(self.process)
        self._sink.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def generate(self, prompts: list[list[int]], **more: Any) -> Said:
        self.begin(prompts, **more)
        return self.end()

    def search(self, prompts: list[list[int]], beams: int, max_tokens: int) -> list[list[int]]:
        """The best beams of each prompt, with the prompt before them."""
        self._tell(prompts=prompts, beams=beams, max_tokens=max_tokens)
        return self.end().outputs

    def begin(self, prompts: list[list[int]], **more: Any) -> None:
        self._tell(prompts=prompts, **more)

    def end(self) -> Said:
        return Said(**self._answer())

    def reset(self, *, connector: bool = False) -> None:
        """vLLM's own prefix cache is emptied, and what the connector knows of too if asked."""
        self._tell(reset=connector)
        assert self._answer()["done"], f"vLLM did not reset:\n{self.said()[-4000:]}"

    def metric(self, name: str) -> float:
        """One of vLLM's, summed over its labels."""
        self._tell(metric=name)
        value: float = self._answer()["value"]
        return value

    def nap(self, level: int = 1) -> None:
        """vLLM sleeps and wakes up again."""
        self._tell(nap=level)
        self._answer()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def _tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return answer
        raise AssertionError(f"vLLM ended:\n{self.said()[-4000:]}")


# --- the process itself ---------------------------------------------------------------------------


def _prompts(order: dict[str, Any]) -> list[dict[str, Any]]:
    if "embedded" in order:  # so many random vectors of such a length
        import torch

        seeded = torch.Generator().manual_seed(1)
        return [{"prompt_embeds": torch.randn(order["embedded"], generator=seeded)}]
    salt = {"cache_salt": order["salt"]} if "salt" in order else {}
    return [{"prompt_token_ids": ids, **salt} for ids in order["prompts"]]


def _generate(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    several = order.get("n", 1)
    sampling = SamplingParams(
        max_tokens=order.get("max_tokens", 8),
        n=several,
        temperature=0.0 if several == 1 else 0.8,
        seed=7 if several > 1 else None,
        ignore_eos=True,
    )
    lora = LoRARequest(*order["lora"]) if "lora" in order else None
    started_s = time.perf_counter()
    results = llm.generate(_prompts(order), sampling, use_tqdm=False, lora_request=lora)
    return {
        "outputs": [list(out.token_ids) for result in results for out in result.outputs],
        "cached": [result.num_cached_tokens for result in results],
        "seconds": time.perf_counter() - started_s,
    }


def _search(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """The best beams of each prompt, with the prompt; each token of each is a request to vLLM."""
    from vllm.sampling_params import BeamSearchParams

    how = BeamSearchParams(order["beams"], order.get("max_tokens", 8), ignore_eos=True)
    found = llm.beam_search(_prompts(order), how)
    return {
        "outputs": [list(beam.tokens) for result in found for beam in result.sequences],
        "cached": [],
        "seconds": 0.0,
    }


def _reset(llm: Any, connector: bool) -> dict[str, Any]:
    """Where the scheduler is in this process, blocks on their way to the daemon must not prevent
    it. In another they do until they have arrived, and that process sees to it."""

    def done() -> bool:
        is_done: bool = llm.reset_prefix_cache(reset_connector=connector)
        return is_done

    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        return {"done": done()}
    wait_for(done, "a reset")
    return {"done": True}


def _nap(llm: Any, level: int) -> dict[str, Any]:
    llm.sleep(level)
    llm.wake_up()
    return {}


def _answer(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    if "reset" in order:
        return _reset(llm, order["reset"])
    if "nap" in order:
        return _nap(llm, order["nap"])
    if "metric" in order:
        values = [metric.value for metric in llm.get_metrics() if metric.name == order["metric"]]
        return {"value": sum(values)}
    return _search(llm, order) if "beams" in order else _generate(llm, order)


def _only_answers() -> IO[str]:
    """What the test reads; whatever else this process and its children print is for the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(arguments: dict[str, Any], order: IO[str]) -> None:
    answers = _only_answers()
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    for name, kind in (
        ("kv_transfer_config", KVTransferConfig),
        ("kv_events_config", KVEventsConfig),
    ):
        if name in arguments:
            arguments[name] = kind(**arguments[name])
    llm = LLM(**arguments)
    print(ANSWER + "{}", file=answers, flush=True)
    for line in order:
        what = json.loads(line)
        if "quit" in what:
            break
        print(ANSWER + json.dumps(_answer(llm, what)), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.stdin)
