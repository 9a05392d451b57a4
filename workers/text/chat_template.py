"""Render chat messages to one prompt, with the model's own template in a sandbox
(`template_environment.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from workers.text.errors import TemplateError, TemplateTimeoutError, TokenizerError
from workers.text.time_limit import TimeLimit, TimeLimitError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

RENDER_SECONDS = 2.0
"""Seconds for one rendering. Normal ones take microseconds; a longer one probably loops, and delays
other requests.
"""

_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marker after the content of a continued message, until its position in the prompt is found."""


class ChatTemplate:
    """A model's compiled chat template.

    Without a template, the messages' contents are joined by line breaks.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        origin: str = "the model",
        seconds: float = RENDER_SECONDS,
        tool_source: str | None = None,
    ) -> None:
        """Compile a template.

        `source` is Jinja text, `tool_source` another one for calls with tools, `seconds` the time
        limit of one rendering. Raises TokenizerError if one does not compile.
        """
        self._limit = TimeLimit(seconds)
        self._special_tokens = dict(special_tokens)
        self._render = _join if source is None else _compile(source, origin)
        self._render_tools = self._render if tool_source is None else _compile(tool_source, origin)
        self._missing_in = origin if source is None else None

    def warn_if_missing(self) -> None:
        """Log a warning if messages are joined without a template."""
        if self._missing_in is not None:
            logger.warning(
                "%s has no chat template: messages are joined by line breaks; set --chat-template", self._missing_in
            )

    def render(self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **variables: Any) -> str:
        """Return the prompt's text.

        It ends where the assistant begins to speak, or with the content of the last message if that
        is continued. Absent fields are left out of the messages. The variable `tools` has the
        request's tools.

        Raises TemplateError for messages that the template refuses, or that make it fail or take
        too long.
        """
        plain = [_plain(message) for message in messages]
        if not (continue_final_message and plain):
            return self._run(plain, variables)
        content = plain[-1].get("content", "")
        return _cut_behind(content, self._run([*plain[:-1], {**plain[-1], "content": content + _CUT}], variables))

    def _run(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        render = self._render_tools if variables.get("tools") else self._render
        try:
            return self._limit.run(functools.partial(render, messages, **{**self._special_tokens, **variables}))
        except TimeLimitError:
            raise TemplateTimeoutError(
                f"The model's chat template takes longer than {self._limit.seconds:g} s with these messages."
            ) from None
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"The model's chat template cannot render these messages: {reason[:500]}") from error


def _plain(message: Message) -> dict[str, Any]:
    """Return a message for the template: without absent fields, and with the arguments of its tool
    calls as objects.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_arguments(call) for call in calls]
    return plain


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _cut_behind(content: str, rendered: str) -> str:
    """Return the prompt up to the content of its last message, which `_CUT` follows.

    As in transformers, if the template strips the content, space before the cut is removed too.
    """
    end = rendered.rfind(_CUT.strip())
    if end < 0 or content.strip() not in rendered:
        raise TemplateError("The model's chat template omits the content of the last message.")
    return rendered[:end] if rendered.startswith(_CUT, end) else rendered[:end].rstrip()


def _join(messages: list[dict[str, Any]], /, **_variables: Any) -> str:
    return "".join(f"{message.get('content', '')}\n" for message in messages)


def read_chat_template(given: str) -> str:
    """Return the template given by `--chat-template`: the content of a file, or the text itself.

    Raises TokenizerError if it is neither.
    """
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = _reason(error)
        raise TokenizerError(
            f"The chat template {given!r} cannot be read ({reason}): give a file, or the Jinja text itself."
        ) from None


def _compile(source: str, origin: str) -> Callable[..., str]:
    from jinja2 import TemplateSyntaxError

    from workers.text.template_environment import compile_template, render_chat

    try:
        template = compile_template(source)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"The chat template of {origin} is not valid Jinja: {error.message}, line {error.lineno}."
        ) from None
    except (
        Exception
    ) as error:  # Python's errors for the code that Jinja generates: nested too deeply, a number too long
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise TokenizerError(
            f"The chat template of {origin} cannot be compiled: {reason}; set another with --chat-template."
        ) from None
    return functools.partial(render_chat, template)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
