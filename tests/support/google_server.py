"""Google's XML protocol on moto's S3 server, which has the same listings, ranges and uploads in
parts: the generations of objects, the conditions on them and the names of headers.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tests.support.s3_server import SIGNED, S3Server, s3_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_FAILED = b"<Error><Code>PreconditionFailed</Code><Message>of a condition</Message></Error>"


class GoogleServer(S3Server):
    """What a test sets and sees beside the calls of the program."""

    @property
    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": f"http://127.0.0.1:{self.port}", "GOOGLE_BEARER_TOKEN": "test"}


def google_server() -> AbstractContextManager[S3Server]:
    """A server with nothing in it."""
    return s3_server(GoogleServer, _speak_google)


def _speak_google(backend: "WSGIApplication") -> "WSGIApplication":
    generations: dict[str, int] = {}
    numbers = itertools.count(1)
    deciding = threading.Lock()

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        path, wanted = environ["PATH_INFO"], environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        environ["HTTP_AUTHORIZATION"] = SIGNED["Authorization"]
        if "HTTP_X_GOOG_COPY_SOURCE" in environ:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = environ.pop("HTTP_X_GOOG_COPY_SOURCE")

        def begin(status: str, headers: list[tuple[str, str]], *error: Any) -> Callable[[bytes], object]:
            if status.startswith("2") and _changes(environ):
                generations[path] = next(numbers)
            return start(status, [*headers, ("x-goog-generation", str(generations.get(path, 0)))], *error)

        with deciding:
            if wanted is not None and int(wanted) != generations.get(path, 0):
                start("412 Precondition Failed", [("content-length", str(len(_FAILED)))])
                return [_FAILED]
            if environ["REQUEST_METHOD"] == "DELETE" and "uploadId" not in environ.get("QUERY_STRING", ""):
                generations.pop(path, None)
            return list(backend(environ, begin))

    return answer


def _changes(environ: "WSGIEnvironment") -> bool:
    """Return whether the call makes an object, or another one of that name."""
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    return (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId" in query)
