"""The API's answers against the types of the official client, and against what the OpenAPI document
says of them.
"""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai import types
from openai.types import chat

from api.answer_objects import (
    AnswerObject,
    Batch,
    ChatCompletion,
    Completion,
    FileDeleted,
    FileObject,
    UploadObject,
    UploadPart,
)
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.results import Choice, ParsedMessage, PositionLogprobs, TokenLogprob, ToolCall, Usage, encode_json
from tests.contract.shapes import OFFICIAL, declared_faults

OFFICIALS = OFFICIAL | {ChatCompletion: chat.ChatCompletion, Completion: types.Completion}

FILE = {
    "purpose: 'assistants_output'",
    "purpose: 'fine-tune-results'",
    "status: 'error'",
    "status: 'uploaded'",
    "status_details: string",
}
USAGE = {
    "usage.completion_tokens_details.accepted_prediction_tokens",
    "usage.completion_tokens_details.audio_tokens",
    "usage.completion_tokens_details.rejected_prediction_tokens",
    "usage.completion_tokens_details.text_tokens",
    "usage.prompt_tokens_details.audio_tokens",
    "usage.prompt_tokens_details.cache_write_tokens",
    "usage.prompt_tokens_details.image_tokens",
    "usage.prompt_tokens_details.text_tokens",
}
TIERS = {"service_tier: 'auto'", "service_tier: 'fast'", "service_tier: 'scale'"}
NEVER_SENT: dict[type[AnswerObject], set[str]] = {
    FileObject: FILE,
    FileDeleted: set(),
    UploadObject: {f"file.{line}" for line in FILE} | {"purpose: string"},
    UploadPart: set(),
    Batch: {"errors.object: string"},
    ChatCompletion: {
        "choices[].finish_reason: 'content_filter'",
        "choices[].finish_reason: 'function_call'",
        "choices[].logprobs.refusal",
        "choices[].message.annotations",
        "choices[].message.audio",
        "choices[].message.function_call",
        "choices[].message.refusal: string",
        "choices[].message.tool_calls[].custom",
        "choices[].message.tool_calls[].type: 'custom'",
        "metadata",
        "moderation",
    }
    | TIERS
    | USAGE,
    Completion: {"choices[].finish_reason: 'content_filter'"} | USAGE,
}
"""What the official types have beyond the API's, with all that is in it."""
BEYOND: dict[type[AnswerObject], set[str]] = {
    FileObject: {"purpose: 'evals'"},
    FileDeleted: set(),
    UploadObject: {"file.purpose: 'evals'", "purpose"},
    UploadPart: set(),
    Batch: {
        "errors.object: 'list'",
        "input",
        "last_append_at",
        "open",
        "priority",
        "risk",
        "unknown_members",
        "usage.device_seconds",
    },
    ChatCompletion: {
        "choices[].message.reasoning",
        "choices[].message.reasoning_content",
        "choices[].stop_reason",
        "choices[].token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
    },
    Completion: {
        "choices[].logprobs.token_logprobs[]: null",
        "choices[].logprobs.top_logprobs[]: null",
        "choices[].prompt_logprobs",
        "choices[].prompt_token_ids",
        "choices[].stop_reason",
        "choices[].token_ids",
        "service_tier",
    },
}
"""What the API's have beyond the official ones."""

FIRST = PositionLogprobs(TokenLogprob(9, b"p", None, 0), [])
POSITION = PositionLogprobs(TokenLogprob(5, b"a", -0.5, 1), [TokenLogprob(6, b"\xc3", -1.5, 2)])
CHOICES = {
    "plain": Choice(0, "a", "stop"),
    "stopped": Choice(0, "a", "stop", stop_reason=7, token_ids=[5], prompt_token_ids=[9]),
    "log probabilities": Choice(0, "pa", "length", "\n", [FIRST, POSITION], prompt_logprobs=[FIRST, POSITION]),
    "parsed": Choice(0, "", "stop", message=ParsedMessage(None, "hm", [ToolCall("call_1", "f", "{}")])),
}


@pytest.mark.parametrize("kind", OFFICIALS, ids=lambda kind: kind.__name__)
def test_an_object_is_that_of_the_official_client_but_for_what_is_listed(kind: type[AnswerObject]) -> None:
    """Members, their types and values, and which there must be. What may be absent or null there,
    the API may always send.
    """
    declared, official = msgspec.json.schema(kind), OFFICIALS[kind].model_json_schema()
    sent, known = set(_lines(declared, declared)), set(_lines(official, official))
    assert _listed({line for line in known - sent if not line.endswith(": null")}, NEVER_SENT[kind]) == NEVER_SENT[kind]
    assert _listed({line for line in sent - known if not line.endswith(" is required")}, BEYOND[kind]) == BEYOND[kind]


@pytest.mark.parametrize("tier", [None, "flex"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("url", "kind"), [(CHAT, ChatCompletion), (COMPLETIONS, Completion)])
def test_a_live_answer_is_what_is_declared(url: str, kind: type[AnswerObject], choice: str, tier: str | None) -> None:
    head = AnswerHead("cmpl-1", "m", 1, "fp_1", tier)
    for usage in (Usage(3, 2, 1), Usage(3, 2, 1, reasoning_tokens=1)):
        body = ENDPOINTS[url].body(head, [CHOICES[choice]], usage)
        assert declared_faults(kind, encode_json(body)) == []


def test_the_document_has_all_that_it_refers_to_and_nothing_else(http: httpx.Client) -> None:
    answer = http.get("/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) == set(schemas)
    assert all("\n" not in schema.get("description", "") for schema in schemas.values())


def _listed(found: set[str], listed: set[str]) -> set[str]:
    """Return the items of a list that lines are about, and the lines that none of them is about."""
    about = {
        line: next((one for one in listed if re.match(rf"{re.escape(one)}($|[.:\[{{ ])", line)), line) for line in found
    }
    return set(about.values())


def _lines(schema: dict[str, Any], whole: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield a line for each type or value of a member, and for each member that there must be."""
    if "$ref" in schema:
        yield from _lines(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, path)
    elif "properties" in schema:
        within = f"{path}." if path else ""
        for name, member in schema["properties"].items():
            yield from _lines(member, whole, f"{within}{name}")
        yield from (f"{within}{name} is required" for name in schema.get("required", ()))
    elif options := schema.get("anyOf") or schema.get("oneOf"):
        for option in options:
            yield from _lines(option, whole, path)
    elif values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        yield from (f"{path}: {value!r}" for value in values)
    elif "items" in schema:
        yield from _lines(schema["items"], whole, f"{path}[]")
    elif isinstance(inner := schema.get("additionalProperties"), dict):
        yield from _lines(inner, whole, f"{path}{{}}")
    else:
        yield f"{path}: {schema.get('type', 'anything')}"
