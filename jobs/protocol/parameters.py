"""How a call wants its tokens drawn and where it wants them to end: each parameter's type, range
and size.
"""

from typing import Any

from jobs.protocol import fields

MOST_ANSWERS = 128
MOST_LOGPROBS = 20
MOST_STOP_STRINGS = 16
MOST_STOP_TOKEN_IDS = 1024
MOST_BIASED_TOKENS = 1024
MOST_BAD_WORDS = 256
LONGEST_STOP_STRING = 1000  # characters
LONGEST_BAD_WORD = 100  # characters

_INT64 = 2**63 - 1
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def answers(value: Any, param: str) -> int:
    """`n` and `best_of`."""
    return fields.integer(value, param, 1, MOST_ANSWERS)


def temperature(value: Any, param: str) -> float:
    return fields.number(value, param, 0, 2)


def top_p(value: Any, param: str) -> float:
    return fields.number(value, param, 0, 1, above_low=True)


def top_k(value: Any, param: str) -> int:
    """0: all, which may also be written as -1."""
    return max(0, fields.integer(value, param, -1, fields.INT32))


def min_p(value: Any, param: str) -> float:
    return fields.number(value, param, 0, 1)


def penalty(value: Any, param: str) -> float:
    """`presence_penalty` and `frequency_penalty`."""
    return fields.number(value, param, -2, 2)


def repetition_penalty(value: Any, param: str) -> float:
    """A divisor, so it stays away from 0."""
    return fields.number(value, param, 0.01, 100)


def seed(value: Any, param: str) -> int:
    return fields.integer(value, param, -_INT64 - 1, _INT64)


def int32(value: Any, param: str) -> int:
    """`priority`: any integer, lower ones first."""
    return fields.integer(value, param, -fields.INT32 - 1, fields.INT32)


def most_likely(value: Any, param: str) -> int:
    """How many of the most likely tokens are returned at each position."""
    return fields.integer(value, param, 0, MOST_LOGPROBS)


def max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    """`max_completion_tokens` goes before `max_tokens`; none means the rest of the context."""
    least, default = (1, None) if chat else (0, _COMPLETION_MAX_TOKENS)

    def read(value: Any, param: str) -> int:
        return fields.integer(value, param, least, fields.INT32)

    limit = fields.optional(body, "max_tokens", read, default)
    return fields.optional(body, "max_completion_tokens", read, limit)


def min_tokens(body: dict[str, Any], limit: int | None) -> int:
    """At most as many as may be generated at all."""
    least = fields.optional(body, "min_tokens", lambda value, param: fields.integer(value, param, 0, fields.INT32), 0)
    if limit is not None and least > limit:
        fields.fail(
            f"Invalid 'min_tokens': it must be at most 'max_tokens', which is {limit}, but is {least}.",
            "min_tokens",
            "invalid_value",
        )
    return least


def truncation(value: Any, param: str) -> int:
    """How many of the prompt's last tokens are kept; -1: as many as the model can take."""
    kept = fields.integer(value, param, -1, fields.INT32)
    if kept == 0:
        fields.fail(
            f"Invalid '{param}': it must be at least 1, or -1 for as many tokens as the model can take.",
            param,
            "invalid_value",
        )
    return kept


def stop_strings(value: Any, param: str) -> list[str]:
    """One string or several."""
    if isinstance(value, str):
        return [fields.text(value, param, LONGEST_STOP_STRING, least=1)]
    if not isinstance(value, list):
        fields.wrong_type(value, "one of a string or array of strings", param)
    return _strings(value, param, MOST_STOP_STRINGS, LONGEST_STOP_STRING)


def bad_words(value: Any, param: str) -> list[str]:
    return _strings(value, param, MOST_BAD_WORDS, LONGEST_BAD_WORD)


def stop_token_ids(value: Any, param: str) -> list[int]:
    return fields.integers(fields.array(value, param, MOST_STOP_TOKEN_IDS), param, 0, fields.INT32)


def logit_bias(value: Any, param: str) -> dict[int, float]:
    """Token ids, which JSON can write as strings only, and what is added to their logits."""
    entries = fields.mapping(value, param)
    if len(entries) > MOST_BIASED_TOKENS:
        fields.fail(
            f"Invalid '{param}': too many properties. Expected an object with at most {MOST_BIASED_TOKENS} properties,"
            f" but got an object with {len(entries)} properties instead.",
            param,
            "object_above_max_properties",
        )
    return {
        _token_id(key, param): fields.number(bias, f"{param}.{fields.shown(key)}", -100, 100)
        for key, bias in entries.items()
    }


def logprobs(body: dict[str, Any], chat: bool) -> int | None:
    """How many of the most likely tokens are returned beside each generated one; None: no log
    probabilities at all.
    """
    if not chat:
        if fields.optional(body, "top_logprobs", most_likely, 0):
            fields.unsupported("top_logprobs", "is for chats; in a completion 'logprobs' is the number.")
        return fields.optional(body, "logprobs", most_likely, None)
    wanted = fields.optional(body, "logprobs", fields.boolean, False)
    count = fields.optional(body, "top_logprobs", most_likely, 0)
    if count and not wanted:
        fields.fail("The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs", None)
    return count if wanted else None


def prompt_logprobs(body: dict[str, Any], stream: bool) -> int | None:
    """The same for the prompt's tokens, in vLLM's field."""
    count = fields.optional(body, "prompt_logprobs", most_likely, None)
    if count is not None and stream:
        fields.fail(
            "The 'prompt_logprobs' parameter is not allowed when 'stream' is enabled.",
            "prompt_logprobs",
            "invalid_value",
        )
    return count


def echo(body: dict[str, Any], chat: bool) -> bool:
    """Return whether the answer begins with the prompt."""
    wanted = fields.optional(body, "echo", fields.boolean, False)
    if wanted and chat:
        fields.unsupported("echo", "is for completions: a chat's answer cannot begin with its prompt.")
    return wanted


def best_of(body: dict[str, Any], n: int, stream: bool) -> int:
    """How many answers are generated, of which the best `n` are given."""
    count = fields.optional(body, "best_of", answers, n)
    if count < n:
        fields.fail(
            "You requested that the server return more choices than it will generate (HINT: you must set 'n'"
            f" (currently {n}) to be at most 'best_of' (currently {count}), or omit either parameter if you don't"
            " specifically want to use them.)",
            "best_of",
            None,
        )
    if count > n and stream:
        fields.fail(
            "Which answers are best shows at their end: 'best_of' above 'n' is not allowed when 'stream' is enabled.",
            "best_of",
            "invalid_value",
        )
    return count


def include_usage(body: dict[str, Any], stream: bool) -> bool:
    """Return whether a stream ends with a chunk that contains the usage."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        fields.fail(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
            "invalid_value",
        )
    wanted = fields.mapping(options, "stream_options")
    continuous, value = (wanted.get(name) for name in ("continuous_usage_stats", "include_usage"))
    if continuous is not None and fields.boolean(continuous, "stream_options.continuous_usage_stats"):
        fields.unsupported("stream_options.continuous_usage_stats", "must be false.")
    return value is not None and fields.boolean(value, "stream_options.include_usage")


def _strings(value: Any, param: str, most: int, longest: int) -> list[str]:
    items = fields.array(value, param, most)
    return [fields.text(item, f"{param}[{i}]", longest, least=1) for i, item in enumerate(items)]


def _token_id(key: str, param: str) -> int:
    if not (key.isascii() and key.isdigit()) or (key[0] == "0" and key != "0"):
        fields.fail(
            f"Invalid key in '{param}': {fields.shown(key)}. You should only be submitting non-negative integers,"
            " without leading zeros.",
            param,
            "invalid_value",
        )
    if len(key) > len(str(fields.INT32)) or int(key) > fields.INT32:
        fields.fail(
            f"Invalid key in '{param}': {fields.shown(key)}. Maximum value is {fields.INT32}.", param, "invalid_value"
        )
    return int(key)
