"""A file on its way from a client into the store: the parts of the form in any order, the content
straight to disk.

An upload that ends early, for whatever reason, leaves nothing.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from api.http.errors import MayExist
from api.http.multipart import FormPart, MultipartReader
from api.http.request_body import chunks_of
from api.state import ApiState
from jobs.protocol import fields
from jobs.protocol.lines import decode_json
from jobs.protocol.results import ApiError
from jobs.queue.scripts import QueueUnavailable
from jobs.store.file_store import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    PURPOSES,
    FileRecord,
    Upload,
)
from jobs.store.input_formats import content_problem, name_problem

P = ParamSpec("P")
T = TypeVar("T")

_OTHER_FILE_BYTES = 512 * 1024 * 1024
_FORM_BYTES = 256 * 1024  # of a body beside the file
_FIELD_BYTES = 4096
_WRITE_BYTES = 1 << 20  # at once, off the event loop
_NAME_LENGTH = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

EXPIRY = "expires_after"  # as one part, of JSON; the next two are its members as parts of their own
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
EXPIRY_SCHEMA = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"type": "string", "enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS},
    },
}
"""What `read_expiry` takes."""

# Of their own, so that no live call waits for a slow disk
_WRITERS = ThreadPoolExecutor(8, "upload")
_FIELDS = ("purpose", EXPIRY, ANCHOR, SECONDS)


async def receive_file(request: Request, state: ApiState, tenant: str) -> FileRecord:
    """Store the file of a form. Raise `ApiError`, `StoreError`, `QueueUnavailable`, and
    `ClientDisconnect`.
    """
    reader = MultipartReader(request.headers.get("content-type", ""))
    form = _Form(state, tenant, _announced(request))
    try:
        form.check_size()
        async for chunk in chunks_of(request):
            form.received += len(chunk)
            for piece in reader.feed(chunk):
                await form.take(piece)
            form.check_size()
        reader.finish()
        return await form.commit()
    except asyncio.CancelledError:
        form.close()  # here: of a server that stops, a thread that was asked now may never run
        raise
    finally:
        if form.upload is not None:
            await _on_disk(form.close)


class _Form:
    """The parts that came so far."""

    def __init__(self, state: ApiState, tenant: str, announced: int) -> None:
        self.received = 0  # of the body, in bytes
        self.upload: Upload | None = None
        self._files = state.files
        self._settings = state.settings
        self._unless_away = state.fleet.unless_away
        self._tenant = tenant
        self._announced = announced
        self._fields: dict[str, bytes] = {}
        self._part = FormPart("", None)
        self._filename = ""
        self._buffer = bytearray()
        self._size = 0

    async def take(self, piece: FormPart | bytes) -> None:
        """The next piece of the body."""
        if isinstance(piece, FormPart):
            await self._begin(piece)
        elif self._part.name == "file":
            self._size += len(piece)
            self._buffer += piece
            if len(self._buffer) >= _WRITE_BYTES:
                self.check_size()
                await self._write()
        elif self._part.name in _FIELDS:
            self._fields[self._part.name] += piece
            if len(self._fields[self._part.name]) > _FIELD_BYTES:
                fields.fail(
                    f"Invalid '{self._part.name}': longer than {_FIELD_BYTES} bytes.",
                    self._part.name,
                    "string_above_max_length",
                )

    def check_size(self) -> None:
        """Raise the 413 as soon as it is certain: by what the client announced, or by what came."""
        limit = self._limit()
        if max(self._announced, self.received) > limit + _FORM_BYTES or self._size > limit:
            raise ApiError(
                413,
                f"The file is too large: files may have up to {limit} bytes.",
                param="file",
                code="request_too_large",
            )

    async def commit(self) -> FileRecord:
        """The file as it is stored, once the form is whole."""
        self._part = FormPart("", None)
        if (upload := self.upload) is None:
            fields.missing("file")
        self._check_fields()
        if "purpose" not in self._fields:
            fields.missing("purpose")
        self.check_size()
        await self._write()
        upload.purpose = self._text("purpose")
        if upload.purpose == "batch":
            _check_format(content_problem(self._filename, upload.head, self._size))
        elif not self._size:
            fields.fail("Invalid 'file': the file is empty.", "file", "empty_file")
        upload.expires_seconds = self._expires_seconds()
        self.upload = None  # its thread closes it, also where that is not waited for
        committing = asyncio.ensure_future(_on_disk(_commit, upload))
        try:
            return await self._unless_away(asyncio.shield(committing))
        except QueueUnavailable as error:
            if committing.done():
                return committing.result()
            raise MayExist(str(error)) from error

    def close(self) -> None:
        """Drop what was not committed."""
        if self.upload is not None:
            self.upload.close()

    async def _begin(self, part: FormPart) -> None:
        self._part = part
        if part.name.startswith(EXPIRY) and part.name not in _FIELDS:
            fields.fail(f"Unknown parameter: '{fields.shown(part.name)}'.", EXPIRY, "unknown_parameter")
        if part.name in _FIELDS:
            if part.name in self._fields:
                fields.fail(f"'{part.name}' is given twice.", part.name, "invalid_value")
            self._fields[part.name] = b""
        if part.name != "file":
            return
        if self.upload is not None:
            fields.fail("'file' is given twice: one upload is one file.", "file", "invalid_value")
        self._filename = _base_name(part.filename)
        self._check_fields()
        self.check_size()
        begin = partial(self._files.begin, filename=self._filename, purpose="", tenant=self._tenant)
        beginning = asyncio.ensure_future(_on_disk(begin))
        try:
            self.upload = await self._unless_away(asyncio.shield(beginning))
        except BaseException:
            beginning.add_done_callback(_abandon)  # its thread goes on
            raise

    async def _write(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if self.upload is not None:
            await _on_disk(self.upload.write, data)

    def _limit(self) -> int:
        """What the file may have; the most that any may, while its purpose is unknown."""
        purpose = self._fields.get("purpose")
        if purpose is None or self._part.name == "purpose":  # of which there may come more
            return max(self._settings.max_file_bytes, _OTHER_FILE_BYTES)
        return self._settings.max_file_bytes if purpose == b"batch" else _OTHER_FILE_BYTES

    def _check_fields(self) -> None:
        """What can be known to be wrong from the fields that came whole."""
        if "purpose" in self._fields:
            purpose = fields.choice(self._text("purpose"), "purpose", PURPOSES)
            if purpose == "batch":
                _check_format(name_problem(self._filename))
        if ANCHOR in self._fields:
            fields.choice(self._text(ANCHOR), ANCHOR, ("created_at",))
        if SECONDS in self._fields:
            seconds = self._text(SECONDS)
            if not re.fullmatch(r"[+-]?[0-9]{1,30}", seconds):
                fields.wrong_type(seconds, "an integer", SECONDS)
            fields.integer(int(seconds), SECONDS, MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)
        if EXPIRY in self._fields:
            self._expiry()

    def _expires_seconds(self) -> int | None:
        """After how many seconds the file expires, once the form is whole."""
        given = [name for name in (EXPIRY, ANCHOR, SECONDS) if name in self._fields]
        if given == [EXPIRY]:
            return self._expiry()
        if EXPIRY in given:
            fields.fail(f"'{EXPIRY}' is given twice.", EXPIRY, "invalid_value")
        if len(given) == 1:
            fields.missing(SECONDS if given == [ANCHOR] else ANCHOR)
        return int(self._text(SECONDS)) if given else None

    def _expiry(self) -> int:
        try:
            return read_expiry(decode_json(self._fields[EXPIRY]), EXPIRY)
        except ValueError as error:
            fields.fail(f"Invalid '{EXPIRY}': it is not valid JSON: {error}.", EXPIRY, "invalid_value")

    def _text(self, name: str) -> str:
        return self._fields[name].decode("utf-8", "replace")


def _abandon(beginning: asyncio.Future[Upload]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        _WRITERS.submit(beginning.result().close)


def _commit(upload: Upload) -> FileRecord:
    with upload:
        return upload.commit()


async def _on_disk(action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_WRITERS, partial(action, *arguments, **options))


def read_expiry(value: Any, param: str) -> int:
    """Return the seconds of OpenAI's `expires_after`. Raise `ApiError`."""
    expiry = fields.mapping(value, param)
    fields.choice(fields.required(expiry, "anchor", f"{param}."), f"{param}.anchor", ("created_at",))
    seconds = fields.required(expiry, "seconds", f"{param}.")
    return fields.integer(seconds, f"{param}.seconds", MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)


def _check_format(problem: str | None) -> None:
    """Raise `ApiError`, in the hosted service's words and ours, if there is a problem."""
    if problem is not None:
        may_be = "Must be .jsonl, .jsonl.gz, .jsonl.zst or .parquet."
        raise ApiError(400, f"Invalid file format for Batch API. {may_be} {problem}")


def _announced(request: Request) -> int:
    """Bytes of the body by its Content-Length; 0 for one that says none."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _base_name(filename: str | None) -> str:
    """The last component of a file's name, whichever system's path it was."""
    if not filename:
        fields.missing("file")
    name = re.split(r"[/\\]", filename)[-1]
    if name in ("", ".", "..") or _CONTROL.search(name):
        fields.fail(f"Invalid 'file': '{fields.shown(filename)}' is no name for a file.", "file", "invalid_value")
    return fields.text(name, "file", _NAME_LENGTH)
