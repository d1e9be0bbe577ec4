"""vLLM's HTTP server with chat requests: after a restart of both, the prompt comes from disk."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.e2e.daemon_process import DaemonProcess, free_port, wait_for
from tests.vllm.driver import ENVIRONMENT, PATIENT, ROOT, Events, end_family, transfer_config
from tests.vllm.test_reload import BLOCK_TOKENS, hashes

pytestmark = pytest.mark.timeout(1800)

SYSTEM = "You are a careful assistant. " + " ".join(
    f"Rule {number}: answer question {number} briefly, politely and in whole sentences."
    for number in range(24)
)


class Server:
    """`python -m vllm.entrypoints.openai.api_server`, as an operator starts it."""

    def __init__(self, model: Path, daemon: DaemonProcess, log: Path) -> None:
        self.port = free_port()
        self.events = Events()
        self.log = log
        self._sink = log.open("ab")
        options = {
            "--model": str(model),
            "--served-model-name": "smol",
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "float32",
            "--max-model-len": "4608",
            "--max-num-seqs": "4",
            "--kv-transfer-config": json.dumps(transfer_config(daemon.endpoint, **PATIENT)),
            "--kv-events-config": json.dumps(self.events.config),
        }
        words = [word for pair in options.items() for word in pair]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                *words,
                "--enforce-eager",
                "--enable-prompt-tokens-details",
            ],
            stdout=self._sink,
            stderr=self._sink,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self.__exit__)
            wait_for(self._is_up, "a server that answers", patience_s=600.0)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        end_family(self.process)
        self._sink.close()
        self.events.close()

    def chat(self, question: str, **more: Any) -> dict[str, Any]:
        body = json.dumps(self._body(question, **more)).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def hang_up_early(self, question: str) -> None:
        """A stream whose reader goes after the first word."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = json.dumps(self._body(question, stream=True, max_tokens=200))
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        connection.getresponse().readline()
        connection.close()

    def metric(self, name: str) -> float:
        """Summed over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        mine = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

    def _body(self, question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 12, **more}

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def words_of(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def cached_of(answer: dict[str, Any]) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def test_chat_after_a_restart_of_everything(
    daemon: DaemonProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """The second server has its model by another path; the daemon has nothing left in memory. At
    the end it is killed, and the server goes on."""
    questions = ["What is the capital of France?", "How many legs has a spider?"]
    with Server(checkpoint, daemon, tmp_path / "first.log") as server:
        first = [words_of(server.chat(question)) for question in questions]
        prompt_tokens = server.chat(questions[0])["usage"]["prompt_tokens"]
        server.hang_up_early("Tell me a long story about rule one.")
        assert server.metric("vllm:external_prefix_cache_hits_total") == 0
        names = hashes(server.events.take(), "GPU")
    daemon.stop()
    daemon.start()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in checkpoint.iterdir():
        (elsewhere / file.name).symlink_to(file)
    with Server(elsewhere, daemon, tmp_path / "second.log") as server:
        answers = [server.chat(question) for question in questions]
        assert [words_of(answer) for answer in answers] == first
        assert cached_of(answers[0]) == (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0
        assert server.metric("vllm:external_prefix_cache_hits_total") >= cached_of(answers[0])
        assert server.metric("vllm:hicache_loads_total") >= 1
        on_disk = hashes(server.events.take(), "STORAGE")
        assert len(on_disk) >= cached_of(answers[0]) // BLOCK_TOKENS
        assert on_disk <= names, "a router knows these blocks by other names"
        salted = server.chat(questions[0], cache_salt="somebody's")
        assert (words_of(salted), cached_of(salted)) == (first[0], 0)
        several = server.chat(questions[1], n=2, temperature=0.7)
        assert len(words_of(several)) == 2
        server.hang_up_early("Tell me another long story.")
        assert words_of(server.chat(questions[1])) == first[1]
        wait_for(lambda: daemon.stats()["leases"] == 0, "no lease")
        daemon.kill()
        assert words_of(server.chat(questions[0], cache_salt="mine")) == first[0]
        assert server.metric("vllm:hicache_troubles_total") >= 1
