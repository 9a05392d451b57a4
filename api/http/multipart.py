"""multipart/form-data as it arrives: each part's name, then the pieces of its content.

Nothing is kept, so a body may be of any length.
"""

import logging
import re
from dataclasses import dataclass
from typing import NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jobs.protocol.results import ApiError

_MAX_PARTS = 64
_EXTENDED_NAME = re.compile(rb";\s*filename\*\s*=", re.IGNORECASE)

# It warns of clients' errors, which the clients get as answers
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True)
class FormPart:
    """The beginning of a part; its content follows. A part without a file name is a field."""

    name: str
    filename: str | None


class MultipartReader:
    """Parse a body in pieces of any size. All methods raise `ApiError`."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data":
            raise ApiError(400, "The body must be multipart/form-data.", code="invalid_content_type")
        if not boundary:
            _malformed("its Content-Type names no boundary")
        self._found: list[FormPart | bytes] = []
        self._parts = 0
        self._ended = False
        self._header = b""
        self._value = b""
        self._disposition = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            _malformed(str(error))

    def feed(self, data: bytes) -> list[FormPart | bytes]:
        """Return the beginnings of parts and the content in the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            _malformed(str(error))
        found, self._found = self._found, []
        return found

    def finish(self) -> None:
        """Check that the body ended with its last boundary."""
        if not self._ended:
            _malformed("it ends before its last boundary")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            _malformed(f"it has more than {_MAX_PARTS} parts")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition.decode("latin-1"))
        if b"filename" not in options and _EXTENDED_NAME.search(self._disposition):
            _malformed("a part has 'filename*', which RFC 7578 rules out, and no 'filename'")
        if kind != b"form-data" or b"name" not in options:
            _malformed("a part of it has no name")
        filename = options.get(b"filename")
        name = options[b"name"].decode("utf-8", "replace")
        self._found.append(FormPart(name, None if filename is None else filename.decode("utf-8", "replace")))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(data[start:end])

    def _end(self) -> None:
        self._ended = True


def _malformed(why: str) -> NoReturn:
    raise ApiError(400, f"The body is not well-formed multipart/form-data: {why}.", code="invalid_multipart")
