"""`map` of the Python client beside `run-batch` on the same lines, by turns: 10,000 short prompts,
each a program of its own with all of its processes, from its start to its end.

    python -m benchmarks.client_map
    python -m benchmarks.client_map --prompts 1000 --turns 1
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from batch_inference_pipeline import Pipeline
from batch_inference_pipeline.lines import LineOptions, encoded, line_of
from benchmarks.report import arguments, by_turns, write_report

_TOKENS = {"max_tokens": 8, "temperature": 0}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3, help="the median ratio counts")
    parser.add_argument("--as-client", type=Path, help="map the prompts, and write the answers to this file")
    args = parser.parse_args()
    prompts = [f"What is {number} + {number % 97}?" for number in range(args.prompts)]
    if args.as_client is not None:
        map_prompts(prompts, args.as_client)
    else:
        write_report("client-map", measure(prompts, args.turns), args.out, args.seed)


def map_prompts(prompts: list[str], output: Path) -> None:
    """Answer the prompts by the client."""
    with Pipeline() as pipeline:
        texts = [result.text for result in pipeline.map(prompts, **_TOKENS)]
        output.write_text(json.dumps(texts))  # the file's time marks the last answer


def measure(prompts: list[str], turns: int) -> dict[str, Any]:
    """Return the seconds of both programs and the client's speed relative to `run-batch`.

    The seconds to the client's last answer are included.
    """
    answered, client, command = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        source, answers = Path(scratch) / "input.jsonl", Path(scratch) / "answers.json"
        options = LineOptions("demo", parameters=_TOKENS)
        source.write_bytes(b"".join(encoded(line_of(number, one, options)) for number, one in enumerate(prompts)))
        mapping = ["benchmarks.client_map", "--prompts", str(len(prompts)), "--as-client", str(answers)]
        for turn in range(turns):
            began = time.time()
            client.append(_seconds(*mapping))
            answered.append(answers.stat().st_mtime - began)
            output = Path(scratch) / f"output-{turn}.jsonl"
            command.append(_seconds("pipeline", "run-batch", str(source), "-o", str(output)))
            if not len(json.loads(answers.read_text())) == len(output.read_bytes().splitlines()) == len(prompts):
                raise RuntimeError("not every prompt was answered")
    seconds = {"client_to_last_answer": answered, "client": client, "run_batch": command}
    return {
        "prompts": len(prompts),
        "seconds": {name: [round(one, 2) for one in values] for name, values in seconds.items()},
        "to_last_answer": by_turns(answered, command),
        "whole_program": by_turns(client, command),
    }


def _seconds(*program: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", *program], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
