"""The rows of a table as the lines of a batch, by the options of `run-batch`.

A line depends only on its row, the row's number and the options, so that every reading gives the
same line. The line also has data of the row besides the request.
"""

import json
from collections.abc import Collection
from typing import Any

import msgspec

from jobs.batch.prompt_template import TemplatePiece, parse_template
from jobs.protocol.chat import CHAT
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.lines import decode_json
from jobs.protocol.results import ApiError

ROW_ENDPOINTS = tuple(url for url, endpoint in BATCH_ENDPOINTS.items() if endpoint.takes_one_text)
"""Endpoints whose calls need only one text."""

_ID_COLUMN = "custom_id"


class RowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options for requests from rows; one of `prompt_column` and `template` is set."""

    prompt_column: str | None = None
    template: str | None = None
    id_column: str | None = None  # default: custom_id if it exists, else the row's number
    keep_columns: tuple[str, ...] = ()
    endpoint: str = CHAT
    body: dict[str, Any] = {}  # of every request, except the prompt


class RowExtras(msgspec.Struct):
    """Data of a row in its line, besides the request."""

    columns: dict[str, Any] = {}
    null_column: str | None = None  # a column that the prompt needs and that is null
    schema: str = ""  # of `columns`, in the first line: Arrow's schema in base64

    def problem(self, number: int) -> ApiError | None:
        """Return the error for a row without a prompt; rows count from 1."""
        if self.null_column is None:
            return None
        message = f"Row {number} has no value in the column {self.null_column}, so there is no prompt."
        return ApiError(400, message, param=self.null_column, code="null_value")


class RowRequests:
    """Builds lines from rows with these columns."""

    def __init__(self, options: RowOptions, names: Collection[str]) -> None:
        self._options = options
        self._id = options.id_column or (_ID_COLUMN if _ID_COLUMN in names else None)
        self._pieces = _pieces_of(options)
        self._endpoint = BATCH_ENDPOINTS[options.endpoint]
        asked = [self._id, *(piece.column for piece in self._pieces), *options.keep_columns]
        self.columns = list(dict.fromkeys(name for name in asked if name is not None))

    def line(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """Return the line of a row of JSON values."""
        options = self._options
        line: dict[str, Any] = {"custom_id": self._id_of(number, row), "method": "POST", "url": options.endpoint}
        body = options.body
        null = next((name for _, name in self._pieces if name is not None and _is_null(row[name])), None)
        if null is None:
            text = "".join(text + ("" if name is None else _text_of(row[name])) for text, name in self._pieces)
            body = body | self._endpoint.body_of_text(text)
        else:
            line["null_column"] = null
            body = body | {self._endpoint.prompt_field: {}}  # no worker accepts it
        if options.keep_columns:
            line["columns"] = {name: row[name] for name in options.keep_columns}
        return line | {"body": body}

    def _id_of(self, number: int, row: dict[str, Any]) -> str:
        value = None if self._id is None else row[self._id]
        return f"row-{number}" if _is_null(value) or value == "" else _text_of(value)


def read_extras(raw: bytes) -> RowExtras:
    """Return the data of a line's row."""
    try:
        return _decode(raw)
    except msgspec.DecodeError:  # NaN and the like
        return msgspec.convert(decode_json(raw), RowExtras)


_decode = msgspec.json.Decoder(RowExtras).decode


def _pieces_of(options: RowOptions) -> list[TemplatePiece]:
    if options.template is not None:
        return parse_template(options.template)
    return [TemplatePiece("", options.prompt_column)]


def _is_null(value: Any) -> bool:
    return value is None or value != value  # NaN: pandas' null


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        value = msgspec.json.decode(msgspec.json.encode(value))  # null for NaN and infinity
    return json.dumps(value, ensure_ascii=False)
