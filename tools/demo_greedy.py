"""Greedy answers of a chat model in plain transformers, in batches, for the checks of the demo
model.
"""

import torch

from tools.demo_tasks import Question


def greedy_answers(model, tokenizer, questions: list[Question], batch: int = 64) -> list[str]:
    """Answers in the order of the questions.

    Batches hold answers of similar length and end with the longest right one.
    """
    lengths = [len(answer_ids(tokenizer, asked.answer)) for asked in questions]
    order = sorted(range(len(questions)), key=lengths.__getitem__)
    answers = [""] * len(questions)
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        prompts = [prompt_ids(tokenizer, questions[index].messages) for index in members]
        for index, answer in zip(members, _batch_answers(model, tokenizer, prompts, lengths[members[-1]]), strict=True):
            answers[index] = answer
    return answers


def prompt_ids(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answer_ids(tokenizer, answer: str) -> list[int]:
    """The tokens the model is to write: the answer and the mark that ends it."""
    return tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def _batch_answers(model, tokenizer, prompts: list[list[int]], most_tokens: int) -> list[str]:
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = model.generate(**padded, do_sample=False, max_new_tokens=most_tokens)
    return tokenizer.batch_decode(output[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
