"""One validator for lines of batch files and for live calls: `check_line` looks at a line's
structure, `parse_call` into its body.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from jobs.protocol import fields, parameters
from jobs.protocol.lines import decode_json, read_line
from jobs.protocol.prompts import read_messages, read_prompts
from jobs.protocol.results import ApiError
from jobs.protocol.unsupported import refuse_unsupported

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)

_BATCH_CODES = frozenset(
    {"invalid_json_line", "missing_required_parameter", "invalid_url", "streaming_unsupported", "model_not_found"}
)


class LineRequest(msgspec.Struct, frozen=True):
    """A line that may run."""

    custom_id: str
    endpoint: str
    model: str
    body: bytes  # JSON as in the line, so without a model where the line names none


class LineError(msgspec.Struct, frozen=True):
    """Why a file is refused, as an entry of the batch's `errors`."""

    code: str
    line: int | None  # from 1
    param: str | None
    message: str


class Call(msgspec.Struct, frozen=True):
    """A valid call; either `prompts` or `messages` is set. Counts of tokens fit 32 bits."""

    endpoint: str
    model: str
    prompts: list[str | list[int]]  # texts, or lists of token ids
    # Role, content (a string), and name, tool_calls, tool_call_id as given
    messages: list[dict[str, Any]]
    n: int  # answers to each prompt
    best_of: int  # answers to generate, of which the best `n` count
    max_tokens: int | None  # None: the rest of the context
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]  # by token id
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    bad_words: list[str]
    ignore_eos: bool
    skip_special_tokens: bool
    # How many of the most likely tokens beside the answer's own; None: no log probabilities
    logprobs: int | None
    prompt_logprobs: int | None  # the same for the prompt's, in vLLM's field
    echo: bool
    # How many of the prompt's last tokens are kept; -1: as many as the model can take
    truncate_prompt_tokens: int | None
    priority: int  # lower ones first
    stream: bool
    include_usage: bool

    @property
    def sequences(self) -> int:
        """How many the engine generates for it."""
        return max(1, len(self.prompts)) * self.best_of


def check_line(
    raw: bytes,
    number: int,
    endpoint: str | None = None,
    models: Collection[str] | None = None,
    default_model: str | None = None,
) -> LineRequest | LineError:
    """Check the structure of line `number` (from 1) of a batch file: what it lacks makes the whole
    file be refused.

    `endpoint` is the only url allowed (None: any of `ENDPOINTS`), `models` those that are served
    (None: not looked at), `default_model` that of a line that names none (None: every line must).
    """
    try:
        line = decode_json(raw)
        if not isinstance(line, dict):
            return LineError("invalid_json_line", number, None, "This line is not a JSON object.")
        return _read_line(line, raw, endpoint, models, default_model)
    except ValueError as error:
        return LineError("invalid_json_line", number, None, f"This line is not valid JSON: {error}.")
    except ApiError as error:
        return LineError(error.code or "invalid_value", number, error.param, error.message)


def check_batch_line(raw: bytes, number: int, endpoint: str | None, models: Collection[str]) -> LineRequest | LineError:
    """As `check_line`, for a batch that came through the API: also the body's type is looked at,
    and the codes are OpenAI's for batches.
    """
    found = check_line(raw, number, endpoint, models)
    if isinstance(found, LineRequest):
        try:
            _check_body(decode_json(found.body), found.endpoint)
            return found
        except ApiError as error:
            found = LineError("invalid_request", number, error.param, error.message)
    missing_in_body = found.code == "missing_required_parameter" and (found.param or "").startswith("body.")
    if found.code not in _BATCH_CODES or missing_in_body:
        return msgspec.structs.replace(found, code="invalid_request")
    return found


def parse_call(endpoint: str, body: Any) -> Call:
    """Read the body of a call.

    Raise `ApiError` 400 for a bad value, naming it; unknown parameters are ignored.
    """
    body = fields.mapping(body, "body")
    model = fields.text(fields.required(body, "model"), "model")
    chat = endpoint == CHAT
    refuse_unsupported(body, chat)
    stream = fields.optional(body, "stream", fields.boolean, False)
    n = fields.optional(body, "n", parameters.answers, 1)
    best_of = parameters.best_of(body, n, stream)
    max_tokens = parameters.max_tokens(body, chat)
    return Call(
        endpoint=endpoint,
        model=model,
        prompts=[] if chat else read_prompts(fields.required(body, "prompt"), "prompt", best_of),
        messages=read_messages(fields.required(body, "messages"), "messages") if chat else [],
        n=n,
        best_of=best_of,
        max_tokens=max_tokens,
        min_tokens=parameters.min_tokens(body, max_tokens),
        temperature=fields.optional(body, "temperature", parameters.temperature, 1.0),
        top_p=fields.optional(body, "top_p", parameters.top_p, 1.0),
        top_k=fields.optional(body, "top_k", parameters.top_k, 0),
        min_p=fields.optional(body, "min_p", parameters.min_p, 0.0),
        presence_penalty=fields.optional(body, "presence_penalty", parameters.penalty, 0.0),
        frequency_penalty=fields.optional(body, "frequency_penalty", parameters.penalty, 0.0),
        repetition_penalty=fields.optional(body, "repetition_penalty", parameters.repetition_penalty, 1.0),
        logit_bias=fields.optional(body, "logit_bias", parameters.logit_bias, {}),
        seed=fields.optional(body, "seed", parameters.seed, None),
        stop=fields.optional(body, "stop", parameters.stop_strings, []),
        stop_token_ids=fields.optional(body, "stop_token_ids", parameters.stop_token_ids, []),
        bad_words=fields.optional(body, "bad_words", parameters.bad_words, []),
        ignore_eos=fields.optional(body, "ignore_eos", fields.boolean, False),
        skip_special_tokens=fields.optional(body, "skip_special_tokens", fields.boolean, True),
        logprobs=parameters.logprobs(body, chat),
        prompt_logprobs=parameters.prompt_logprobs(body, stream),
        echo=parameters.echo(body, chat),
        truncate_prompt_tokens=fields.optional(body, "truncate_prompt_tokens", parameters.truncation, None),
        priority=fields.optional(body, "priority", parameters.int32, 0),
        stream=stream,
        include_usage=parameters.include_usage(body, stream),
    )


def decode_body(raw: bytes) -> Any:
    """JSON from outside. Raises `ApiError` 400 where it is none."""
    try:
        return decode_json(raw)
    except ValueError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}.") from error


def _check_body(body: dict[str, Any], endpoint: str) -> None:
    """What a request cannot do without. Raises `ApiError`."""
    if endpoint == CHAT:
        fields.array(fields.required(body, "messages", "body."), "body.messages")
    elif not isinstance(prompt := fields.required(body, "prompt", "body."), str | list):
        fields.wrong_type(prompt, "a string or an array", "body.prompt")
    if body.get("stream") is not None:
        fields.boolean(body["stream"], "body.stream")


def _read_line(
    line: dict[str, Any], raw: bytes, endpoint: str | None, models: Collection[str] | None, default_model: str | None
) -> LineRequest:
    custom_id = fields.text(fields.required(line, "custom_id"), "custom_id", least=1)
    method = fields.required(line, "method")
    if method != "POST":
        fields.fail("Invalid method: each request of a batch must be a 'POST'.", "method", "invalid_method")
    url = fields.required(line, "url")
    if url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        fields.fail(f"Invalid url: expected {endpoint or ' or '.join(ENDPOINTS)}.", "url", "invalid_url")
    body = fields.mapping(fields.required(line, "body"), "body")
    if body.get("stream") is True:
        fields.fail(
            "A batch cannot stream: leave out 'stream' or set it to false.", "body.stream", "streaming_unsupported"
        )
    model = default_model if body.get("model") is None else None
    if model is None:
        model = fields.text(fields.required(body, "model", "body."), "body.model")
    if models is not None and model not in models:
        served = ", ".join(sorted(models)) or "none"
        fields.fail(
            f"The model '{fields.shown(model)}' is not served; there is: {served}.", "body.model", "model_not_found"
        )
    return LineRequest(custom_id, url, model, read_line(raw).body)
