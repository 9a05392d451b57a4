"""The cost of JSON schemas: 64 rows, all of them or one with a schema of 20 fields, against rows
without schemas, and the delay of the first token by a new schema.

    python -m benchmarks.structured_outputs
    PEERS=~/peers python -m benchmarks.structured_outputs --against vllm

One engine, in turns: a pass with schemas, then the same number of tokens from other prompts of the
same lengths without. With `--against vllm` vLLM's offline engine takes turns with it on the same
prompts and schemas. No schema is used twice. Random weights follow a schema like real ones, except
inside strings, so the length of strings is bounded.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.driving import running_engine
from benchmarks.models import SHAPES, model_folder, token_bytes
from benchmarks.peers import Vllm, peer_versions, running_vllm
from benchmarks.processes import cpu_seconds
from benchmarks.report import arguments, by_turns, write_report
from benchmarks.schemas import Schema, any_schema, grammar_text, schema_of_fields
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.core import EngineRequest, OutputGuide, SamplingParams

ROWS, FIELDS = 64, 20
PROMPT, OUTPUT = 32, 64  # tokens
FIRST_TOKENS = 500  # schemas in the measurement of the first token


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m-151936")
    parser.add_argument("--turns", type=int, default=5, help="of 64 rows with schemas")
    parser.add_argument("--single-turns", type=int, default=15, help="of one such row among 64")
    parser.add_argument("--schemas", type=int, default=FIRST_TOKENS, help="whose first token is waited for")
    parser.add_argument("--against", choices=("vllm",), help="the engine to take turns with, in place of all else")
    args = parser.parse_args()
    name = f"structured-outputs-{args.model}"
    versions = peer_versions(args.against)
    model_folder(args.model)
    with ExitStack() as stack:
        peer = stack.enter_context(running_vllm(args.model)) if args.against else None
        work = versus(args.model, args.turns, args.seed, peer) if peer else measure(args)
        figures = asyncio.run(work)
    versions |= {"llguidance": metadata.version("llguidance")}
    write_report(f"{name}-vllm" if peer else name, figures, args.out, args.seed, **versions)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the cost of schemas for this engine."""
    async with engine_of(args.model) as engine:
        run = GuidedTurns(engine, args.seed)
        await run.turn(ROWS, ROWS)  # warms it up
        return {
            "rows": ROWS,
            "fields": FIELDS,
            "every_row": await run.compare(ROWS, ROWS, args.turns),
            "one_row": await run.compare(ROWS, 1, args.single_turns),
            "first_token": await run.first_tokens(args.schemas),
        }


async def versus(model: str, turns: int, seed: int, peer: Vllm) -> dict[str, Any]:
    """Return the engine's speed relative to the peer; each row has its own schema."""
    async with engine_of(model) as engine:
        run, ours, theirs = GuidedTurns(engine, seed), [], []
        for _ in range(turns + 1):
            schemas = run.schemas(ROWS)
            requests = [run.request(OUTPUT, grammar_text(schema)) for schema in schemas]
            ours.append((await run.all_of(requests)).figures())
            theirs.append(peer.run_pass(requests, schemas))
    ours, theirs = ours[1:], theirs[1:]  # the first warms them up
    rates = [[one["output_tokens"] / one["seconds"] for one in side] for side in (ours, theirs)]
    return {
        "rows": ROWS,
        "fields": FIELDS,
        "engine": {"output_tokens_per_second": round(statistics.median(rates[0]), 1), "turns": ours},
        "vllm": {"output_tokens_per_second": round(statistics.median(rates[1]), 1), "turns": theirs},
    } | by_turns([1 / rate for rate in rates[0]], [1 / rate for rate in rates[1]])


def engine_of(model: str) -> AbstractAsyncContextManager[AsyncEngine]:
    return running_engine(model, vocabulary=lambda: token_bytes(model), max_num_seqs=ROWS)


class GuidedTurns:
    """Passes through one engine; all prompts and schemas are different."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self._engine = engine
        self._draw = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._next_id = 0

    async def compare(self, rows: int, guided: int, turns: int) -> dict[str, Any]:
        """Return the slowdown of a pass by schemas, as a whole and for its decode steps."""
        pairs = [await self.turn(rows, guided) for _ in range(turns)]
        return {
            "slower": _slower([(one.seconds, other.seconds) for one, other in pairs]),
            "slower_processor": _slower([(one.processor, other.processor) for one, other in pairs]),
            "slower_steps": _slower([(one.step, other.step) for one, other in pairs]),
            "slower_turns": [round(one.seconds / other.seconds - 1, 4) for one, other in pairs],
            "step_ms": round(1e3 * statistics.median(one.step for one, _ in pairs), 2),
            "step_ms_without": round(1e3 * statistics.median(other.step for _, other in pairs), 2),
            "tokens_per_second": round(statistics.median(one.tokens / one.seconds for one, _ in pairs), 1),
            "output_tokens": sum(one.tokens for one, _ in pairs),
        }

    async def turn(self, rows: int, guided: int) -> tuple["GuidedPass", "GuidedPass"]:
        """Run a pass with schemas, and one without that has the same number of tokens per row."""
        grammars = [grammar_text(schema) for schema in self.schemas(guided)] + [""] * (rows - guided)
        one = await self.all_of([self.request(OUTPUT, grammar) for grammar in grammars])
        other = await self.all_of([self.request(count) for count in one.counts])
        assert one.tokens == other.tokens
        return one, other

    async def first_tokens(self, schemas: int) -> dict[str, Any]:
        """Return the delay of a single request's first token by a new schema, in milliseconds.

        Requests with and without a schema take turns.
        """
        later, without = [], []
        for _ in range(schemas):
            one = await self.all_of([self.request(1, grammar_text(any_schema(self._draw)))])
            other = await self.all_of([self.request(1)])
            later.append(1e3 * (one.seconds - other.seconds))
            without.append(1e3 * other.seconds)
        median, most, all_but_few = np.quantile(later, (0.5, 0.95, 0.99))
        return {
            "schemas": schemas,
            "without_ms": round(statistics.median(without), 2),
            "later_ms": round(float(median), 2),
            "later_ms_95": round(float(most), 2),
            "later_ms_99": round(float(all_but_few), 2),
        }

    def schemas(self, number: int) -> list[Schema]:
        return [schema_of_fields(self._draw, FIELDS) for _ in range(number)]

    def request(self, tokens: int, grammar: str = "") -> EngineRequest:
        self._next_id += 1
        prompt = self._tokens.integers(0, self._engine.info.vocab_size, PROMPT).tolist()
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        guide = OutputGuide(grammar=grammar) if grammar else None
        return EngineRequest(self._next_id, prompt, [], sampling, guide=guide)

    async def all_of(self, requests: list[EngineRequest]) -> "GuidedPass":
        """Submit all requests and wait for the last token. Raises RuntimeError if one failed."""
        counts, steps = {request.request_id: 0 for request in requests}, []
        used, began, unfinished = cpu_seconds(self._engine.pid), time.perf_counter(), len(requests)
        self._engine.add(requests)
        async for output in self._engine.steps():
            if output.errors:
                raise RuntimeError(next(iter(output.errors.values())))
            for request_id, count in zip(output.request_ids, output.counts, strict=True):
                counts[request_id] += count
            if len(output.request_ids) == len(requests):
                steps += [seconds for seconds, _ in output.stats.step_seconds]
            unfinished -= sum(map(bool, output.finish))
            if not unfinished:
                break
        seconds, processor = time.perf_counter() - began, cpu_seconds(self._engine.pid) - used
        return GuidedPass(seconds, processor, list(counts.values()), steps)


class GuidedPass:
    """A pass of requests submitted at once: wall seconds and the core's processor seconds."""

    def __init__(self, seconds: float, processor: float, counts: list[int], steps: list[float]) -> None:
        self.seconds, self.processor, self.counts = seconds, processor, counts
        self.tokens = sum(counts)
        self.step = statistics.median(steps) if steps else 0.0  # of those that gave each request a token

    def figures(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 2), "output_tokens": self.tokens}


def _slower(pairs: Sequence[tuple[float, float]]) -> float:
    return round(statistics.median(one / other for one, other in pairs) - 1, 4)


if __name__ == "__main__":
    main()
