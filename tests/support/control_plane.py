"""The control plane as real processes, and a substitute for the workers that answers what it
claims.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from jobs.protocol.chat import CHAT
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS, POOLING_ENDPOINTS, TOKENIZER_ENDPOINTS
from jobs.protocol.pooling_endpoint import PoolingHead
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import ApiError, Choice, Result, Usage, encode_json
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from tests.support.processes import catches
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

Answer = Callable[[Claim], Result]


def chat_line(custom_id: str, content: str = "hi", model: str | None = "m", **parameters: Any) -> bytes:
    """One line of an input file."""
    body = {
        "messages": [{"role": "user", "content": content}],
        **({} if model is None else {"model": model}),
        **parameters,
    }
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
        + b"\n"
    )


def write_input(path: Path, count: int, **parameters: Any) -> Path:
    """A file of `count` good lines; line n asks for n."""
    path.parent.mkdir(exist_ok=True)
    parts = chat_line("c<number>", "say <number>", **parameters).split(b"<number>")
    path.write_bytes(b"".join((b"%d" % number).join(parts) for number in range(1, count + 1)))
    return path


def echo(claim: Claim) -> Result:
    """Answers with what was said, so that a mix-up of lines shows; as the demo model's tokenizer
    does where that is asked.
    """
    if claim.request.endpoint in TOKENIZER_ENDPOINTS:
        return _by_tokenizer(claim)
    if claim.request.endpoint in POOLING_ENDPOINTS:
        return _by_length(claim)
    body = json.loads(claim.request.body)
    usage = Usage(7, 3, 2, 1, 250_000)
    if claim.request.endpoint == CHAT:
        choice = Choice(0, _as_text(body["messages"][-1].get("content")), "stop")
    else:
        choice = Choice(0, _as_text(body.get("prompt")), "length")
    endpoint = ENDPOINTS[claim.request.endpoint]
    answer = endpoint.body(AnswerHead(f"{endpoint.id_prefix}{claim.key.line}", body["model"], 1), [choice], usage)
    return Result(200, encode_json(answer), usage, f"req_{claim.key.line}")


def _by_tokenizer(claim: Claim) -> Result:
    from workers.replica.sampling_params import ModelLimits
    from workers.replica.tokenization import TokenizerAnswers
    from workers.settings import DEMO_MODEL
    from workers.text.tokenizer import TextTokenizer

    limits = ModelLimits(4096, 1024)
    return TokenizerAnswers(TextTokenizer.load(DEMO_MODEL), [claim.request.model], limits).answer(claim).result


def _by_length(claim: Claim) -> Result:
    """Numbers by how long a text is; of a pair the second one."""
    from workers.replica.pooled_vector import PooledVector

    endpoint = POOLING_ENDPOINTS[claim.request.endpoint]
    try:
        call = endpoint.read(json.loads(claim.request.body))
    except ApiError as error:
        return error.result(f"req_{claim.key.line}")
    outputs = [PooledVector(struct.pack("<2f", len(text), 1)) for text in call.inputs or call.documents]
    head = PoolingHead(f"{endpoint.id_prefix}{claim.key.line}", call.model, 1, 7)
    return Result(200, encode_json(endpoint.body(call, head, outputs)), Usage(7), f"req_{claim.key.line}")


def _as_text(said: Any) -> str:
    """Of token ids, of parts and of nothing, their JSON."""
    return said if isinstance(said, str) else json.dumps(said)


def failing(*lines: int, status: int = 400) -> Answer:
    """Fails some lines and answers the others."""

    def answer(claim: Claim) -> Result:
        if claim.key.line in lines:
            return ApiError(status, "no such luck", code="bad_luck").result(f"req_{claim.key.line}")
        return echo(claim)

    return answer


class Answering:
    """A thread that claims and commits like a worker."""

    def __init__(
        self, url: str, answer: Answer = echo, models: Sequence[str] = ("m",), limit: int = 64, pause: float = 0.0
    ) -> None:
        self._queue = Queue(connect(url), QueueSettings(redis_retry_seconds=1))
        self._answer = answer
        self._models = list(models)
        self._limit = limit
        self.pause = pause  # seconds after each claim
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.name = f"w{uuid.uuid4().hex}"
        self.answered = 0

    def __enter__(self) -> "Answering":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Order it to end; a server that is gone holds it up for as long as the queue tries
        again.
        """
        self._stop.set()

    def _register(self) -> None:
        tasks = ("generate", "tokenize", "embed", "classify", "score")
        record = WorkerRecord(self.name, self._models, "ready", 4096, time.time(), "test", 1, tasks=tasks)
        self._queue.register_worker(record)

    def _run(self) -> None:
        seq = 1  # the same again after an error: a claim whose answer was lost is given anew
        while not self._stop.is_set():
            try:
                if seq % 50 == 1:
                    self._register()
                claims = self._queue.claim(self.name, seq, self._limit, models=self._models)
                finished = [
                    Finished(claim.key, claim.fence, self._answer(claim), None, claim.request.reply_to)
                    for claim in claims
                ]
                lost = self._queue.commit(self.name, finished) if finished else []
                self.answered += len(finished) - len(lost)
                seq += 1
            except (redis.RedisError, QueueUnavailable):
                continue
            self._stop.wait(self.pause if claims else 0.005)


class ControlPlane:
    """Two RQ workers and a ticker, as processes."""

    def __init__(
        self, url: str, ticker_options: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.url = url
        self._environment = {**os.environ, **(environment or {})}
        self._commands = {
            "driver": ["jobs.control.rq_worker", "--redis-url", url],
            "twin": ["jobs.control.rq_worker", "--redis-url", url],
            "ticker": ["jobs.control.ticker", "--redis-url", url, *ticker_options],
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, launcher: Sequence[str] = ("-m",)) -> None:
        """Starts the named processes, by default those that do not run; `launcher` is what runs
        their module.
        """
        for name in names or [name for name in self._commands if name not in self.processes]:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *launcher, *self._commands[name]], cwd=ROOT, env=self._environment
            )

    def kill(self, name: str) -> None:
        """SIGKILL; the process is gone when this returns."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """SIGTERM to all, once they handle it; fails if one does not end in time."""
        for name, process in self.processes.items():
            wait_until(partial(_handles_it_or_ended, process), 60, f"{name} to be up")
        for process in self.processes.values():
            process.terminate()
        codes = {name: process.wait(timeout=60) for name, process in self.processes.items()}
        self.processes.clear()
        assert set(codes.values()) <= {0}, codes


def _handles_it_or_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None or catches(process.pid, signal.SIGTERM)


@contextmanager
def control_plane(
    url: str, ticker_options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[ControlPlane]:
    """A running control plane; `environment` sets variables beside those of this process."""
    plane = ControlPlane(url, ticker_options, environment)
    plane.start()
    try:
        yield plane
    finally:
        for process in plane.processes.values():
            process.terminate()
        for process in plane.processes.values():
            process.wait(timeout=60)


def read_jsonl(location: str | Path) -> list[dict[str, Any]]:
    """The objects of a result file."""
    return [json.loads(line) for line in Path(location).read_bytes().splitlines()]


def check_echoes(location: str | Path, count: int) -> None:
    """Every line of `write_input` exactly once, in order, with its own answer."""
    lines = read_jsonl(location)
    assert [line["custom_id"] for line in lines] == [f"c{number}" for number in range(1, count + 1)]
    for number, line in enumerate(lines, 1):
        assert line["response"]["body"]["choices"][0]["message"]["content"] == f"say {number}"
