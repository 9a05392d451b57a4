"""Embeddings and scores of cross-encoders by `pipeline run-batch` as a whole process, from the
command to the results file, against sentence-transformers and vLLM by turns.

    PEERS=~/peers python -m benchmarks.embeddings --texts 2000
    PEERS=~/peers python -m benchmarks.embeddings --model bge-base --texts 500 --against vllm
    PEERS=~/peers python -m benchmarks.embeddings --cross --texts 2000

Each runs in its fastest dtype on the processor; sentence-transformers can also be given another
dtype and batch size. Results are compared: cosines of embeddings, and differences of scores.
"""

import base64
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.driving import engine_dtype
from benchmarks.encoders import ENCODERS, encoder_folder, model_flags, texts
from benchmarks.peers import (
    peer_dtype,
    peer_versions,
    plain_environment,
    sentence_transformers_folder,
    vllm_environment,
    vllm_folder,
)
from benchmarks.report import arguments, by_turns, write_report
from benchmarks.run_batch import timed

_PEERS = ("sentence-transformers", "vllm")
_WARM_UP_TEXTS = 16

Values = NDArray[np.float32]


class SentenceTransformersRun(NamedTuple):
    """The best settings for a run of sentence-transformers."""

    dtype: str
    batch_size: int

    def command(self, source: Path, results: Path, folder: Path, cross: bool) -> list[str]:
        """Return what embeds or scores a file."""
        python = sentence_transformers_folder() / "bin" / "python"
        script = Path(__file__).with_name("peer_sentence_transformers.py")
        words = (folder, self.dtype, self.batch_size, "score" if cross else "embed", source, results)
        return [str(python), str(script), *map(str, words)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=ENCODERS, default="minilm-l6")
    parser.add_argument("--texts", type=int, default=10_000, help="of 16 to 256 tokens [default: 10000]")
    parser.add_argument("--cross", action="store_true", help="scores of pairs by a cross-encoder")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--against", choices=_PEERS, default=_PEERS[0])
    parser.add_argument(
        "--peer-dtype",
        choices=("bfloat16", "float32"),
        default=peer_dtype(),
        help="of sentence-transformers [default: %(default)s on this processor]",
    )
    parser.add_argument("--peer-batch-size", type=int, default=32, help="of sentence-transformers [default: 32]")
    args = parser.parse_args()
    versions = peer_versions(args.against)
    peer = SentenceTransformersRun(args.peer_dtype, args.peer_batch_size)
    figures = measure(args.model, args.texts, args.cross, args.turns, args.against, args.seed, peer)
    name = f"{'scores' if args.cross else 'embeddings'}-{args.model}-{args.texts}-{args.against}"
    write_report(name, figures, args.out, args.seed, **versions)


def measure(
    model: str, count: int, cross: bool, turns: int, against: str, seed: int, peer: SentenceTransformersRun
) -> dict[str, Any]:
    """Return the seconds of both, measured by turns, and the difference of their results."""
    folder = encoder_folder(f"{model}-cross" if cross else model)
    given: list[Any] = list(texts(count, seed))
    if cross:
        given = [[text, other] for text, other in zip(given, texts(count, seed + 1), strict=True)]
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        source, plain = Path(scratch) / "input.jsonl", Path(scratch) / "texts.jsonl"
        _write_lines(source, given, model, cross)
        plain.write_text("".join(json.dumps(one) + "\n" for one in given))
        if against == "vllm":  # vLLM compiles a model once, and caches it
            few, ended = Path(scratch) / "few.jsonl", Path(scratch) / "few-results.jsonl"
            _write_lines(few, given[:_WARM_UP_TEXTS], model, cross)
            timed(_vllm(few, ended, folder, model), vllm_environment())
        for turn in range(turns):
            results, other = Path(scratch) / f"ours-{turn}.jsonl", Path(scratch) / f"theirs-{turn}.jsonl"
            ours.append(timed(_run_batch(source, results, folder, model)))
            if against == "vllm":
                command, environment = _vllm(source, other, folder, model), vllm_environment()
            else:
                command, environment = peer.command(plain, other, folder, cross), plain_environment()
            theirs.append(timed(command, environment))
        found, expected = _read(results, cross), _read(other, cross)
    return {
        "dtype": engine_dtype(),
        **({"peer": peer._asdict()} if against == _PEERS[0] else {}),
        "pipeline": _summary(ours, count),
        against: _summary(theirs, count),
        **by_turns(ours, theirs),
        **_compare(found, expected, cross),
    }


def _write_lines(path: Path, given: list[Any], model: str, cross: bool) -> None:
    with path.open("w") as file:
        for index, one in enumerate(given):
            url = "/v1/score" if cross else "/v1/embeddings"
            body = {"text_1": one[0], "text_2": one[1]} if cross else {"input": one, "encoding_format": "base64"}
            line = {"custom_id": str(index), "method": "POST", "url": url, "body": {"model": model, **body}}
            file.write(json.dumps(line) + "\n")


def _run_batch(source: Path, results: Path, folder: Path, model: str) -> list[str]:
    command = [sys.executable, "-m", "pipeline", "run-batch", str(source), "-o", str(results)]
    return [*command, *model_flags(folder, model), "--no-deduplicate"]


def _vllm(source: Path, results: Path, folder: Path, model: str) -> list[str]:
    command = [str(vllm_folder() / "bin" / "vllm"), "run-batch", "-i", str(source), "-o", str(results)]
    return [*command, *model_flags(folder, model), "--dtype", peer_dtype()]


def _read(results: Path, cross: bool) -> Values:
    """Return [texts, size], or [pairs], in the order of the texts."""
    with results.open() as file:
        lines = [json.loads(line) for line in file]
    if isinstance(lines[0], Mapping):
        lines = [_value(line, cross) for line in sorted(lines, key=lambda line: int(line["custom_id"]))]
    return np.array(lines, np.float32)


def _value(line: Mapping[str, Any], cross: bool) -> Any:
    [item] = line["response"]["body"]["data"]
    if cross:
        return item["score"]
    return np.frombuffer(base64.b64decode(item["embedding"]), np.float32)


def _summary(seconds: list[float], count: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {"seconds": [round(value, 2) for value in seconds], "texts_per_second": round(count / median, 1)}


def _compare(found: Values, expected: Values, cross: bool) -> dict[str, float]:
    if cross:
        return {"largest_difference": float(np.abs(found - expected).max())}
    cosines = (found * expected).sum(1) / (np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1))
    return {
        "least_cosine": math.floor(float(cosines.min()) * 1e6) / 1e6,
        "largest_difference": float(np.abs(found - expected).max()),
    }


if __name__ == "__main__":
    main()
