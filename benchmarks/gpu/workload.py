"""The requests of the engine's rows: lengths and tokens are from Python's `random`, so that another
engine can run exactly the same requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from workers.engine.messages.core import EngineRequest, SamplingParams

TOKEN_LIMIT = 10_000  # prompt tokens lie below it, as in nano-vllm's benchmark


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the number of output tokens of each."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lengths)

    def requests(self, first_id: int = 0) -> list[EngineRequest]:
        """Return greedy requests that do not end before their length."""
        return [
            EngineRequest(first_id + number, prompt, [], SamplingParams(length, temperature=0.0, ignore_eos=True))
            for number, (prompt, length) in enumerate(zip(self.prompts, self.output_lengths, strict=True))
        ]

    def with_other_prompts(self, seed: int) -> "Workload":
        """Return a workload of the same lengths with other prompts, for an empty prefix cache."""
        draw, limit = Random(seed), max(map(max, self.prompts))
        return Workload([[draw.randint(0, limit) for _ in prompt] for prompt in self.prompts], self.output_lengths)


def drawn(requests: int, shortest: int, longest: int, seed: int = 0, token_limit: int = TOKEN_LIMIT) -> Workload:
    """Return prompts and answers of `shortest` to `longest` tokens.

    `drawn(256, 100, 1024)` is nano-vllm's benchmark, call for call.
    """
    draw = Random(seed)
    prompts = [[draw.randint(0, token_limit) for _ in range(draw.randint(shortest, longest))] for _ in range(requests)]
    return Workload(prompts, [draw.randint(shortest, longest) for _ in range(requests)])


def even(
    requests: int, prompt_length: int, output_length: int, seed: int = 0, token_limit: int = TOKEN_LIMIT
) -> Workload:
    """Return prompts of one length, with answers of another length."""
    draw = Random(seed)
    prompts = [[draw.randint(0, token_limit) for _ in range(prompt_length)] for _ in range(requests)]
    return Workload(prompts, [output_length] * requests)


def staircase(steps: Mapping[int, int], prompt_length: int, seed: int = 1, token_limit: int = TOKEN_LIMIT) -> Workload:
    """Return answers for `steps[size]` decode steps of `size` rows each, the largest first."""
    flat = even(max(steps), prompt_length, 1, seed, token_limit)
    return Workload(
        flat.prompts, [1 + sum(steps[size] for size in steps if size > number) for number in range(max(steps))]
    )
