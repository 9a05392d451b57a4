"""Response bodies and stream chunks in OpenAI's shapes, with vLLM's `stop_reason` and
`prompt_logprobs` beside them.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from jobs.protocol.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, text_offsets
from jobs.protocol.results import Choice, FinishReason, Usage

_CHAT = "/v1/chat/completions"


def new_body_id(endpoint: str) -> str:
    """The `id` of a response body; a stream carries one through all its chunks."""
    return ("chatcmpl-" if endpoint == _CHAT else "cmpl-") + uuid.uuid4().hex


def response_body(
    endpoint: str, body_id: str, model: str, choices: Sequence[Choice], usage: Usage, created: int
) -> dict[str, Any]:
    """The body of either endpoint; `created` in unix seconds."""
    build = chat_body if endpoint == _CHAT else completion_body
    return build(body_id, model, choices, usage, created)


def completion_body(body_id: str, model: str, choices: Sequence[Choice], usage: Usage, created: int) -> dict[str, Any]:
    """The body of `/v1/completions`."""
    return _envelope(body_id, "text_completion", model, created, list(map(_completion_choice, choices))) | {
        "usage": usage.as_openai()
    }


def chat_body(body_id: str, model: str, choices: Sequence[Choice], usage: Usage, created: int) -> dict[str, Any]:
    """The body of `/v1/chat/completions`."""
    body = _envelope(body_id, "chat.completion", model, created, list(map(_chat_choice, choices))) | {
        "usage": usage.as_openai()
    }
    # All choices have the same prompt
    if choices and (prompt := choices[0].prompt_logprobs) is not None:
        body["prompt_logprobs"] = prompt_logprobs(prompt)
    return body


def completion_chunk(
    body_id: str,
    model: str,
    text: str,
    finish_reason: FinishReason | None,
    created: int,
    stop_reason: int | str | None = None,
    index: int = 0,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One server-sent event of a streamed `/v1/completions`, of choice `index`."""
    choice = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    return _envelope(body_id, "text_completion", model, created, [choice])


def chat_chunk(
    body_id: str,
    model: str,
    text: str | None,
    finish_reason: FinishReason | None,
    created: int,
    stop_reason: int | str | None = None,
    index: int = 0,
    logprobs: dict[str, Any] | None = None,
    first: bool = False,
) -> dict[str, Any]:
    """One server-sent event of a streamed `/v1/chat/completions`, of choice `index`; a choice's
    `first` one carries the role.
    """
    delta: dict[str, Any] = (
        {"role": "assistant", "content": text or ""} if first else {} if text is None else {"content": text}
    )
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = stop_reason
    return _envelope(body_id, "chat.completion.chunk", model, created, [choice])


def usage_chunk(endpoint: str, body_id: str, model: str, usage: Usage, created: int) -> dict[str, Any]:
    """The last event of a stream that asked for `include_usage`."""
    kind = "chat.completion.chunk" if endpoint == _CHAT else "text_completion"
    return _envelope(body_id, kind, model, created, []) | {"usage": usage.as_openai()}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = completion_logprobs(choice.logprobs, text_offsets(choice.text, choice.logprobs))
    body: dict[str, Any] = {"index": choice.index, "text": choice.text, "logprobs": logprobs}
    if choice.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
    return body | _ending(choice)


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
    return {"index": choice.index, "message": message, "logprobs": logprobs} | _ending(choice)


def _ending(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _envelope(body_id: str, kind: str, model: str, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": body_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "system_fingerprint": None,
    }
