"""Render chat messages to one prompt, with the model's own template in a sandbox
(`template_environment.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from workers.text.errors import TemplateError, TemplateTimeoutError, TokenizerError
from workers.text.message_contents import (
    Content,
    ContentFormat,
    Message,
    find_omitted,
    fitted,
    in_other_form,
    with_suffix,
)
from workers.text.time_limit import TimeLimit, TimeLimitError

logger = logging.getLogger(__name__)

RENDER_SECONDS = 2.0
"""Seconds for one rendering. Normal ones take microseconds; a longer one probably loops, and delays
other requests.
"""

_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marker after the content of a continued message, until its position in the prompt is found."""


_MAY_BE_OMITTED = ("system", "developer")
"""Roles that some models' templates have no place for."""


class _Program(NamedTuple):
    """A compiled template, and the form of contents that it reads."""

    render: Callable[..., str]
    form: ContentFormat


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
        self._program = _Program(_join, ContentFormat.STRING) if source is None else _compile(source, origin)
        self._tools_program = self._program if tool_source is None else _compile(tool_source, origin)
        self._missing_in = origin if source is None else None
        self._omitted_roles: set[str] = set()  # that were logged

    def warn_if_missing(self) -> None:
        """Log a warning if messages are joined without a template."""
        if self._missing_in is not None:
            logger.warning(
                "%s has no chat template: messages are joined by line breaks; set --chat-template", self._missing_in
            )

    def render(self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **variables: Any) -> str:
        """Return the prompt's text.

        It ends where the assistant begins to speak, or with the content of the last message if that
        is continued. Absent fields are left out of the messages. Contents, which are strings or
        text parts, get the form that the template reads. The variable `tools` has the request's
        tools.

        Raises TemplateError for messages that the template refuses or omits, or that make it fail
        or take too long.
        """
        plain = [_plain(message) for message in messages]
        continued = continue_final_message and bool(plain)
        given = [*plain[:-1], with_suffix(plain[-1], _CUT)] if continued else plain
        prompt, omitted = self._render_in_form(given, variables)
        if continued:
            prompt = _cut_behind(plain[-1].get("content", ""), prompt)
        for number in omitted:
            self._report_omitted(number, plain[number])
        return prompt

    def _render_in_form(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, list[int]]:
        """Return the prompt, and the indexes of the messages whose text it omits.

        A template may read the contents of some messages as strings and of others as parts, so a
        content that it cannot read in one form is given in the other.
        """
        program = self._tools_program if variables.get("tools") else self._program
        run = functools.partial(self._run, program.render, variables)
        given = [fitted(message, program.form) for message in messages]
        try:
            prompt = run(given)
        except TemplateTimeoutError:
            raise
        except TemplateError:
            strings = [fitted(message, ContentFormat.STRING) for message in messages]
            if strings == given:
                raise
            given, prompt = strings, run(strings)
        omitted = find_omitted(given, prompt, run)
        if not omitted or program.form is ContentFormat.STRING:
            return prompt, omitted
        lost = frozenset(omitted)
        changed = [in_other_form(one, program.form) if i in lost else one for i, one in enumerate(given)]
        with contextlib.suppress(TemplateError):
            other = run(changed)
            return other, find_omitted(changed, other, run)
        return prompt, omitted

    def _run(self, render: Callable[..., str], variables: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        try:
            return self._limit.run(functools.partial(render, messages, **{**self._special_tokens, **variables}))
        except TimeLimitError:
            raise TemplateTimeoutError(
                f"The model's chat template takes longer than {self._limit.seconds:g} s with these messages."
            ) from None
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"The model's chat template cannot render these messages: {reason[:500]}") from error

    def _report_omitted(self, number: int, message: Message) -> None:
        """Log that the template has no place for a message; raise TemplateError if it must have
        one.
        """
        role = str(message.get("role"))
        if role == "assistant" and message.get("tool_calls"):
            return  # many templates write the calls alone
        if role not in _MAY_BE_OMITTED:
            raise TemplateError(f"The model's chat template omits the content of messages[{number}], of role '{role}'.")
        if role not in self._omitted_roles:
            self._omitted_roles.add(role)
            logger.warning("the chat template omits messages of role %s: answers do not depend on them", role)


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


def _cut_behind(content: Content, rendered: str) -> str:
    """Return the prompt up to the content of its last message, which `_CUT` follows.

    As in transformers, if the template strips the content, space before the cut is removed too.
    """
    end = rendered.rfind(_CUT.strip())
    last = content if isinstance(content, str) else content[-1]["text"]
    if end < 0 or last.strip() not in rendered:
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


def _compile(source: str, origin: str) -> _Program:
    from jinja2 import TemplateSyntaxError

    from workers.text.template_environment import compile_template, render_chat

    try:
        template, form = compile_template(source)
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
    return _Program(functools.partial(render_chat, template), form)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
