"""Servers that benchmarks send their calls to: `pipeline serve` and `vllm serve`, as a user starts
them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from benchmarks.driving import CONTEXT
from benchmarks.models import model_folder
from benchmarks.peers import KV_CACHE_GIB, peer_dtype, vllm_environment, vllm_folder
from benchmarks.ports import free_port
from benchmarks.processes import cpu_seconds

HOST = "127.0.0.1"
_START_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 600.0, 30.0, 0.2

_NO_COMMENTS = {"PIPELINE_PING_SECONDS": str(_START_SECONDS)}
"""`vllm bench serve` loses a stream whose server sends a comment, as after 15 s of silence."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and how to reach it."""

    model: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def cpu_seconds(self) -> float:
        """Processor time of all its processes."""
        return cpu_seconds(self.pid)


@contextmanager
def running_pipeline(model: str) -> Iterator[Server]:
    """`pipeline serve` with a Redis and a file store of its own and as much KV cache as vLLM gets,
    warm.
    """
    with tempfile.TemporaryDirectory() as store:
        options = ["--file-store", store, "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30), "--log-level", "warning"]
        command = [sys.executable, "-m", "pipeline", "serve", "--no-deduplicate", *options]
        with _running(model, command, os.environ | _NO_COMMENTS) as server:
            yield server


@contextmanager
def running_vllm_server(model: str) -> Iterator[Server]:
    """`vllm serve` at the settings of `peers.py`, warm. Raises NoPeer."""
    command = [str(vllm_folder() / "bin" / "vllm"), "serve", "--dtype", peer_dtype()]
    with _running(model, command, vllm_environment()) as server:
        yield server


@contextmanager
def _running(model: str, command: list[str], environment: Mapping[str, str]) -> Iterator[Server]:
    port = free_port()
    words = [
        *(str(model_folder(model)), "--served-model-name", model),
        *("--max-model-len", str(CONTEXT), "--host", HOST, "--port", str(port)),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            server = Server(model, port, process.pid)
            _wait_until_it_answers(server, process)
            yield server
        except Exception as error:
            log.seek(0)
            error.add_note(f"end of the output of {' '.join(command)}:\n{log.read()[-4000:]}")
            raise
        finally:
            _stop(process)


def _wait_until_it_answers(server: Server, process: "subprocess.Popen[bytes]") -> None:
    body = {"model": server.model, "prompt": "def main", "max_tokens": 4}
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=_START_SECONDS).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"the server of {server.model} did not answer; its exit status: {process.poll()}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
