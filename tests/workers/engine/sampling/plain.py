"""The definition of every stage of sampling, row by row in plain Python and double precision, to
compare with.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.workers.engine.sampling.definition import noise
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import NO_TOKEN, NOT_FINITE
from workers.engine.sampling.draw import TorchDraw
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampler

NOT_FINITE_ROWS = [
    ([torch.nan], NOT_FINITE),
    ([torch.inf], NOT_FINITE),
    ([torch.nan, 1.0], NOT_FINITE),
    ([torch.inf, 1.0], NOT_FINITE),
    ([torch.inf, torch.nan, -torch.inf], NOT_FINITE),
    ([-torch.inf], NO_TOKEN),
]
"""The logits of a row, repeated, and what comes in the place of its token."""


@dataclass(frozen=True)
class SampledRow:
    """One request at one step."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=99))


def sampled_rows(rows: Sequence[SampledRow], vocab: int, device: torch.device | str = "cpu") -> SampledRows:
    """Row i in slot 2 i + 1, the other slots and the ends of the table full of other tokens."""
    columns = max(len(row.prompt) + len(row.output) for row in rows) + 5
    table = torch.randint(
        0, vocab, (2 * len(rows) + 1, columns), dtype=torch.int32, generator=torch.Generator().manual_seed(5)
    )
    for number, row in enumerate(rows):
        tokens = row.prompt + row.output
        table[2 * number + 1, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    prompts = np.array([len(row.prompt) for row in rows], np.int64)
    outputs = np.array([len(row.output) for row in rows], np.int64)
    return SampledRows(np.arange(1, 2 * len(rows), 2, dtype=np.int32), prompts, prompts + outputs, table.to(device))


def sampler_for(rows: Sequence[SampledRow], vocab: int, eos: Sequence[int] = ()) -> Sampler:
    slots = 2 * len(rows) + 1
    sampler = Sampler(slots, vocab, TorchDraw(slots, vocab), eos)
    for number, row in enumerate(rows):
        sampler.set(2 * number + 1, row.params)
    return sampler


def plain_logits(logits: Tensor, row: SampledRow, eos: Sequence[int] = ()) -> NDArray[np.float64]:
    """Float64 [vocab]: bias, allowed tokens, min_tokens, bad words and penalties."""
    z, params = logits.double().numpy().copy(), row.params
    for token, bias in params.logit_bias:
        z[token] += bias
    if params.allowed_token_ids:
        z[[token for token in range(len(z)) if token not in params.allowed_token_ids]] = -np.inf
    if len(row.output) < params.min_tokens:
        z[[*eos, *params.stop_token_ids]] = -np.inf
    for word in params.bad_words:
        rest = list(word[:-1])
        if len(rest) <= len(row.output) and row.output[len(row.output) - len(rest) :] == rest:
            z[word[-1]] = -np.inf
    for token in {*row.prompt, *row.output}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token, count in Counter(row.output).items():
        z[token] -= params.frequency_penalty * count + params.presence_penalty
    return z


def plain_kept(z: NDArray[np.float64], params: SamplingParams) -> NDArray[np.bool_]:
    """Which tokens of logits z [vocab] may be drawn: min_p, top-k and top-p by sorting
    everything.
    """
    z = z / params.temperature
    kept = np.exp(z - z.max()) >= params.min_p
    if params.top_k:
        kept &= z >= np.sort(z)[::-1][min(params.top_k, len(z)) - 1]
    weights = np.where(kept, np.exp(z - z.max()), 0)
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order] / weights.sum()
    kept[order[1:][(np.cumsum(ordered) - ordered)[1:] >= params.top_p]] = False
    return kept


def plain_probabilities(z: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """What a draw from logits z [vocab] follows."""
    weights = np.where(plain_kept(z, params), np.exp((z - z.max()) / params.temperature), 0)
    return weights / weights.sum()


def plain_token(z: NDArray[np.float64], row: SampledRow) -> int:
    """The largest of logit / temperature + noise among the tokens kept, or the largest logit."""
    params = row.params
    if params.temperature == 0:
        return int(z.argmax())
    kept = np.nonzero(plain_kept(z, params))[0].tolist()
    index = len(row.output)
    return max(kept, key=lambda token: z[token] / params.temperature + noise(params.seed, params.choice, index, token))


def random_row(draw: random.Random, vocab: int, **asked: object) -> SampledRow:
    """A request whose output repeats itself, and which asks for a random part of all there is
    besides `asked`.
    """
    few = draw.sample(range(vocab), min(vocab, 12))
    output = draw.choices(few, k=draw.choice([0, 1, 2, 7, 40]))
    words = [tuple(draw.choices(few, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 6))]
    words += [(*output[len(output) - length :], draw.choice(few)) for length in range(4) if length <= len(output)]
    others = sorted(set(range(vocab)) - {*few})
    allowed = (*few[:2], *draw.sample(others, len(others) // 4 + 1)) if others else ()
    some = {
        "max_tokens": 99,
        "temperature": draw.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": draw.choice([0, 3, 40]),
        "top_p": draw.choice([1.0, 0.9, 0.4]),
        "min_p": draw.choice([0.0, 0.02, 0.3]),
        "repetition_penalty": draw.choice([1.0, 1.3, 0.8]),
        "presence_penalty": draw.choice([0.0, 1.5, -0.7]),
        "frequency_penalty": draw.choice([0.0, 0.6, -0.2]),
        "min_tokens": draw.choice([0, 3, 60]),
        "stop_token_ids": tuple(draw.sample(few, 2)),
        "logit_bias": draw.choice([(), tuple((token, draw.uniform(-9, 9)) for token in draw.sample(range(vocab), 5))]),
        "allowed_token_ids": draw.choice([(), (), allowed]),
        "bad_words": draw.choice([(), tuple(words)]),
        "logprobs": draw.choice([-1, -1, 0, 1, 7]),
    }
    params = SamplingParams(seed=draw.getrandbits(64), choice=draw.randint(0, 3), **(some | asked))
    return SampledRow(draw.choices(range(vocab), k=draw.choice([1, 5, 30])), output, params)


def not_finite_rows(vocab: int) -> Tensor:
    return torch.stack([torch.tensor(values).repeat(vocab)[:vocab] for values, _ in NOT_FINITE_ROWS])
