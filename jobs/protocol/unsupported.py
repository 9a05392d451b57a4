"""Parameters that OpenAI or vLLM know and that cannot be honored here: only values that change
nothing pass.
"""

from collections.abc import Callable
from typing import Any

from jobs.protocol import fields

Check = Callable[[Any, str], None]


def refuse_unsupported(body: dict[str, Any], chat: bool) -> None:
    """Raise `ApiError` 400 for the first parameter that would have to be honored."""
    for name, value in body.items():
        check = _CHECKS.get(name)
        if check is not None and value is not None:
            check(value, name)
    if body.get("add_special_tokens") is not None:  # a rendered chat has them
        _default(not chat)(body["add_special_tokens"], "add_special_tokens")


def _empty(value: Any, param: str) -> None:
    if value or type(value) not in (str, list, dict, bool):
        fields.unsupported(param, "must be left out: this cannot be done yet.")


def _default(neutral: Any) -> Check:
    def check(value: Any, param: str) -> None:
        if type(value) is not type(neutral) or value != neutral:
            shown = str(neutral).lower() if isinstance(neutral, bool) else repr(neutral)
            fields.unsupported(param, f"must be {shown}.")

    return check


def _plain_text(value: Any, param: str) -> None:
    if fields.mapping(value, param).get("type") != "text":
        fields.unsupported(f"{param}.type", "must be 'text'.")


def _no_choice(value: Any, param: str) -> None:
    if value not in ("none", "auto"):
        fields.unsupported(param, "must be left out: this cannot be done yet.")


def _text_alone(value: Any, param: str) -> None:
    if value != ["text"]:
        fields.unsupported(param, "must be ['text'].")


def _code(_value: Any, param: str) -> None:
    fields.unsupported(
        param,
        "is code and cannot come with a request: the model's own is used, or that of the worker's --chat-template.",
    )


def _template_values(value: Any, param: str) -> None:
    if value != {}:
        fields.unsupported(param, "must be left out: a template's variables are the worker's own.")


_CHECKS: dict[str, Check] = {
    "chat_template": _code,
    "chat_template_kwargs": _template_values,
    "logits_processors": _empty,
    "tools": _empty,
    "tool_choice": _no_choice,
    "functions": _empty,
    "function_call": _no_choice,
    "response_format": _plain_text,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "guided_whitespace_pattern": _empty,
    "guided_decoding_backend": _empty,
    "structural_tag": _empty,
    "suffix": _empty,
    "audio": _empty,
    "modalities": _text_alone,
    "prediction": _empty,
    "web_search_options": _empty,
    "documents": _empty,
    "prompt_embeds": _empty,
    "allowed_token_ids": _empty,
    "cache_salt": _empty,
    "vllm_xargs": _empty,
    "mm_processor_kwargs": _empty,
    "truncation_side": _default("left"),
    "reasoning": _empty,
    "reasoning_effort": _empty,
    "include_reasoning": _default(True),
    "thinking": _empty,
    "thinking_token_budget": _empty,
    "verbosity": _default("medium"),
    "repetition_detection": _empty,
    "logprob_token_ids": _empty,
    "detokenize": _default(True),
    "spaces_between_special_tokens": _default(True),
    "return_token_ids": _default(False),
    "return_tokens_as_token_ids": _default(False),
    "use_beam_search": _empty,
    "length_penalty": _default(1.0),
    "include_stop_str_in_output": _default(False),
    "continue_final_message": _default(False),
    "add_generation_prompt": _default(True),
}
