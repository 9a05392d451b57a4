"""The engine alone: start-up seconds, then output tokens/s over a workload, every request handed in at once.

    python -m benchmarks.engine --model gpt2-124m --kind random --requests 64
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES, model_folder
from benchmarks.report import write_report
from benchmarks.workload import write_workload
from workers.engine.async_engine import AsyncEngine
from workers.engine.config import EngineConfig
from workers.engine.messages import EngineRequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--kind", choices=("random", "shared"), default="random")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=Path, help="a batch file to use in place of the generated one")
    parser.add_argument("--model-folder", type=Path, help="a model folder to use in place of the generated one")
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    folder = args.model_folder or model_folder(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        path = args.input or write_workload(Path(scratch) / "input.jsonl", args.kind, args.requests, args.model)
        requests = tokenised_requests(folder, path)
    figures = asyncio.run(measure(folder, requests, args.passes))
    print(json.dumps(figures))
    if args.input is None:
        write_report(f"engine-{args.model}-{args.kind}-{args.requests}", figures)


def tokenised_requests(folder: Path, path: Path) -> list[EngineRequest]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = []
    for index, line in enumerate(path.open()):
        body = json.loads(line)["body"]
        if "prompt" in body:
            token_ids = tokenizer(body["prompt"])["input_ids"]
        else:
            text = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        sampling = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
        requests.append(EngineRequest(index, token_ids, [], sampling))
    return requests


async def measure(folder: Path, requests: list[EngineRequest], passes: int) -> dict[str, Any]:
    began = time.perf_counter()
    engine = AsyncEngine(EngineConfig(model=str(folder), max_model_len=1024))
    await engine.start()
    start_up = time.perf_counter() - began
    rounds = []
    for number in range(passes):
        rounds.append(await _one_pass(engine, requests, offset=(number + 1) * len(requests)))
    await engine.stop()
    return {
        "start_up_seconds": round(start_up, 2),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "passes": rounds,
    }


async def _one_pass(engine: AsyncEngine, requests: list[EngineRequest], offset: int) -> dict[str, Any]:
    began = time.perf_counter()
    engine.add([
        EngineRequest(request.request_id + offset, request.prompt_token_ids, [], request.sampling) for request in requests
    ])
    unfinished, tokens, cached = len(requests), 0, 0
    async for output in engine.steps():
        tokens += len(output.token_ids)
        unfinished -= sum(map(bool, output.finish))
        cached += sum(output.cached_tokens)
        if not unfinished:
            break
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 2),
        "output_tokens": tokens,
        "cached_tokens": cached,
        "output_tokens_per_second": round(tokens / seconds, 1),
    }


if __name__ == "__main__":
    main()
