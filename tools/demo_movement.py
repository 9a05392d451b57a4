"""How far the logits of the demo model move when the same tokens are computed in another shape,
order or precision.
"""

import copy
import random
from collections.abc import Iterator

import torch

from tools.demo_greedy import answer_ids, prompt_ids
from tools.demo_tasks import question

BATCH = 64
BATCHES = 6
CHUNKS = (1, 7, 64)
FEWER = 8

Row = tuple[list[int], int]


def largest_movement(model, tokenizer, seed: int) -> float:
    """Over held-out questions, the largest change of any logit at a place where a token of the
    answer is chosen.
    """
    largest = 0.0
    for name, moved in movements(model, tokenizer, seed):
        print(f"logits moved by {name}: at most {moved.max():.3f}, on average {moved.mean():.4f}", flush=True)
        largest = max(largest, moved.max().item())
    return largest


@torch.inference_mode()
def movements(model, tokenizer, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    rng = random.Random(f"movement {seed}")
    rows = [answered_row(tokenizer, rng) for _ in range(BATCH * BATCHES)]
    alone = [logits_alone(model, row) for row in rows]
    yield f"padded batches of {BATCH}", difference(alone, logits_in_batches(model, rows))
    for chunk in CHUNKS:
        chunked = [logits_in_chunks(model, row, chunk) for row in rows[::FEWER]]
        yield f"chunks of {chunk} tokens", difference(alone[::FEWER], chunked)
    reordered = with_reordered_channels(model, rng)
    yield "another order of the channels", difference(alone, [logits_alone(reordered, row) for row in rows])
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    yield "attention without fused kernels", difference(alone, [logits_alone(plain, row) for row in rows])
    precise = copy.deepcopy(model).float()
    yield "float32 arithmetic", difference(alone, [logits_alone(precise, row) for row in rows])


def answered_row(tokenizer, rng: random.Random) -> Row:
    """The tokens of a question with its answer, and how many of the last logits choose a token of
    the answer.
    """
    asked = question(rng, held_out=True)
    answer = answer_ids(tokenizer, asked.answer)
    return prompt_ids(tokenizer, asked.messages) + answer[:-1], len(answer)


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> torch.Tensor:
    return (torch.cat(one) - torch.cat(other)).abs()


def logits_alone(model, row: Row) -> torch.Tensor:
    ids, answered = row
    return model(torch.tensor([ids]), logits_to_keep=answered).logits[0].float()


def logits_in_batches(model, rows: list[Row]) -> list[torch.Tensor]:
    found = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        length = max(len(ids) for ids, _ in batch)
        inputs = torch.tensor([[0] * (length - len(ids)) + ids for ids, _ in batch])
        mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids, _ in batch])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(inputs, attention_mask=mask, position_ids=positions).logits
        found += [logits[index, -answered:].float() for index, (_, answered) in enumerate(batch)]
    return found


def logits_in_chunks(model, row: Row, chunk: int) -> torch.Tensor:
    ids, answered = row
    cache, found = None, []
    for start in range(0, len(ids), chunk):
        output = model(torch.tensor([ids[start : start + chunk]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[0])
    return torch.cat(found)[-answered:].float()


def with_reordered_channels(model, rng: random.Random):
    """The same function with its hidden channels shuffled, so that every sum over them is taken in
    another order.
    """
    shuffled = copy.deepcopy(model)
    channels = torch.tensor(rng.sample(range(model.config.hidden_size), model.config.hidden_size))
    inner = torch.tensor(rng.sample(range(model.config.intermediate_size), model.config.intermediate_size))
    for name, weight in shuffled.named_parameters():
        if "norm" in name:
            weight.copy_(weight[channels].clone())
        elif "down_proj" in name:
            weight.copy_(weight[channels][:, inner])
        elif "gate_proj" in name or "up_proj" in name:
            weight.copy_(weight[inner][:, channels])
        elif "o_proj" in name:
            weight.copy_(weight[channels])
        else:
            weight.copy_(weight[:, channels])
    return shuffled
