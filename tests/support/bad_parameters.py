"""Bad requests by their parameters, and by how large they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.bad_request import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    END,
    INF,
    NAN,
    VOCABULARY,
    BadRequest,
    bad,
    chat,
    completion,
    message,
    without,
)


def _numbers() -> Iterator[BadRequest]:
    """Each parameter that is a number, at its type and on both sides of its range."""
    integers = [
        ("max_tokens", 1, 2**31 - 1),
        ("max_completion_tokens", 1, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("n", 1, 128),
        ("best_of", 1, 128),
        ("top_k", -1, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
        ("priority", -(2**31), 2**31 - 1),
        ("truncate_prompt_tokens", -1, 2**31 - 1),
        ("prompt_logprobs", 0, 20),
        ("top_logprobs", 0, 20),
    ]
    for name, low, high in integers:
        yield bad(CHAT, chat(**{name: low - 1}), f"{name} too small", name, "integer_below_min_value", f">= {low}")
        yield bad(CHAT, chat(**{name: high + 1}), f"{name} too large", name, "integer_above_max_value", f"<= {high}")
        for kind, value in (("text", "1"), ("decimal", 1.5), ("boolean", True), ("array", [1])):
            yield bad(CHAT, chat(**{name: value}), f"{name} {kind}", name, "invalid_type", "expected an integer")
    yield bad(
        CHAT,
        chat(max_tokens=10**40),
        "max_tokens of 41 digits",
        "max_tokens",
        "integer_above_max_value",
        "a very large one",
    )
    yield bad(
        COMPLETIONS,
        completion(max_tokens=-1),
        "max_tokens of a completion",
        "max_tokens",
        "integer_below_min_value",
        ">= 0",
    )
    yield bad(COMPLETIONS, completion(logprobs=21), "logprobs too many", "logprobs", "integer_above_max_value", "<= 20")
    yield bad(COMPLETIONS, completion(logprobs=-1), "logprobs negative", "logprobs", "integer_below_min_value", ">= 0")
    yield bad(
        COMPLETIONS, completion(logprobs=True), "logprobs boolean", "logprobs", "invalid_type", "expected an integer"
    )
    yield bad(
        CHAT, chat(truncate_prompt_tokens=0), "cut to nothing", "truncate_prompt_tokens", "invalid_value", "at least 1"
    )
    decimals = [
        ("temperature", "0", -0.1, "2", 2.01),
        ("top_p", "0", -0.5, "1", 1.01),
        ("min_p", "0", -0.01, "1", 1.5),
        ("presence_penalty", "-2", -2.1, "2", 2.1),
        ("frequency_penalty", "-2", -3, "2", 3),
        ("repetition_penalty", "0.01", 0, "100", 101),
    ]
    for name, low_text, below, high_text, above in decimals:
        yield bad(CHAT, chat(**{name: below}), f"{name} too small", name, "decimal_below_min_value", f">= {low_text}")
        yield bad(CHAT, chat(**{name: above}), f"{name} too large", name, "decimal_above_max_value", f"<= {high_text}")
        yield bad(CHAT, chat(**{name: NAN}), f"{name} NaN", name, "invalid_value", "not a number")
        yield bad(
            CHAT, chat(**{name: INF}), f"{name} infinite", name, "decimal_above_max_value", "got a very large one"
        )
        for kind, value in (("text", "0.5"), ("boolean", False), ("object", {})):
            yield bad(CHAT, chat(**{name: value}), f"{name} {kind}", name, "invalid_type", "expected a decimal")
    yield bad(
        CHAT, chat(temperature=-INF), "temperature minus infinity", "temperature", "decimal_below_min_value", ">= 0"
    )


def _lists() -> Iterator[BadRequest]:
    table: list[tuple[str, Any, str, str, str]] = [
        ("stop", 5, "stop", "invalid_type", "expected one of a string or array of strings"),
        ("stop", {}, "stop", "invalid_type", "got an object"),
        ("stop", "", "stop", "empty_string", "empty string"),
        ("stop", ["a", ""], "stop[1]", "empty_string", "empty string"),
        ("stop", [1], "stop[0]", "invalid_type", "expected a string"),
        ("stop", [None], "stop[0]", "invalid_type", "got null"),
        ("stop", ["\ud800"], "stop[0]", "invalid_value", "surrogate"),
        ("stop", ["x"] * 17, "stop", "array_above_max_length", "maximum length 16"),
        ("stop", "x" * 1001, "stop", "string_above_max_length", "maximum length 1000"),
        ("stop", ["x", "x" * 2_000_000], "stop[1]", "string_above_max_length", "length 2000000"),
        ("bad_words", "fox", "bad_words", "invalid_type", "expected an array"),
        ("bad_words", [""], "bad_words[0]", "empty_string", "empty string"),
        ("bad_words", ["a", 5], "bad_words[1]", "invalid_type", "expected a string"),
        ("bad_words", ["a\udc00"], "bad_words[0]", "invalid_value", "surrogate"),
        ("bad_words", ["x"] * 257, "bad_words", "array_above_max_length", "maximum length 256"),
        ("bad_words", ["x" * 101], "bad_words[0]", "string_above_max_length", "maximum length 100"),
        ("stop_token_ids", 5, "stop_token_ids", "invalid_type", "expected an array"),
        ("stop_token_ids", [-1], "stop_token_ids[0]", "integer_below_min_value", ">= 0"),
        ("stop_token_ids", ["a"], "stop_token_ids[0]", "invalid_type", "expected an integer"),
        ("stop_token_ids", [1, True], "stop_token_ids[1]", "invalid_type", "got a boolean"),
        ("stop_token_ids", [1] * 1025, "stop_token_ids", "array_above_max_length", "maximum length 1024"),
        ("allowed_token_ids", [], "allowed_token_ids", "empty_array", "minimum length 1"),
        ("allowed_token_ids", "5", "allowed_token_ids", "invalid_type", "expected an array"),
        ("allowed_token_ids", [1, -1], "allowed_token_ids[1]", "integer_below_min_value", ">= 0"),
        ("allowed_token_ids", [1] * 1025, "allowed_token_ids", "array_above_max_length", "maximum length 1024"),
        ("logit_bias", [1], "logit_bias", "invalid_type", "expected an object"),
        ("logit_bias", "5", "logit_bias", "invalid_type", "expected an object"),
        ("logit_bias", {"fox": 1}, "logit_bias", "invalid_value", "non-negative integers"),
        ("logit_bias", {"-1": 1}, "logit_bias", "invalid_value", "-1. You should"),
        ("logit_bias", {"": 1}, "logit_bias", "invalid_value", "non-negative integers"),
        ("logit_bias", {"1.5": 1}, "logit_bias", "invalid_value", "1.5. You should"),
        ("logit_bias", {"٣": 1}, "logit_bias", "invalid_value", "non-negative integers"),
        ("logit_bias", {"\ud800": 1}, "logit_bias", "invalid_value", "non-negative integers"),
        ("logit_bias", {"007": 1, "7": 2}, "logit_bias", "invalid_value", "007. You should"),
        ("logit_bias", {"00": 1}, "logit_bias", "invalid_value", "without leading zeros"),
        ("logit_bias", {"9" * 5000: 1}, "logit_bias", "invalid_value", "Maximum value is 999999999"),
        ("logit_bias", {"k" * 1_000_000: 1}, "logit_bias", "invalid_value", "kkk…"),
        ("logit_bias", {"5": "1"}, "logit_bias.5", "invalid_type", "expected a decimal"),
        ("logit_bias", {"5": None}, "logit_bias.5", "invalid_type", "got null"),
        ("logit_bias", {"5": 100.5}, "logit_bias.5", "decimal_above_max_value", "<= 100"),
        ("logit_bias", {"5": -INF}, "logit_bias.5", "decimal_below_min_value", ">= -100"),
        ("logit_bias", {"5": NAN}, "logit_bias.5", "invalid_value", "not a number"),
    ]
    for number, (name, value, param, code, words) in enumerate(table):
        yield bad(CHAT, chat(**{name: value}), f"{name} {number}", param, code, words)


def _flags() -> Iterator[BadRequest]:
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo", "stream"):
        for kind, value in (("1", 1), ("text", "true"), ("array", [])):
            yield bad(
                COMPLETIONS, completion(**{name: value}), f"{name} {kind}", name, "invalid_type", "expected a boolean"
            )
    for kind, value in (("1", 1), ("text", "yes"), ("object", {})):
        yield bad(
            CHAT, chat(logprobs=value), f"logprobs of a chat {kind}", "logprobs", "invalid_type", "expected a boolean"
        )
    streaming = {"stream": True}
    yield bad(
        CHAT,
        chat(**streaming, stream_options=[]),
        "stream_options array",
        "stream_options",
        "invalid_type",
        "an object",
        in_file="streaming_unsupported",
    )
    yield bad(
        CHAT,
        chat(**streaming, stream_options={"include_usage": 1}),
        "include_usage 1",
        "stream_options.include_usage",
        "invalid_type",
        "a boolean",
        in_file="streaming_unsupported",
    )
    yield bad(
        CHAT,
        chat(**streaming, stream_options={"continuous_usage_stats": "x"}),
        "continuous usage text",
        "stream_options.continuous_usage_stats",
        "invalid_type",
        "a boolean",
        in_file="streaming_unsupported",
    )


def _contradictions() -> Iterator[BadRequest]:
    streaming = {"stream": True}
    in_file = {"in_file": "streaming_unsupported"}
    yield bad(
        CHAT,
        chat(stream_options={"include_usage": True}),
        "stream_options without stream",
        "stream_options",
        "invalid_value",
        "only allowed when 'stream' is enabled",
    )
    yield bad(
        CHAT,
        chat(top_logprobs=2),
        "top_logprobs without logprobs",
        "top_logprobs",
        None,
        "only allowed when 'logprobs' is enabled",
    )
    yield bad(
        CHAT,
        chat(top_logprobs=2, logprobs=False),
        "top_logprobs with logprobs off",
        "top_logprobs",
        None,
        "'logprobs' is enabled",
    )
    yield bad(
        COMPLETIONS,
        completion(top_logprobs=2),
        "top_logprobs of a completion",
        "top_logprobs",
        "unsupported_value",
        "for chats",
    )
    yield bad(CHAT, chat(service_tier="fast"), "an unknown tier", "service_tier", "invalid_value", "'auto', 'default'")
    yield bad(
        CHAT,
        chat(service_tier="flex", priority=1),
        "a tier and a priority",
        "service_tier",
        "invalid_value",
        "leave one of them out",
    )
    yield bad(
        COMPLETIONS,
        completion(n=3, best_of=2),
        "best_of below n",
        "best_of",
        None,
        "more choices than it will generate",
    )
    yield bad(
        COMPLETIONS,
        completion(best_of=2, **streaming),
        "best_of streamed",
        "best_of",
        "invalid_value",
        "'stream' is enabled",
        **in_file,
    )
    yield bad(
        COMPLETIONS,
        completion(prompt_logprobs=1, **streaming),
        "prompt_logprobs streamed",
        "prompt_logprobs",
        "invalid_value",
        "'stream' is enabled",
        **in_file,
    )
    yield bad(
        CHAT,
        chat(min_tokens=2),
        "min_tokens above max_tokens",
        "min_tokens",
        "invalid_value",
        "at most 'max_tokens', which is 1",
    )
    yield bad(
        COMPLETIONS,
        without(completion(min_tokens=17), "max_tokens"),
        "min_tokens above the default of max_tokens",
        "min_tokens",
        "invalid_value",
        "which is 16",
    )
    yield bad(CHAT, chat(echo=True), "echo of a chat", "echo", "unsupported_value", "for completions")
    yield bad(
        CHAT,
        without(chat(min_tokens=CONTEXT), "max_tokens"),
        "min_tokens above the context",
        "min_tokens",
        "invalid_value",
        "leaves room for",
        needs_model=True,
    )


def _unsupported() -> Iterator[BadRequest]:
    table: list[tuple[str, Any, str]] = [
        ("chat_template", "{{ messages }}", "is code"),
        ("chat_template", "{% for _ in range(10**9) %}{% endfor %}", "is code"),
        ("logits_processors", ["os.system"], "must be left out"),
        ("functions", [{"name": "f"}], "must be left out"),
        ("function_call", {"name": "f"}, "must be left out"),
        ("suffix", "end", "must be left out"),
        ("audio", {"voice": "alloy"}, "must be left out"),
        ("modalities", ["text", "audio"], "must be ['text']"),
        ("prompt_embeds", "AAAA", "must be left out"),
        ("use_beam_search", True, "must be left out"),
        ("length_penalty", 0.5, "must be 1.0"),
        ("cache_salt", "mine alone", "must be left out"),
        ("vllm_xargs", {"a": 1}, "must be left out"),
        ("suffix", 0.0, "must be left out"),
        ("use_beam_search", 0, "must be left out"),
        ("mm_processor_kwargs", {"num_crops": 4}, "must be left out"),
        ("truncation_side", "right", "must be 'left'"),
        ("reasoning", {"effort": "high"}, "must be left out"),
        ("thinking", {"type": "enabled"}, "must be left out"),
        ("verbosity", "low", "must be 'medium'"),
        ("repetition_detection", {"max_pattern_size": 8}, "must be left out"),
        ("logprob_token_ids", [5], "must be left out"),
        ("detokenize", False, "must be true"),
        ("detokenize", 1, "must be true"),
        ("spaces_between_special_tokens", False, "must be true"),
    ]
    for number, (name, value, words) in enumerate(table):
        yield bad(CHAT, chat(**{name: value}), f"{name} {number}", name, "unsupported_value", words)


def _sizes() -> Iterator[BadRequest]:
    too_long = {"code": "context_length_exceeded", "needs_model": True}
    words = f"maximum context length is {CONTEXT} tokens"
    yield bad(
        COMPLETIONS, completion(prompt="word " * 2_000_000), "a prompt of 10 MB", "prompt", words=words, **too_long
    )
    yield bad(COMPLETIONS, completion(prompt="a" * 2_000_000), "a word of 2 MB", "prompt", words=words, **too_long)
    yield bad(
        COMPLETIONS,
        completion(prompt=["x", "word " * 200_000]),
        "the second prompt of 1 MB",
        "prompt[1]",
        words=words,
        **too_long,
    )
    yield bad(
        COMPLETIONS,
        completion(prompt=[5] * 1_000_000),
        "a million token ids",
        "prompt",
        words="1000000 tokens",
        **too_long,
    )
    yield bad(
        COMPLETIONS,
        completion(prompt=[5] * CONTEXT),
        "as many token ids as the context",
        "prompt",
        words=words,
        **too_long,
    )
    yield bad(
        COMPLETIONS,
        completion(prompt=[5] * 2000, max_tokens=49),
        "one token too many",
        "prompt",
        words="(2000 in the prompt, 49",
        **too_long,
    )
    yield bad(
        COMPLETIONS,
        completion(max_tokens=2**31 - 1),
        "more tokens than there are",
        "prompt",
        words="2147483647 in",
        **too_long,
    )
    yield bad(CHAT, message(content="word " * 2_000_000), "a message of 10 MB", "messages", words=words, **too_long)
    yield bad(CHAT, message(content="🙂" * 2000), "a message of 2000 emoji", "messages", words=words, **too_long)
    fields = {"code": "invalid_value", "words": "at most 524288 can be given", "needs_model": True}
    yield bad(
        CHAT, chat(n=128, max_tokens=1000, logprobs=True, top_logprobs=20), "2.7 million logprobs", "logprobs", **fields
    )
    body = without(chat(n=128, logprobs=True, top_logprobs=20), "max_tokens")
    yield bad(CHAT, body, "logprobs of 128 answers without a limit", "logprobs", **fields)
    yield bad(
        COMPLETIONS,
        completion(prompt=[[5] * 2000] * 100, prompt_logprobs=20),
        "4 million of prompts",
        "prompt_logprobs",
        **fields,
    )
    yield bad(
        CHAT,
        chat(messages=[{"role": "user", "content": "x"}] * 10_000),
        "10,000 messages",
        "messages",
        words=words,
        **too_long,
    )
    most = "array_above_max_length"
    yield bad(
        CHAT,
        chat(messages=[{"role": "user", "content": "x"}] * 100_000),
        "100,000 messages",
        "messages",
        most,
        "length 100000",
    )
    parts = [{"type": "text", "text": "x"}] * 100_000
    yield bad(CHAT, message(content=parts), "100,000 parts", "messages[0].content", most, "length 100000")
    yield bad(CHAT, chat(stop=["x"] * 100_000), "100,000 stop strings", "stop", most, "length 100000")
    long_words = [f"{number:03} {'the quick brown fox ' * 4}" for number in range(256)]
    yield bad(
        CHAT,
        chat(bad_words=long_words),
        "bad words of too many tokens",
        "bad_words",
        "invalid_value",
        "at most 8192",
        needs_model=True,
    )
    yield bad(CHAT, chat(bad_words=["x"] * 100_000), "100,000 bad words", "bad_words", most, "length 100000")
    yield bad(CHAT, chat(stop_token_ids=[1] * 100_000), "100,000 stop tokens", "stop_token_ids", most, "length 100000")
    bias = {str(token): 1 for token in range(100_000)}
    yield bad(
        CHAT,
        chat(logit_bias=bias),
        "100,000 biased tokens",
        "logit_bias",
        "object_above_max_properties",
        "100000 properties",
    )


def _vocabulary() -> Iterator[BadRequest]:
    table: list[tuple[dict[str, Any], str, str, str]] = [
        ({"prompt": [1, VOCABULARY]}, "prompt[1]", "integer_above_max_value", "<= 1023"),
        ({"prompt": [[1], [2, 3, 2**31 - 1]]}, "prompt[1][2]", "integer_above_max_value", "<= 1023"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids[0]", "integer_above_max_value", "<= 1023"),
        ({"allowed_token_ids": [5, VOCABULARY]}, "allowed_token_ids[1]", "integer_above_max_value", "<= 1023"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1, "max_tokens": 1},
            "allowed_token_ids",
            "invalid_value",
            "rule out each of them",
        ),
        (
            {"allowed_token_ids": [END], "ignore_eos": True, "min_tokens": 1, "max_tokens": 1},
            "allowed_token_ids",
            "invalid_value",
            "rule out each of them",
        ),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", "invalid_value", "1024. Maximum value is 1023"),
    ]
    for number, (changes, param, code, words) in enumerate(table):
        yield bad(
            COMPLETIONS,
            completion(**changes),
            f"outside of the vocabulary {number}",
            param,
            code,
            words,
            needs_model=True,
        )


PARAMETERS = (_numbers, _lists, _flags, _contradictions, _unsupported, _sizes, _vocabulary)
"""Each yields some of them."""
