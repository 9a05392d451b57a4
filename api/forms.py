"""multipart/form-data of which one part is written straight to disk; parts come in any order.

Nothing remains of a form that ends early.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from starlette.requests import Request

from api.http.multipart import FormPart, MultipartReader
from api.http.request_body import announced, body_memory, chunks_of
from api.state import state_of
from jobs.protocol import fields
from jobs.protocol.results import ApiError

P = ParamSpec("P")
T = TypeVar("T")

_FORM_BYTES = 256 * 1024  # of a body, without its content
_FIELD_BYTES = 4096
_WRITE_BYTES = 1 << 20  # in one write, off the event loop

# Own threads, so that no live call waits for a slow disk
_WRITERS = ThreadPoolExecutor(8, "upload")


class Writer(Protocol):
    """The destination of the content; `close` removes uncommitted content."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def close(self) -> None:
        """Remove uncommitted content."""


W = TypeVar("W", bound=Writer)


class MultipartForm(ABC, Generic[W, T]):
    """The parts of a form that have come so far."""

    content: str  # the name of the part that is written to disk
    noun: str  # its name in errors
    field_names: tuple[str, ...] = ()  # names of parts that are kept; others are ignored

    def __init__(self, request: Request) -> None:
        self.received = 0  # of the body, in bytes
        self.writer: W | None = None
        self.state = state_of(request)
        self.request = request
        self.given: dict[str, bytes] = {}
        self.part = FormPart("", None)
        self.size = 0  # of the content
        self._announced = announced(request)
        self._memory = body_memory(request)
        self._buffer = bytearray()

    @abstractmethod
    def limit(self) -> int:
        """Return the most bytes that the content may have, as far as it is known yet."""

    @abstractmethod
    def opener(self, part: FormPart) -> Callable[[], W]:
        """Return the function that begins the content, to be run in a thread.

        Raise `ApiError` for a refused form.
        """

    @abstractmethod
    async def commit(self) -> T:
        """Commit the content of the whole form and return its record."""

    async def take(self, piece: FormPart | bytes) -> None:
        """Take the next piece of the body."""
        if isinstance(piece, FormPart):
            await self.begin(piece)
        elif self.part.name == self.content:
            self.size += len(piece)
            self._buffer += piece
            if len(self._buffer) >= _WRITE_BYTES or not self._memory.fits(len(piece)):
                self.check_size()
                await self.write()
        elif self.part.name in self.field_names:
            self.given[self.part.name] += piece
            if len(self.given[self.part.name]) > _FIELD_BYTES:
                fields.fail(
                    f"Invalid '{self.part.name}': longer than {_FIELD_BYTES} bytes.",
                    self.part.name,
                    "string_above_max_length",
                )

    async def begin(self, part: FormPart) -> None:
        """Begin a part."""
        self.part = part
        if part.name in self.field_names:
            if part.name in self.given:
                fields.fail(f"'{part.name}' is given twice.", part.name, "invalid_value")
            self.given[part.name] = b""
        if part.name != self.content:
            return
        if self.writer is not None:
            message = f"'{part.name}' is given twice: one upload is one {self.noun}."
            fields.fail(message, part.name, "invalid_value")
        begin = self.opener(part)
        self.check_size()
        beginning = asyncio.ensure_future(on_disk(begin))
        try:
            self.writer = await self.state.fleet.unless_away(asyncio.shield(beginning))
        except BaseException:
            beginning.add_done_callback(_abandon)  # the thread goes on
            raise

    async def write(self) -> None:
        """Write the received content to disk."""
        data, self._buffer = bytes(self._buffer), bytearray()
        if self.writer is not None:
            await on_disk(self.writer.write, data)
        self._memory.give_back()

    def check_size(self) -> None:
        """Raise the 413 as soon as it is certain, from the announced size or the received bytes."""
        limit = self.limit()
        if max(self._announced, self.received) > limit + _FORM_BYTES or self.size > limit:
            raise ApiError(
                413,
                f"The {self.noun} is too large: {self.noun}s may have up to {limit} bytes.",
                param=self.content,
                code="request_too_large",
            )

    def close(self) -> None:
        """Remove uncommitted content."""
        if self.writer is not None:
            self.writer.close()


async def receive(request: Request, form: MultipartForm[W, T]) -> T:
    """Store the content of a form.

    Raise `ApiError`, `StoreError`, `QueueUnavailable`, and `ClientDisconnect`.
    """
    reader = MultipartReader(request.headers.get("content-type", ""))
    try:
        form.check_size()
        async for chunk in chunks_of(request):
            form.received += len(chunk)
            for piece in reader.feed(chunk):
                await form.take(piece)
            form.check_size()
        reader.finish()
        form.part = FormPart("", None)
        return await form.commit()
    except asyncio.CancelledError:
        form.close()  # not in a thread: in a stopping server it might never run
        raise
    finally:
        if form.writer is not None:
            await on_disk(form.close)


async def on_disk(action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of `action`, which a slow disk may delay."""
    return await asyncio.get_running_loop().run_in_executor(_WRITERS, partial(action, *arguments, **options))


def _abandon(beginning: asyncio.Future[W]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        _WRITERS.submit(beginning.result().close)
