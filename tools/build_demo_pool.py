"""Build the example requests and the pool of checked questions from held-out questions that the
demo model gets right.

    python -m tools.build_demo_pool

Writes examples/requests.jsonl (OpenAI batch lines; the last two are not questions of these but ask
for answers with structure), tests/data/example_answers.jsonl (custom_id, answer) and
tests/data/pool.jsonl.gz (id, messages, answer, max_tokens, answer_tokens, min_margin).
Every question was answered alone, greedily, in bfloat16 by transformers: word for word right, and
at each token the best logit led the second by more than MOVEMENTS_TO_MARGIN times what another
batch shape or summation order moved a logit. answer_tokens leaves out the mark that ends an answer;
min_margin is that smallest lead.
"""

import argparse
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_greedy import answer_ids, prompt_ids
from tools.demo_movement import largest_movement
from tools.demo_structure import structured_requests
from tools.demo_tasks import LONG_ANSWER_TASKS, Question, long_system_prompt, question
from tools.train_demo_model import MODEL_FOLDER

ROOT = Path(__file__).parents[1]
MOVEMENTS_TO_MARGIN = 3
LONG_ANSWER_TOKENS = 100
LONG_PROMPT_TOKENS = 500


@dataclass(frozen=True)
class Shares:
    """How many questions of each kind a file holds, and among how many long system prompts the last
    kind is shared.
    """

    ordinary: int
    long_answers: int
    long_prompts: int
    shared_systems: int


EXAMPLES = Shares(ordinary=180, long_answers=45, long_prompts=75, shared_systems=5)
POOL = Shares(ordinary=2200, long_answers=400, long_prompts=400, shared_systems=20)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    movement = largest_movement(model, tokenizer, options.seed)
    margin = MOVEMENTS_TO_MARGIN * movement
    print(f"largest movement of a logit {movement:.3f}, smallest margin kept {margin:.3f}", flush=True)
    rows = checked_rows(model, tokenizer, drawn_rows(tokenizer, EXAMPLES, f"examples {options.seed}"), margin)
    write_examples(rows)
    seen = {row["messages"][-1]["content"] for row in rows}
    drawn = drawn_rows(tokenizer, POOL, f"pool {options.seed}", seen)
    write_pool(checked_rows(model, tokenizer, drawn, margin))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=MODEL_FOLDER, help="folder of the demo model (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser.parse_args()


def checked_rows(model, tokenizer, drawn: dict[str, tuple[int, Iterator[dict]]], margin: float) -> list[dict]:
    """Of each kind as many rows as wanted, skipping the questions that fail; prints how many were
    skipped and why.
    """
    kept: list[dict] = []
    outcomes: Counter[str] = Counter()
    for wanted, rows in drawn.values():
        enough = len(kept) + wanted
        while len(kept) < enough:
            row = next(rows)
            answer, row["min_margin"] = answer_alone(model, tokenizer, row)
            outcome = "wrong" if answer != row["answer"] else "narrow" if row["min_margin"] <= margin else "kept"
            outcomes[outcome] += 1
            if outcome == "kept":
                kept.append(row)
    print(
        f"{len(kept)} questions: {dict(outcomes)}, {sum(row['answer_tokens'] for row in kept)} answer tokens",
        flush=True,
    )
    return kept


@torch.inference_mode()
def answer_alone(model, tokenizer, row: dict) -> tuple[str, float]:
    """The greedy answer of a batch of one, and the smallest lead of its best logit over the
    second.
    """
    prompt = torch.tensor([prompt_ids(tokenizer, row["messages"])])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=row["max_tokens"],
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).float().topk(2, dim=-1).values
    answer = tokenizer.decode(output.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
    return answer, round((best[:, 0] - best[:, 1]).min().item(), 2)


def drawn_rows(
    tokenizer, shares: Shares, seed: str, seen: set[str] | None = None
) -> dict[str, tuple[int, Iterator[dict]]]:
    """For each kind of question how many are wanted and an endless supply of distinct ones."""
    seen = set() if seen is None else set(seen)
    rng = random.Random(seed)
    systems = [long_system_prompt(rng, rng.randint(28, 32)) for _ in range(shares.shared_systems)]

    def supply(kind: str) -> Iterator[dict]:
        supply_rng = random.Random(f"{seed} {kind}")
        while True:
            row = row_of(tokenizer, drawn_question(supply_rng, kind, systems))
            long_enough = {
                "ordinary": True,
                "long answer": row["answer_tokens"] > LONG_ANSWER_TOKENS,
                "long prompt": row["prompt_tokens"] > LONG_PROMPT_TOKENS,
            }
            if long_enough[kind] and row["messages"][-1]["content"] not in seen:
                seen.add(row["messages"][-1]["content"])
                yield row

    wanted = {"ordinary": shares.ordinary, "long answer": shares.long_answers, "long prompt": shares.long_prompts}
    return {kind: (count, supply(kind)) for kind, count in wanted.items()}


def drawn_question(rng: random.Random, kind: str, systems: list[str]) -> Question:
    if kind == "long prompt":
        return question(rng, held_out=True, system=rng.choice(systems))
    return question(rng, held_out=True, task=rng.choice(LONG_ANSWER_TASKS) if kind == "long answer" else None)


def row_of(tokenizer, asked: Question) -> dict:
    answer_tokens = len(answer_ids(tokenizer, asked.answer)) - 1
    return {
        "task": asked.task,
        "messages": asked.messages,
        "answer": asked.answer,
        "max_tokens": (answer_tokens // 32 + 2) * 32,
        "answer_tokens": answer_tokens,
        "prompt_tokens": len(prompt_ids(tokenizer, asked.messages)),
    }


def write_examples(rows: list[dict]) -> None:
    random.Random(len(rows)).shuffle(rows)
    requests, answers = [], []
    for place, row in enumerate(rows, 1):
        custom_id = f"example-{place:03d}"
        body = {"model": "demo", "messages": row["messages"], "max_tokens": row["max_tokens"], "temperature": 0}
        requests.append({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})
        answers.append({"custom_id": custom_id, "answer": row["answer"]})
    (ROOT / "examples" / "requests.jsonl").write_text(json_lines([*requests, *structured_requests()]))
    (ROOT / "tests" / "data" / "example_answers.jsonl").write_text(json_lines(answers))


def write_pool(rows: list[dict]) -> None:
    random.Random(len(rows)).shuffle(rows)
    columns = ("messages", "answer", "max_tokens", "answer_tokens", "min_margin")
    named = [
        {"id": f"{row['task']}-{place:04d}", **{name: row[name] for name in columns}}
        for place, row in enumerate(rows, 1)
    ]
    packed = gzip.compress(json_lines(named).encode(), compresslevel=9, mtime=0)
    (ROOT / "tests" / "data" / "pool.jsonl.gz").write_bytes(packed)
    long_answers = sum(row["answer_tokens"] > LONG_ANSWER_TOKENS for row in rows)
    long_prompts = sum(row["prompt_tokens"] > LONG_PROMPT_TOKENS for row in rows)
    margins = sorted(row["min_margin"] for row in rows)
    print(
        f"pool: {len(packed)} bytes, {long_answers} long answers, {long_prompts} long prompts, smallest margin"
        f" {margins[0]}"
    )
    print(f"margins: median {margins[len(margins) // 2]}, per task {dict(Counter(row['task'] for row in rows))}")


def json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
