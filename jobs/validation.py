"""One validator for lines of batch files and for live calls: `check_line` looks at a line's structure, `parse_call` into its body."""

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from jobs import fields
from jobs.lines import decode_json, read_line
from jobs.results import ApiError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)

MOST_STOP_STRINGS = 16
MOST_STOP_TOKEN_IDS = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class LineRequest(msgspec.Struct, frozen=True):
    """A line that may run."""

    custom_id: str
    endpoint: str
    model: str
    body: bytes  # JSON as it stands in the line, so without a model where the line names none


class LineError(msgspec.Struct, frozen=True):
    """Why a file is refused, as an entry of the batch's `errors`."""

    code: str
    line: int | None  # from 1
    param: str | None
    message: str


class Call(msgspec.Struct, frozen=True):
    """A valid call; either `prompts` or `messages` is set."""

    endpoint: str
    model: str
    prompts: list[str | list[int]]  # one text, or one list of token ids
    messages: list[dict[str, Any]]  # role, content (a string), and name, tool_calls, tool_call_id as given
    max_tokens: int | None  # None: the rest of the context
    temperature: float
    top_p: float
    top_k: int  # 0: all
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool


def check_line(
    raw: bytes, number: int, endpoint: str | None = None, models: Collection[str] | None = None, default_model: str | None = None
) -> LineRequest | LineError:
    """Checks the structure of line `number` (from 1) of a batch file: what it lacks makes the whole file be refused.

    `endpoint` is the only url allowed (None: any of `ENDPOINTS`), `models` those that are served (None: not looked at), `default_model`
    that of a line that names none (None: every line must).
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


def parse_call(endpoint: str, body: Any) -> Call:
    """Reads the body of a call. Raises `ApiError` 400 for a bad value, naming it; parameters that nobody knows are ignored."""
    body = fields.mapping(body, "body")
    model = fields.text(_required(body, "model"), "model")
    for name, is_neutral in _NOT_YET.items():
        if body.get(name) is not None:
            is_neutral(body[name], name)
    chat = endpoint == CHAT
    stream = _optional(body, "stream", fields.boolean, False)
    return Call(
        endpoint=endpoint,
        model=model,
        prompts=[] if chat else [_prompt(_required(body, "prompt"))],
        messages=_messages(_required(body, "messages")) if chat else [],
        max_tokens=_max_tokens(body, chat),
        temperature=_optional(body, "temperature", lambda value, name: fields.number(value, name, 0, 2), 1.0),
        top_p=_optional(body, "top_p", lambda value, name: fields.number(value, name, 0, 1, above_low=True), 1.0),
        top_k=max(0, _optional(body, "top_k", lambda value, name: fields.integer(value, name, -1, _INT32), 0)),
        seed=_optional(body, "seed", lambda value, name: fields.integer(value, name, -_INT64 - 1, _INT64), None),
        stop=_optional(body, "stop", _stop, []),
        stop_token_ids=_optional(body, "stop_token_ids", _stop_token_ids, []),
        ignore_eos=_optional(body, "ignore_eos", fields.boolean, False),
        stream=stream,
        include_usage=_include_usage(body, stream),
    )


def decode_body(raw: bytes) -> Any:
    """JSON from outside. Raises `ApiError` 400 where it is none."""
    try:
        return decode_json(raw)
    except ValueError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}.") from error


def _read_line(
    line: dict[str, Any], raw: bytes, endpoint: str | None, models: Collection[str] | None, default_model: str | None
) -> LineRequest:
    custom_id = fields.text(_required(line, "custom_id"), "custom_id")
    if not custom_id:
        fields.fail("Invalid 'custom_id': empty string.", "custom_id", "invalid_value")
    method = _required(line, "method")
    if method != "POST":
        fields.fail("Invalid method: each request of a batch must be a 'POST'.", "method", "invalid_method")
    url = _required(line, "url")
    if url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        fields.fail(f"Invalid url: expected {endpoint or ' or '.join(ENDPOINTS)}.", "url", "invalid_url")
    body = fields.mapping(_required(line, "body"), "body")
    if body.get("stream") is True:
        fields.fail("A batch cannot stream: leave out 'stream' or set it to false.", "body.stream", "streaming_unsupported")
    model = default_model if body.get("model") is None else None
    if model is None:
        model = fields.text(_required(body, "model", "body."), "body.model")
    if models is not None and model not in models:
        fields.fail(f"The model '{model}' is not served; there is: {', '.join(sorted(models)) or 'none'}.", "body.model", "model_not_found")
    return LineRequest(custom_id, url, model, read_line(raw).body)


def _required(values: dict[str, Any], name: str, prefix: str = "") -> Any:
    value = values.get(name)
    if value is None:
        fields.missing(prefix + name)
    return value


def _optional(values: dict[str, Any], name: str, read: Callable[[Any, str], Any], default: Any) -> Any:
    value = values.get(name)
    return default if value is None else read(value, name)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            fields.unsupported("prompt", "must be one text or one list of token ids; send one request for each.")
        value = value[0]
    if isinstance(value, str):
        if not value:
            fields.fail("Invalid 'prompt': empty string.", "prompt", "invalid_value")
        return fields.text(value, "prompt")
    if not isinstance(value, list):
        fields.wrong_type(value, "a string or an array of token ids", "prompt")
    return [fields.integer(token, f"prompt.[{i}]", 0, _INT32) for i, token in enumerate(fields.array(value, "prompt", least=1))]


def _messages(value: Any) -> list[dict[str, Any]]:
    return [_message(message, f"messages.[{i}]") for i, message in enumerate(fields.array(value, "messages", least=1))]


def _message(value: Any, param: str) -> dict[str, Any]:
    given = fields.mapping(value, param)
    role = fields.text(_required(given, "role", f"{param}."), f"{param}.role")
    if role not in _ROLES:
        choices = ", ".join(f"'{known}'" for known in _ROLES)
        fields.fail(f"Invalid value: '{role}'. Supported values are: {choices}.", f"{param}.role", "invalid_value")
    message: dict[str, Any] = {"role": role, "content": _content(given, role, f"{param}.content")}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = fields.text(given[name], f"{param}.{name}")
    if given.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(given["tool_calls"], f"{param}.tool_calls")
    return message


def _content(message: dict[str, Any], role: str, param: str) -> str:
    content = message.get("content")
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return ""
        fields.missing(param)
    if isinstance(content, str):
        return fields.text(content, param)
    if not isinstance(content, list):
        fields.wrong_type(content, "a string or an array of text parts", param)
    return "\n".join(_text_part(part, f"{param}.[{i}]") for i, part in enumerate(fields.array(content, param, least=1)))


def _text_part(value: Any, param: str) -> str:
    part = fields.mapping(value, param)
    kind = fields.text(_required(part, "type", f"{param}."), f"{param}.type")
    if kind != "text":
        fields.fail(f"Invalid value: '{kind}'. Supported values are: 'text'.", f"{param}.type", "invalid_value")
    return fields.text(_required(part, "text", f"{param}."), f"{param}.text")


def _tool_calls(value: Any, param: str) -> list[Any]:
    calls = fields.array(value, param)
    for i, call in enumerate(calls):
        fields.mapping(call, f"{param}.[{i}]")
    try:
        msgspec.json.encode(calls)
    except (UnicodeEncodeError, RecursionError):
        fields.fail(f"Invalid '{param}': it cannot be written as JSON.", param, "invalid_value")
    return calls


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    default = None if chat else _COMPLETION_MAX_TOKENS
    limit: int | None = _optional(body, name, lambda value, param: fields.integer(value, param, 1, _INT32), default)
    return limit


def _stop(value: Any, param: str) -> list[str]:
    if isinstance(value, str):
        value, names = [value], [param]
    elif isinstance(value, list):
        names = [f"{param}.[{i}]" for i in range(len(fields.array(value, param, most=MOST_STOP_STRINGS)))]
    else:
        fields.wrong_type(value, "a string or an array of strings", param)
    for item, name in zip(value, names, strict=True):
        if not fields.text(item, name):
            fields.fail(f"Invalid '{name}': empty string.", name, "invalid_value")
    return list(value)


def _stop_token_ids(value: Any, param: str) -> list[int]:
    ids = fields.array(value, param, most=MOST_STOP_TOKEN_IDS)
    return [fields.integer(token, f"{param}.[{i}]", 0, _INT32) for i, token in enumerate(ids)]


def _include_usage(body: dict[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        fields.fail("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options", "invalid_value")
    value = fields.mapping(options, "stream_options").get("include_usage")
    return value is not None and fields.boolean(value, "stream_options.include_usage")


def _only_one(value: Any, param: str) -> None:
    if fields.integer(value, param, 1, 128) != 1:
        fields.unsupported(param, "must be 1.")


def _only_off(value: Any, param: str) -> None:
    if value is not False and value != 0:
        fields.unsupported(param, "must be left out: log probabilities are not given.")


def _only_number(neutral: float) -> Callable[[Any, str], None]:
    def check(value: Any, param: str) -> None:
        if fields.number(value, param, -1e9, 1e9) != neutral:
            fields.unsupported(param, f"must be {neutral:g}.")

    return check


def _only_empty(value: Any, param: str) -> None:
    if value not in ("", [], {}, False):
        fields.unsupported(param, "must be left out.")


def _only_plain_text(value: Any, param: str) -> None:
    kind = fields.mapping(value, param).get("type")
    if kind != "text":
        fields.unsupported(f"{param}.type", "must be 'text'.")


# Parameters that change an answer and cannot be honoured: only their neutral values pass.
_NOT_YET: dict[str, Callable[[Any, str], None]] = {
    "n": _only_one,
    "best_of": _only_one,
    "logprobs": _only_off,
    "top_logprobs": _only_off,
    "prompt_logprobs": _only_off,
    "echo": _only_empty,
    "suffix": _only_empty,
    "logit_bias": _only_empty,
    "bad_words": _only_empty,
    "tools": _only_empty,
    "functions": _only_empty,
    "presence_penalty": _only_number(0),
    "frequency_penalty": _only_number(0),
    "repetition_penalty": _only_number(1),
    "min_p": _only_number(0),
    "min_tokens": _only_number(0),
    "response_format": _only_plain_text,
}
