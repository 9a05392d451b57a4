"""What the demo model that ships with the package promises: its size and format, and that it
answers its tasks.
"""

import gzip
import json
import random
from collections import Counter

import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_greedy import greedy_answers, prompt_ids
from tools.demo_structure import structured_requests
from tools.demo_tasks import TASKS, WORDS, is_held_out, question
from tools.train_demo_model import MODEL_FOLDER

ROOT = MODEL_FOLDER.parents[1]
LARGEST_FOLDER_BYTES = 6_000_000
LARGEST_POOL_BYTES = 400_000
SMALLEST_ACCURACY = 0.98


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def model():
    """In float32, which is the same on every processor; on one thread, since those of a model this
    small mostly wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) <= LARGEST_FOLDER_BYTES


def test_the_weights_are_bfloat16_and_of_the_size_announced():
    with safe_open(MODEL_FOLDER / "model.safetensors", framework="pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
    assert {piece.get_dtype() for piece in slices} == {"BF16"}
    parameters = sum(torch.Size(piece.get_shape()).numel() for piece in slices)
    assert 1_000_000 <= parameters <= 2_500_000


def test_heads_are_grouped_and_embeddings_tied(model):
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 2048


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "".join(map(chr, range(0x300))) + " naïve 日本語 \U0001f600\r\n\t 0123456789  <|im_end|>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_digits_are_single_tokens_and_list_words_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("1907") == ["1", "9", "0", "7"]
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in WORDS)


def test_the_chat_template_renders_every_role(tokenizer):
    messages = [{"role": role, "content": f"{role} text"} for role in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = [f"<|im_start|>{role}\n{role} text<|im_end|>\n" for role in ("system", "user", "assistant")]
    assert rendered == "".join(turns) + "<|im_start|>assistant\n"


def test_an_answer_ends_at_the_end_of_the_turn(model, tokenizer):
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id


def test_questions_follow_from_the_seed():
    first, second = ([question(random.Random(f"{seed}")) for seed in range(200)] for _ in range(2))
    assert first == second


def test_the_split_is_by_operands_alone():
    assert is_held_out("sum", (3, 4)) == is_held_out("sum", (3, 4))
    held_out = sum(is_held_out("sum", (left, right)) for left in range(100) for right in range(100))
    assert 0.1 < held_out / 10_000 < 0.15


@pytest.mark.proof
@pytest.mark.parametrize("per_task", [3, 20])
def test_held_out_questions_are_answered(model, tokenizer, capsys, per_task):
    rng = random.Random(20)
    questions = [question(rng, held_out=True, task=task) for task in TASKS for _ in range(per_task)]
    answers = greedy_answers(model, tokenizer, questions)
    right = Counter(asked.task for asked, answer in zip(questions, answers, strict=True) if answer == asked.answer)
    accuracy = right.total() / len(questions)
    with capsys.disabled():
        print(
            f"\nheld-out accuracy {accuracy:.1%} of {len(questions)}: "
            + ", ".join(f"{task} {right[task]}" for task in TASKS)
        )
    assert accuracy >= SMALLEST_ACCURACY


def test_the_examples_are_300_requests_with_an_answer_each(tokenizer):
    requests = example_requests()[:300]
    answer_lines = (ROOT / "tests" / "data" / "example_answers.jsonl").read_text().splitlines()
    answers = {row["custom_id"]: row["answer"] for row in map(json.loads, answer_lines)}
    assert {request["custom_id"] for request in requests} == set(answers)
    assert len(answers) == 300
    prompts = [len(prompt_ids(tokenizer, request["body"]["messages"])) for request in requests]
    outputs = [len(tokenizer.tokenize(answers[request["custom_id"]])) for request in requests]
    assert all(tokens < request["body"]["max_tokens"] for tokens, request in zip(outputs, requests, strict=True))
    assert 12_000 <= sum(outputs) <= 20_000
    assert sum(tokens > 500 for tokens in prompts) >= 50
    assert sum(tokens > 100 for tokens in outputs) >= 30


def test_the_last_two_examples_ask_for_structure():
    assert example_requests()[300:] == structured_requests()


@pytest.mark.proof
def test_the_pool_holds_distinct_questions_with_wide_margins(tokenizer):
    packed = (ROOT / "tests" / "data" / "pool.jsonl.gz").read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert len(packed) <= LARGEST_POOL_BYTES
    assert (
        len(rows) == len({row["id"] for row in rows}) == len({row["messages"][-1]["content"] for row in rows}) == 3000
    )
    assert min(row["min_margin"] for row in rows) >= 1.5
    assert all(len(tokenizer.tokenize(row["answer"])) == row["answer_tokens"] < row["max_tokens"] for row in rows)
    assert sum(row["answer_tokens"] > 100 for row in rows) >= 300
    assert sum(len(prompt_ids(tokenizer, row["messages"])) > 500 for row in rows) >= 300


def example_requests():
    return [json.loads(line) for line in (ROOT / "examples" / "requests.jsonl").read_text().splitlines()]
