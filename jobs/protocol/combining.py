"""Values of a call's parameters that depend on each other."""

from typing import Any

from jobs.protocol import fields
from jobs.protocol.format_parameters import settle_format
from jobs.protocol.prompts import settle_final_message
from jobs.protocol.service_tier import settle_tier
from jobs.protocol.template_variables import settle_effort
from jobs.protocol.tools import settle_tools

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def combine(values: dict[str, Any], chat: bool) -> None:
    """Resolve, in place, the values of parameters that depend on each other.

    Raise `ApiError` 400 for contradicting values.
    """
    _limit_tokens(values, chat)
    settle_tier(values)
    settle_format(values)
    if chat:
        _settle_logprobs(values)
        settle_tools(values)
        settle_effort(values)
        settle_final_message(values)
    else:
        for name in ("tools", "tool_choice"):
            values.pop(name, None)
    _settle_best_of(values)
    _check_stream(values)


def _limit_tokens(values: dict[str, Any], chat: bool) -> None:
    limit = values.pop("max_completion_tokens", values.get("max_tokens", None if chat else COMPLETION_MAX_TOKENS))
    least = values.get("min_tokens", 0)
    if limit is not None and least > limit:
        message = f"Invalid 'min_tokens': it must be at most 'max_tokens', which is {limit}, but is {least}."
        fields.fail(message, "min_tokens", "invalid_value")
    values["max_tokens"] = limit


def _settle_logprobs(values: dict[str, Any]) -> None:
    wanted, count = values.pop("logprobs", False), values.get("top_logprobs", 0)
    if count and not wanted:
        message = "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."
        fields.fail(message, "top_logprobs", None)
    values["logprobs"] = count if wanted else None


def _settle_best_of(values: dict[str, Any]) -> None:
    n = values.get("n", 1)
    best_of = values.setdefault("best_of", n)
    if best_of < n:
        fields.fail(
            "You requested that the server return more choices than it will generate (HINT: you must set 'n'"
            f" (currently {n}) to be at most 'best_of' (currently {best_of}), or omit either parameter if you don't"
            " specifically want to use them.)",
            "best_of",
            None,
        )


def _check_stream(values: dict[str, Any]) -> None:
    if not values.get("stream", False):
        if "stream_options" in values:
            message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            fields.fail(message, "stream_options", "invalid_value")
        return
    if values.get("prompt_logprobs") is not None:
        _not_streamed("The 'prompt_logprobs' parameter is", "prompt_logprobs")
    if values["best_of"] > values.get("n", 1):
        _not_streamed("Answers can be ranked only at their end: 'best_of' above 'n' is", "best_of")


def _not_streamed(what: str, param: str) -> None:
    fields.fail(f"{what} not allowed when 'stream' is enabled.", param, "invalid_value")
