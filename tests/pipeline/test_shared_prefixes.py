"""Each of fifty system prompts is computed about once, though the cache holds two of them: by
`usage` in the results.
"""

import json
import random
from itertools import takewhile
from pathlib import Path

import pytest

from tests.pipeline.results import read_results
from tests.support.commands import run_pipeline
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

SYSTEMS, LINES = 50, 400
BLOCK_TOKENS = 16
# Keys and values, 4 layers, 3 heads of 32 numbers of 4 bytes
BLOCK_BYTES = BLOCK_TOKENS * 2 * 4 * 3 * 32 * 4


def chat(system: int, number: int) -> list[dict[str, str]]:
    system_prompt = f"You are assistant number {system}. " + f"Speak in {system} words, think of {system} things. " * 8
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": f"What is {number} + 3?"}]


def common(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@pytest.mark.proof
def test_a_run_finds_nearly_all_that_its_lines_share(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    systems = [draw.randrange(SYSTEMS) for _ in range(LINES)]
    chats = [chat(system, number) for number, system in enumerate(systems)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with open(source, "w") as file:
        for number, messages in enumerate(chats):
            body = {"model": "demo", "messages": messages, "max_tokens": draw.randint(2, 12), "temperature": 0}
            file.write(
                json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
                + "\n"
            )
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    prompts = tokenizer.encode([tokenizer.render(messages) for messages in chats], special_tokens=False)
    blocks = [
        min(common(prompts[number], other) for other, same in zip(prompts, systems, strict=True) if same == system)
        // BLOCK_TOKENS
        for number, system in enumerate(systems)
    ]
    bytes_of_two = (2 * max(blocks) + 1) * BLOCK_BYTES
    flags = ("--dtype", "float32", "--block-size", BLOCK_TOKENS, "--kv-cache-memory-bytes", bytes_of_two)
    done = run_pipeline("run-batch", source, "--output-file", output, *flags)
    assert done.returncode == 0, done.stderr
    usages = [result["response"]["body"]["usage"] for result in read_results(output)]
    assert [usage["prompt_tokens"] for usage in usages] == [len(prompt) for prompt in prompts]
    found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    firsts = {system: number for number, system in reversed(list(enumerate(systems)))}
    possible = BLOCK_TOKENS * (sum(blocks) - sum(blocks[number] for number in firsts.values()))
    assert found >= 0.95 * possible, f"{found / possible:.1%} of what is possible, seed {seed}"
