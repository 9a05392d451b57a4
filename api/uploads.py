"""A file on its way from a client into the store: the fields of its form, and its checks."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from api.file_objects import file_object
from api.forms import MultipartForm, on_disk
from api.http.errors import MayExist
from api.http.multipart import FormPart
from api.idempotency import Answer, hold_key, key_of
from api.settings import ApiSettings
from api.tasks import start
from jobs.protocol import fields
from jobs.protocol.ids import FILE
from jobs.protocol.lines import decode_json
from jobs.protocol.results import ApiError
from jobs.queue.scripts import QueueUnavailable
from jobs.store.file_store import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    PURPOSES,
    FileStore,
    Upload,
)
from jobs.store.idempotency import HeldKey
from jobs.store.input_formats import content_problem, name_problem

_OTHER_FILE_BYTES = 512 * 1024 * 1024
_NAME_LENGTH = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

EXPIRY = "expires_after"  # as one part of JSON; the next two are its members as parts of their own
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
EXPIRY_SCHEMA = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"type": "string", "enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS},
    },
}
"""JSON Schema of the value that `read_expiry` reads."""


class FileWriter:
    """A file on its way into the store, under the client's idempotency key if it gave one."""

    def __init__(self, files: FileStore, upload: Upload, key: HeldKey | None) -> None:
        self.upload = upload
        self._files = files
        self._key = key
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.upload.write(data)
        if self._key is not None:
            self._digest.update(data)

    def commit(self) -> Answer:
        """Store the file, unless an earlier call with the same key did, and close the writer."""
        try:
            if self._key is None:
                return file_object(self.upload.commit()), False
            upload = self.upload
            given = [upload.filename, upload.purpose, upload.expires_seconds, self._digest.hexdigest()]
            digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()
            return self._key.make_once(digest, upload.id, self._find, lambda _: self._make())
        finally:
            self.close()

    def close(self) -> None:
        """Remove uncommitted content and release the key."""
        self.upload.close()
        if self._key is not None:
            self._key.close()

    def _make(self) -> dict[str, Any]:
        with self.upload:  # so that nothing is found of a refused file
            return file_object(self.upload.commit())

    def _find(self, file_id: str) -> dict[str, Any] | None:
        record = self._files.finish(file_id)
        return None if record is None else file_object(record)


class FileForm(MultipartForm[FileWriter, Answer]):
    """The form of a file."""

    content, noun = "file", "file"
    field_names = ("purpose", EXPIRY, ANCHOR, SECONDS)

    def __init__(self, request: Request, tenant: str) -> None:
        super().__init__(request)
        self._tenant = tenant
        self._filename = ""

    async def begin(self, part: FormPart) -> None:
        """Begin a part."""
        if part.name.startswith(EXPIRY) and part.name not in self.field_names:
            fields.fail(f"Unknown parameter: '{fields.shown(part.name)}'.", EXPIRY, "unknown_parameter")
        await super().begin(part)

    def opener(self, part: FormPart) -> Callable[[], FileWriter]:
        """Return the function that begins the file."""
        self._filename = base_name(part.filename, "file")
        self._check_fields()
        return self._open

    async def commit(self) -> Answer:
        """Commit the whole form and return the stored file."""
        if (writer := self.writer) is None:
            fields.missing("file")
        self._check_fields()
        if "purpose" not in self.given:
            fields.missing("purpose")
        self.check_size()
        await self.write()
        writer.upload.purpose = self._text("purpose")
        check_content(writer.upload)
        writer.upload.expires_seconds = self._expires_seconds()
        self.writer = None  # its thread closes it, even if nothing waits for that
        committing = start(on_disk(writer.commit))
        try:
            return await self.state.fleet.unless_away(asyncio.shield(committing))
        except QueueUnavailable as error:
            if committing.done():
                return committing.result()
            if key_of(self.request) is not None:
                raise
            raise MayExist(str(error)) from error

    def _open(self) -> FileWriter:
        key = hold_key(self.request, FILE)
        try:
            files = self.state.files
            upload = files.begin(filename=self._filename, purpose="", tenant=self._tenant)
        except BaseException:
            if key is not None:
                key.close()
            raise
        return FileWriter(files, upload, key)

    def limit(self) -> int:
        """Return the most bytes that the file may have, of any purpose while its own is unknown."""
        purpose = self.given.get("purpose")
        if purpose is None or self.part.name == "purpose":  # a longer one may still come
            return max(self.state.settings.max_file_bytes, _OTHER_FILE_BYTES)
        return most_bytes(self.state.settings, purpose.decode("utf-8", "replace"))

    def _check_fields(self) -> None:
        """Refuse errors in the fields that have come whole."""
        if "purpose" in self.given:
            check_purpose(self._text("purpose"), self._filename)
        if ANCHOR in self.given:
            fields.choice(self._text(ANCHOR), ANCHOR, ("created_at",))
        if SECONDS in self.given:
            seconds = self._text(SECONDS)
            if not re.fullmatch(r"[+-]?[0-9]{1,30}", seconds):
                fields.wrong_type(seconds, "an integer", SECONDS)
            fields.integer(int(seconds), SECONDS, MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)
        if EXPIRY in self.given:
            self._expiry()

    def _expires_seconds(self) -> int | None:
        """Return the seconds after which the file expires, once the form is whole."""
        given = [name for name in (EXPIRY, ANCHOR, SECONDS) if name in self.given]
        if given == [EXPIRY]:
            return self._expiry()
        if EXPIRY in given:
            fields.fail(f"'{EXPIRY}' is given twice.", EXPIRY, "invalid_value")
        if len(given) == 1:
            fields.missing(SECONDS if given == [ANCHOR] else ANCHOR)
        return int(self._text(SECONDS)) if given else None

    def _expiry(self) -> int:
        try:
            return read_expiry(decode_json(self.given[EXPIRY]), EXPIRY)
        except ValueError as error:
            fields.fail(f"Invalid '{EXPIRY}': it is not valid JSON: {error}.", EXPIRY, "invalid_value")

    def _text(self, name: str) -> str:
        return self.given[name].decode("utf-8", "replace")


def most_bytes(settings: ApiSettings, purpose: str) -> int:
    """Return the largest size of a file of this purpose."""
    return settings.max_file_bytes if purpose == "batch" else _OTHER_FILE_BYTES


def check_purpose(purpose: str, filename: str) -> None:
    """Raise `ApiError` for an unknown purpose, and for a name that no file of it may have."""
    if fields.choice(purpose, "purpose", PURPOSES) == "batch":
        _check_format(name_problem(filename))


def check_content(upload: Upload) -> None:
    """Raise `ApiError` for a content that no file of its purpose may have."""
    if upload.purpose == "batch":
        _check_format(content_problem(upload.filename, upload.head, upload.bytes))
    elif not upload.bytes:
        fields.fail("Invalid 'file': the file is empty.", "file", "empty_file")


def base_name(filename: str | None, param: str) -> str:
    """Return the last component of a file's name, whichever system's path it was."""
    if not filename:
        fields.missing(param)
    name = re.split(r"[/\\]", filename)[-1]
    if name in ("", ".", "..") or _CONTROL.search(name):
        fields.fail(f"Invalid '{param}': '{fields.shown(filename)}' is no name for a file.", param, "invalid_value")
    return fields.text(name, param, _NAME_LENGTH)


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
