"""Conversion of requests, in every form that the client accepts, to batch lines."""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import msgspec

from batch_inference_pipeline.vocabulary import CHAT, PROMPT_FIELDS

CHUNK_BYTES = 128 * 2**20  # plus the longest line, this is below the server's default limit


class LineOptions(NamedTuple):
    """Defaults for lines that do not set these values."""

    model: str
    endpoint: str | None = None  # None: follows from the first request; chat for a text
    parameters: Mapping[str, Any] = MappingProxyType({})


class SpooledLines(NamedTuple):
    """Lines of one batch in an unnamed temporary file."""

    file: IO[bytes]
    custom_ids: list[str]
    endpoint: str


def spool(requests: Iterable[Any], options: LineOptions, most: int | None = None) -> Iterator[SpooledLines]:
    """Write the lines of requests to temporary files of up to `most` lines and about
    `CHUNK_BYTES` each; without `most`, to one file.

    A request is a text, a list of messages, a body, or a line of a batch. Raise ValueError for
    any other form.
    """
    rest, number = iter(requests), 0
    most_bytes = math.inf if most is None else CHUNK_BYTES
    while spooled := _spool(islice(rest, most), options, number, most_bytes):
        number += len(spooled.custom_ids)
        options = options._replace(endpoint=spooled.endpoint)
        yield spooled


def line_of(number: int, request: Any, options: LineOptions) -> dict[str, Any]:
    """Return the line of a request; requests count from 0."""
    given = request if isinstance(request, dict) and "body" in request else {"body": request}
    body = given["body"]
    url = given.get("url") or options.endpoint or _endpoint_of(body)
    if url not in PROMPT_FIELDS:
        raise ValueError(f"request {number} has the url {url}: it must be one of {', '.join(PROMPT_FIELDS)}")
    if isinstance(body, str) and url == CHAT:
        body = {PROMPT_FIELDS[url]: [{"role": "user", "content": body}]}
    elif isinstance(body, str | list) and body != []:
        body = {PROMPT_FIELDS[url]: body}
    elif not isinstance(body, dict):
        raise ValueError(f"request {number} is {body!r}: give a text, a list of messages, a body or a line of a batch")
    line = {"custom_id": given.get("custom_id") or f"request-{number}", "method": "POST", "url": url}
    return {**given, **line, "body": {"model": options.model, **options.parameters, **body}}


def _spool(requests: Iterable[Any], options: LineOptions, before: int, most_bytes: float) -> SpooledLines | None:
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is uploaded
    try:
        custom_ids = list[str]()
        for number, request in enumerate(requests, before):
            line = line_of(number, request, options)
            options = options._replace(endpoint=options.endpoint or line["url"])
            custom_ids.append(line["custom_id"])
            file.write(encoded(line))
            if file.tell() >= most_bytes:
                break
    except BaseException:
        file.close()
        raise
    if not custom_ids:
        file.close()
        return None
    return SpooledLines(file, custom_ids, options.endpoint or CHAT)


def encoded(line: Mapping[str, Any]) -> bytes:
    """Return a line encoded as JSONL. Pydantic objects, such as those of `openai`, are allowed."""
    return _encoder.encode(line) + b"\n"


def _as_json(value: Any) -> Any:
    if not hasattr(value, "model_dump"):
        raise TypeError(f"{value!r} cannot be written as JSON")
    return value.model_dump(mode="json", exclude_unset=True)


_encoder = msgspec.json.Encoder(enc_hook=_as_json)


def _endpoint_of(body: Any) -> str:
    if isinstance(body, dict):
        return next((url for url, name in PROMPT_FIELDS.items() if name in body), CHAT)
    return CHAT
