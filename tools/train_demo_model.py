"""Train the demo model that ships in workers/demo_model: tokenizer and weights, seeded, on the CPU.

    python -m tools.train_demo_model

The weights live in bfloat16 while training and the optimizer keeps float32 copies, so what is
trained is what ships. Batches are drawn from the seed and the step alone; a run that stopped goes
on from its checkpoint with --resume.

The weights in the repository had less than the default run: about an hour on one shared core, 1,400
steps of 48 questions at the full rate and 1,250 of 32 while it decayed. On the way the end of an
answer was given its weight, sorting words its working, and picks and sorts got shorter; afterwards
counts and unnumbered lists were cut to the lengths that the model had learned. The vocabulary dates
from the tasks as they were first written, so a new run finds slightly different tokens.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AttentionInterface, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.demo_greedy import answer_ids, greedy_answers, prompt_ids
from tools.demo_tasks import INSTRUCTIONS, TASKS, WORDS, question

MODEL_FOLDER = Path(__file__).parents[1] / "workers" / "demo_model"
VOCABULARY = 1024
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
QUESTIONS_PER_STEP = 48
TOKENS_PER_MICRO_BATCH = 4096
LONGEST_TO_SHORTEST = 1.4
WARM_UP_STEPS = 150
CURRICULUM_STEPS = 800
DECAY_SHARE = 0.5
WEIGHT_OF_THE_END = 3.0


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        write_tokenizer(options.folder, options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = new_model(tokenizer)
    train(model, tokenizer, options)
    save_model(model, options.folder)
    print_accuracy(model, tokenizer, options.seed, questions_per_task=100)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=MODEL_FOLDER, help="where the model is written (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and questions (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument(
        "--report-every", type=int, default=500, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("demo_model.checkpoint"), help="file of the training state"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


def write_tokenizer(folder: Path, seed: int) -> None:
    """A byte-level BPE: all 256 bytes are in its alphabet, so any text survives, and every digit
    stays alone.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(seed), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Questions, and the words of the lists often enough that each becomes one token."""
    rng = random.Random(seed)
    for _ in range(3000):
        drawn = question(rng, system="")
        yield drawn.messages[-1]["content"]
        yield drawn.answer
    for _ in range(60):
        yield " ".join(["", *rng.sample(WORDS, len(WORDS))])
    for _ in range(30):
        yield from INSTRUCTIONS


def new_model(tokenizer) -> LlamaForCausalLM:
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=ends[1],
        dtype="bfloat16",
    )
    AttentionInterface.register("grouped", grouped_attention)
    model = LlamaForCausalLM._from_config(config, attn_implementation="grouped").to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    return model


def grouped_attention(module, query, key, value, attention_mask, scaling, **_):
    """Causal attention by plain products: on the CPU its bfloat16 backward pass takes a third of
    the fused one's time.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    grouped = (query * scaling).reshape(batch, kv_heads, -1, width)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, kv_heads, -1, length, length)
    weights = (scores + torch.full((length, length), -torch.inf, dtype=scores.dtype).triu(1)).softmax(-1)
    output = weights.view(batch, kv_heads, -1, length) @ value
    return output.view(batch, heads, length, width).transpose(1, 2), None


def train(model: LlamaForCausalLM, tokenizer, options: argparse.Namespace) -> None:
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizers = new_optimizers(model, masters)
    first_step = restore(options.checkpoint, masters, parameters, optimizers) if options.resume else 0
    began, tokens, losses = time.monotonic(), 0, []
    for step in range(first_step, options.steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate_factor(step, options.steps)
        micro_batches = step_batches(tokenizer, options.seed, step)
        targets_in_step = sum(int((targets >= 0).sum()) for _, targets in micro_batches)
        loss_sum = 0.0
        for inputs, targets in micro_batches:
            loss = answer_loss(model, inputs, targets) / targets_in_step
            loss.backward()
            loss_sum += loss.item()
            tokens += inputs.numel()
        update(optimizers, masters, parameters)
        losses.append(loss_sum)
        if (step + 1) % 50 == 0:
            speed = tokens / (time.monotonic() - began)
            print(f"step {step + 1}: loss {sum(losses) / len(losses):.4f}, {speed:.0f} tokens/s", flush=True)
            losses = []
        if (step + 1) % options.report_every == 0:
            save_checkpoint(options.checkpoint, masters, optimizers, step + 1)
            print_accuracy(model, tokenizer, options.seed + step, questions_per_task=10)


def new_optimizers(model: LlamaForCausalLM, masters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, which here learns in fewer steps than AdamW, and AdamW
    for the rest.
    """
    names = [name for name, _ in model.named_parameters()]
    in_layers = [master.ndim == 2 and "layers" in name for name, master in zip(names, masters, strict=True)]
    matrices = [master for master, inside in zip(masters, in_layers, strict=True) if inside]
    others = [master for master, inside in zip(masters, in_layers, strict=True) if not inside]
    muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)]


def rate_factor(step: int, steps: int) -> float:
    """Warm-up, a level part, then a linear decay to nothing."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def step_batches(tokenizer, seed: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of one step, sorted by length and cut into micro-batches of similar rows,
    so that little is padding.
    """
    rng = random.Random(f"{seed} {step}")
    size = min(1.0, 0.25 + step / CURRICULUM_STEPS)
    rows = []
    for _ in range(QUESTIONS_PER_STEP):
        drawn = question(rng, size=size)
        prompt, answer = prompt_ids(tokenizer, drawn.messages), answer_ids(tokenizer, drawn.answer)
        rows.append((prompt + answer[:-1], [-1] * (len(prompt) - 1) + answer))
    rows.sort(key=lambda row: len(row[0]))
    groups, group = [], []
    for row in rows:
        too_many = (len(group) + 1) * len(row[0]) > TOKENS_PER_MICRO_BATCH
        if group and (too_many or len(row[0]) > LONGEST_TO_SHORTEST * len(group[0][0])):
            groups.append(group)
            group = []
        group.append(row)
    return [padded(group) for group in [*groups, group]]


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = len(rows[-1][0])
    inputs = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    targets = torch.tensor([ids + [-1] * (length - len(ids)) for _, ids in rows])
    return inputs, targets


def answer_loss(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    answered = targets >= 0
    states = model.model(input_ids=inputs, use_cache=False).last_hidden_state[answered]
    weights = torch.ones(VOCABULARY)
    weights[model.config.eos_token_id[0]] = WEIGHT_OF_THE_END
    return F.cross_entropy(F.linear(states, model.lm_head.weight).float(), targets[answered], weights, reduction="sum")


@torch.no_grad()
def update(
    optimizers: list[torch.optim.Optimizer], masters: list[torch.Tensor], parameters: list[torch.nn.Parameter]
) -> None:
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad.float()
        parameter.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    for master, parameter in zip(masters, parameters, strict=True):
        parameter.copy_(master)


def save_checkpoint(
    path: Path, masters: list[torch.Tensor], optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    unfinished = path.with_suffix(".new")
    torch.save(
        {"masters": masters, "optimizers": [optimizer.state_dict() for optimizer in optimizers], "step": step},
        unfinished,
    )
    os.replace(unfinished, path)


@torch.no_grad()
def restore(path: Path, masters: list[torch.Tensor], parameters: list, optimizers: list[torch.optim.Optimizer]) -> int:
    state = torch.load(path)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for master, parameter, saved in zip(masters, parameters, state["masters"], strict=True):
        master.copy_(saved)
        parameter.copy_(saved)
    return state["step"]


def print_accuracy(model: LlamaForCausalLM, tokenizer, seed: int, questions_per_task: int) -> None:
    """Greedy accuracy on held-out questions, decoded with the attention that transformers brings
    along.
    """
    rng = random.Random(f"accuracy {seed}")
    questions = [question(rng, held_out=True, task=task) for task in TASKS for _ in range(questions_per_task)]
    model.set_attn_implementation("sdpa")
    answers = greedy_answers(model.eval(), tokenizer, questions)
    model.train().set_attn_implementation("grouped")
    right = Counter(asked.task for asked, answer in zip(questions, answers, strict=True) if answer == asked.answer)
    shares = ", ".join(f"{task} {right[task] / questions_per_task:.0%}" for task in TASKS)
    print(f"held-out accuracy {right.total() / len(questions):.1%}: {shares}", flush=True)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
