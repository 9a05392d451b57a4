"""The official client for any server with OpenAI's API, with errors of one sentence."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from batch_inference_pipeline.passing import is_cut, is_passing
from pipeline.errors import Refused, Unfinished, one_line
from pipeline.options import all_of, flag, json_option

if TYPE_CHECKING:
    import openai

Command = TypeVar("Command", bound=Callable[..., Any])

_NO_KEY = "none"  # the client requires a key; a server without keys ignores it
_LONGEST_MESSAGE = 500


def _check_base_url(_ctx: click.Context, _param: click.Parameter, url: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            return url.rstrip("/")
    raise click.BadParameter("it must look like http://127.0.0.1:8000/v1")


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    import json

    click.echo(json.dumps(value))


def show(answer: "openai.BaseModel", text: str, as_json: bool) -> None:
    """Print a server's answer as JSON or as `text`."""
    if as_json:
        print_json(answer.to_dict())
    else:
        click.echo(text)


class _Id(click.ParamType[str]):
    """An id that can be sent as a segment of a path; only the server knows whether it exists."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in ("", ".", ".."):
            self.fail(f"{value!r} is no id" if value else "it is empty", param, ctx)
        return str(value)


def object_id(name: str, shown: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return a command argument for the id of an API object."""
    return click.argument(name, metavar=shown, type=_Id(), **attributes)


server_option = flag(
    "--base-url",
    env="OPENAI_BASE_URL",
    default="http://127.0.0.1:8000/v1",
    callback=_check_base_url,
    help="Where the API is. Its key is taken from OPENAI_API_KEY.",
)

output_option = flag(
    "-o",
    "--output-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file, which appears when all of it is on disk. [default: stdout]",
)

client_options: Callable[[Any], Any] = all_of(server_option, json_option)


@contextlib.contextmanager
def api_client(base_url: str) -> Iterator["openai.OpenAI"]:
    """Yield a client; turn its errors into `Refused` or `Unfinished`."""
    import openai

    try:
        key = os.environ.get("OPENAI_API_KEY") or _NO_KEY
        http = openai.DefaultHttpxClient(event_hooks={"response": [_check_answer]})
        with openai.OpenAI(base_url=base_url, api_key=key, http_client=http) as client:
            yield client
    except openai.APIConnectionError as error:
        raise Unfinished(
            f"no answer from {base_url}: {_cause(error)}; is the server running, and is --base-url right?"
        ) from None
    except openai.APIStatusError as error:
        raise _as_exit(error, base_url) from None
    except openai.APIError as error:
        raise Unfinished(f"{base_url} sent an answer that is not understood: {one_line(error)}") from None
    except UnicodeEncodeError:
        raise Refused("an argument, or OPENAI_API_KEY, holds characters that cannot be sent") from None
    except Exception as error:
        if not is_cut(error):
            raise
        raise Unfinished(f"the connection to {base_url} was cut: {_cause(error)}; run the same command again") from None


def _check_answer(response: Any) -> None:
    """Raise `Refused` for a web page, since the client would return it as an object."""
    kind = response.headers.get("content-type", "")
    if response.status_code < 300 and kind.startswith("text/html"):
        raise Refused(f"{response.request.url} is a web page, not an API: is --base-url right?")


def _as_exit(error: "openai.APIStatusError", base_url: str) -> click.ClickException:
    message = _message(error)
    if error.status_code == 401:
        hint = (
            "set OPENAI_API_KEY"
            if not os.environ.get("OPENAI_API_KEY")
            else "OPENAI_API_KEY holds no key of this server"
        )
        return Refused(f"{base_url} requires a valid key: {hint}")
    if error.code == "unknown_url":
        return Refused(f"{message}; --base-url usually ends in /v1")
    return Unfinished(message) if is_passing(error) else Refused(message)


def _message(error: "openai.APIStatusError") -> str:
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    text = one_line(said or error)
    if error.code == "invalid_value" and error.param and error.param not in text:
        text = f"{error.param}: {text}"
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def _cause(error: BaseException) -> str:
    """Return the text of the underlying socket error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)
