"""Validation of batch lines and live calls.

`check_line` checks the structure of a line, `parse_call` its body.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from jobs.protocol import fields
from jobs.protocol.combining import combine
from jobs.protocol.default_parameters import DefaultParameters, unset
from jobs.protocol.endpoint import TextEndpoint
from jobs.protocol.endpoints import (
    ALL_ENDPOINTS,
    BATCH_ENDPOINTS,
    BATCH_URLS,
    ENDPOINTS,
    TOKENIZER_ENDPOINTS,
    check_answers,
)
from jobs.protocol.lines import Line, body_of, decode_json
from jobs.protocol.output_format import OutputFormat
from jobs.protocol.parameters import Parameters, read_parameters, schemas
from jobs.protocol.prompts import check_continued
from jobs.protocol.results import ApiError
from jobs.protocol.unknown_members import check_members
from jobs.protocol.value_types import Schema

_BATCH_CODES = frozenset(
    {
        "invalid_json_line",
        "missing_required_parameter",
        "invalid_url",
        "streaming_unsupported",
        "model_not_found",
        "unsupported_endpoint",
        "unknown_parameter",
    }
)
MOST_CUSTOM_ID = 512
"""Most characters of a `custom_id`, as in the hosted service."""

_NO_JSON = "This line is not parseable as valid JSON."


class LineError(msgspec.Struct, frozen=True):
    """An entry of the batch's `errors`: why a file is refused."""

    code: str
    line: int | None  # from 1
    param: str | None
    message: str


class Call(Parameters, frozen=True, kw_only=True):
    """A valid call; either `prompts` or `messages` is set.

    `max_tokens` combines both parameters; None means the rest of the context. `logprobs` is the
    number of most likely tokens besides the answer's own; None means no log probabilities. `tools`
    are those that may be called; `tool_choice` is "none", "auto" or "required", for every form of
    the parameter.
    """

    endpoint: TextEndpoint
    model: str
    prompts: Sequence[str | list[int]] = ()  # texts, or lists of token ids
    # Role, content (a string or text parts), name, tool_calls, tool_call_id, reasoning_content,
    # reasoning
    messages: Sequence[dict[str, Any]] = ()
    output_format: OutputFormat | None = None
    soft_max_tokens: bool = False  # `max_tokens` is a model's default: less, if the prompt leaves less room
    tool_name: str | None = None  # of the function that must be called

    @property
    def sequences(self) -> int:
        """Return the number of sequences that the engine generates."""
        return max(1, len(self.prompts)) * self.best_of

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether the tokenizer adds special tokens to texts; a rendered chat has them."""
        return not self.endpoint.is_chat if self.add_special_tokens is None else self.add_special_tokens

    @property
    def own_max_tokens(self) -> int | None:
        """Return `max_tokens` if the call sets it, or a completion's usual one."""
        return None if self.soft_max_tokens else self.max_tokens

    @property
    def is_deterministic(self) -> bool:
        """Return whether repeated calls have the same answer: by temperature 0, or by a seed."""
        return self.temperature == 0 or self.seed is not None

    @property
    def include_usage(self) -> bool:
        """Return whether its stream ends with a chunk that contains the usage."""
        return self.stream_options.include_usage

    @property
    def continuous_usage_stats(self) -> bool:
        """Return whether each chunk of its stream contains the usage so far."""
        return self.include_usage and self.stream_options.continuous_usage_stats


def check_line(
    raw: bytes,
    number: int,
    endpoint: str | None = None,
    models: Mapping[str, Collection[str] | None] | None = None,
    default_model: str | None = None,
    strict: bool = False,
) -> Line | LineError:
    """Check the structure of line `number` (from 1) of a batch file; an error refuses the whole
    file.

    `endpoint` is the only url allowed (None: any of `BATCH_ENDPOINTS`). `models` are the served
    ones with their tasks, as far as known (None: not checked). `default_model` is for a line that
    names none (None: every line must name one). `strict` refuses unknown members of the body. The
    returned line names the model and has `values`.
    """
    try:
        line = decode_json(raw)
        if not isinstance(line, dict):
            return LineError("invalid_json_line", number, None, "This line is not a JSON object.")
        found = _read_line(line, raw, endpoint, models, default_model)
        if strict:
            check_members(found.values, BATCH_ENDPOINTS[found.url], "body.")
        return found
    except ValueError as error:
        return LineError("invalid_json_line", number, None, f"{_NO_JSON} Reason: {error}.")
    except ApiError as error:
        return LineError(error.code or "invalid_value", number, error.param, error.message)


def check_batch_line(
    raw: bytes,
    number: int,
    endpoint: str | None,
    models: Mapping[str, Collection[str] | None],
    strict: bool = False,
) -> Line | LineError:
    """Check a line like `check_line`, for a batch that came through the API.

    Also checks the type of the body; the codes are OpenAI's for batches.
    """
    found = check_line(raw, number, endpoint, models, strict=strict)
    if isinstance(found, Line):
        try:
            BATCH_ENDPOINTS[found.url].check_body(found.values, "body.")
            return found
        except ApiError as error:
            found = LineError(error.code or "", number, error.param, error.message)
    in_body, name = (found.param or "").rpartition("body.")[1:]
    if in_body and found.code == "missing_required_parameter":
        return LineError("invalid_request", number, found.param, f"{name.capitalize()} parameter is required.")
    return found if found.code in _BATCH_CODES else msgspec.structs.replace(found, code="invalid_request")


def parse_call(endpoint: str, body: Any, defaults: DefaultParameters | None = None) -> Call:
    """Read the body of a call, with a model's `defaults` for what it leaves unset.

    Raise `ApiError` 400 for a bad value, naming it; unknown parameters are ignored.
    """
    body = fields.mapping(body, "body")
    model = fields.text(fields.required(body, "model"), "model", least=1)
    found = ENDPOINTS[endpoint]
    values = read_parameters(body, found.is_chat)
    added = unset(defaults or {}, values, found.is_chat)
    values |= added
    combine(values, found.is_chat)
    prompt = found.read_prompt(found.prompt_of(body), values["best_of"])
    if values.get("continue_final_message", False):
        check_continued(prompt["messages"])
    return Call(endpoint=found, model=model, soft_max_tokens="max_tokens" in added, **prompt, **values)


def body_schema(endpoint: str) -> Schema:
    """Return the JSON Schema of bodies for an endpoint.

    It does not cover contradicting parameters, nor JSON passed as text.
    """
    found = ALL_ENDPOINTS[endpoint]
    if not isinstance(found, TextEndpoint):
        return found.body_schema
    return {
        "type": "object",
        **found.body_schema,
        "properties": {
            "model": {"type": "string", "minLength": 1},
            found.prompt_field: found.prompt_schema,
            **schemas(found.is_chat),
        },
    }


def decode_body(raw: bytes) -> Any:
    """Return the value of JSON from outside. Raise `ApiError` 400 for malformed JSON."""
    try:
        return decode_json(raw)
    except ValueError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}.") from error


def _read_line(
    line: dict[str, Any],
    raw: bytes,
    endpoint: str | None,
    models: Mapping[str, Collection[str] | None] | None,
    default_model: str | None,
) -> Line:
    custom_id = fields.text(fields.required(line, "custom_id"), "custom_id", MOST_CUSTOM_ID, least=1)
    method = fields.required(line, "method")
    if method != "POST":
        fields.fail("Invalid method: each request of a batch must be a 'POST'.", "method", "invalid_method")
    url = fields.required(line, "url")
    url = BATCH_URLS.get(url, url) if isinstance(url, str) else url
    allowed = [*BATCH_ENDPOINTS] if endpoint is None else [endpoint]
    if url not in allowed:
        live_only = url in list(TOKENIZER_ENDPOINTS)
        what = "is for live calls alone" if live_only else "does not match the batch endpoint"
        message = f"The URL provided for this request {what}. Expected"
        expected = allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"
        fields.fail(f"{message} {expected}.", "url", "invalid_url")
    body = fields.mapping(fields.required(line, "body"), "body")
    if body.get("stream") is True:
        message = f"{BATCH_ENDPOINTS[url].name}: Streaming is not supported in the Batch API. Leave out 'stream'."
        fields.fail(message, "body.stream", "streaming_unsupported")
    model = default_model if body.get("model") is None else None
    if model is None:
        model = fields.text(fields.required(body, "model", "body."), "body.model", least=1)
    if models is not None and model not in models:
        served = ", ".join(sorted(models)) or "none"
        message = (
            f"The provided model '{fields.shown(model)}' is not supported by the Batch API. Served here: {served}."
        )
        fields.fail(message, "body.model", "model_not_found")
    if models is not None and (tasks := models[model]) is not None:
        check_answers(model, tasks, url, "body.model")
    return Line(custom_id, url, model, body_of(raw, body), body)
