"""A model's defaults for the parameters that a call leaves unset, such as those of its
generation_config.json.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.lines import decode_json
from jobs.protocol.parameters import rows
from jobs.protocol.requests import BY_WORKER, SOFT_MAX_TOKENS, DefaultsMark
from jobs.protocol.results import ApiError

DefaultParameters = dict[str, int | float]
"""Values by the parameter's name."""

_LIMITS = ("max_tokens", "max_completion_tokens")
_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"
GENERATION_NAMES = tuple(_NAMES)
"""Names in a generation_config.json that count."""

_KNOWN = {row.name: row for row in rows()}
_Own = msgspec.defstruct("_Own", [(name, Any, None) for name in (*_NAMES.values(), "max_completion_tokens")])
_decode_own = msgspec.json.Decoder(_Own).decode


def read_generation(values: Mapping[str, Any]) -> DefaultParameters:
    """Return the defaults that a generation config sets to another value than the usual one.

    Raise ValueError for a value that no call may have.
    """
    found: DefaultParameters = {}
    for name, parameter in _NAMES.items():
        row, value = _KNOWN[parameter], values.get(name)
        try:
            read = row.default if value is None else row.parameter.values_of(chat=True).read(value, name)
        except ApiError as error:
            raise ValueError(error.message.rstrip(".")) from None
        if read != row.default:
            found[parameter] = read
    return found


def unset(defaults: DefaultParameters, values: Mapping[str, Any], chat: bool) -> DefaultParameters:
    """Return the defaults for what a body leaves unset or null.

    A completion has its own default of `max_tokens`.
    """
    is_limited = not chat or any(values.get(name) is not None for name in _LIMITS)
    skipped = {"max_tokens"} if is_limited else set()
    return {name: value for name, value in defaults.items() if name not in skipped and values.get(name) is None}


def with_defaults(body: bytes, url: str, defaults: DefaultParameters | None) -> tuple[bytes, DefaultsMark]:
    """Return the body of a line with its model's defaults (None: unknown), and the request's mark.

    They are its last members, which count where the body names one of them with null.
    """
    endpoint = ENDPOINTS.get(url)
    if endpoint is None or defaults is None:
        return body, "" if endpoint is None else BY_WORKER
    added = unset(defaults, _own_values(body), endpoint.is_chat) if defaults else {}
    if not added:
        return body, ""
    extended = b"%b,%b" % (body.rstrip().removesuffix(b"}"), msgspec.json.encode(added).removeprefix(b"{"))
    return extended, SOFT_MAX_TOKENS if "max_tokens" in added else ""


def _own_values(body: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.structs.asdict(_decode_own(body))
    except msgspec.DecodeError:  # values that the strict reader refuses
        values: dict[str, Any] = decode_json(body)
        return values
