"""Servers for the calls of benchmarks: `pipeline serve` and `vllm serve`, run as by a user."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.driving import CONTEXT
from benchmarks.encoders import encoder_folder, model_flags
from benchmarks.models import model_folder
from benchmarks.peers import KV_CACHE_GIB, peer_dtype, vllm_environment, vllm_folder
from benchmarks.ports import free_port
from benchmarks.processes import cpu_seconds

HOST = "127.0.0.1"
_START_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 600.0, 30.0, 0.2

_TEXT = "/v1/completions", {"prompt": "def main", "max_tokens": 4}
_NO_COMMENTS = {"PIPELINE_PING_SECONDS": str(_START_SECONDS)}
"""`vllm bench serve` loses a stream in which the server sends a comment, after 15 s of silence."""


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
        """Return the processor time of all processes of the server."""
        return cpu_seconds(self.pid)


@contextmanager
def running_pipeline(model: str) -> Iterator[Server]:
    """Run a warm `pipeline serve` with a private Redis and file store.

    Its KV cache is as large as that of vLLM.
    """
    with tempfile.TemporaryDirectory() as store:
        options = ["--no-deduplicate", "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30)]
        with _running(
            model, _text_flags(model), [*_serve(store), *options], os.environ | _NO_COMMENTS, _TEXT
        ) as server:
            yield server


@contextmanager
def running_embeddings(model: str) -> Iterator[Server]:
    """Run a warm `pipeline serve` with one of ENCODERS and a private Redis and file store."""
    with tempfile.TemporaryDirectory() as store:
        flags = model_flags(encoder_folder(model), model)
        with _running(model, flags, _serve(store), os.environ, ("/v1/embeddings", {"input": "text"})) as server:
            yield server


@contextmanager
def running_vllm_server(model: str) -> Iterator[Server]:
    """Run a warm `vllm serve` with the settings of `peers.py`. Raise NoPeer."""
    command = [str(vllm_folder() / "bin" / "vllm"), "serve"]  # the model follows
    flags = [*_text_flags(model), "--dtype", peer_dtype()]
    with _running(model, flags, command, vllm_environment(), _TEXT) as server:
        yield server


def _serve(store: str) -> list[str]:
    return [sys.executable, "-m", "pipeline", "serve", "--file-store", store, "--log-level", "warning"]


def _text_flags(model: str) -> list[str]:
    return [str(model_folder(model)), "--served-model-name", model, "--max-model-len", str(CONTEXT)]


@contextmanager
def _running(
    model: str, flags: list[str], command: list[str], environment: Mapping[str, str], warm: tuple[str, dict[str, Any]]
) -> Iterator[Server]:
    """Run a server until the end of the context.

    It has answered the request `warm`: a path, and a body without the model.
    """
    port = free_port()
    words = [*flags, "--host", HOST, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            server = Server(model, port, process.pid)
            _wait_until_it_answers(server, process, *warm)
            yield server
        except Exception as error:
            log.seek(0)
            error.add_note(f"end of the output of {' '.join(command)}:\n{log.read()[-4000:]}")
            raise
        finally:
            _stop(process)


def _wait_until_it_answers(server: Server, process: "subprocess.Popen[bytes]", path: str, body: dict[str, Any]) -> None:
    body = {"model": server.model, **body}
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.post(server.url + path, json=body, timeout=_START_SECONDS).is_success:
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
