"""Chat messages to one prompt, by the model's own template in a sandbox
(`template_environment.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.text.errors import TemplateError, TokenizerError
from workers.text.time_limit import TimeLimit, TimeLimitError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

RENDER_SECONDS = 2.0
"""Renderings take microseconds; one that takes as long as this loops, and keeps other requests
waiting.
"""


class ChatTemplate:
    """A model's chat template, compiled.

    Without one the messages' contents are joined by line breaks.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        origin: str = "the model",
        seconds: float = RENDER_SECONDS,
    ) -> None:
        """`source` is Jinja text, `seconds` how long one rendering may take.

        Raises TokenizerError when it does not compile.
        """
        self.source = source
        self._limit = TimeLimit(seconds)
        self._special_tokens = dict(special_tokens)
        self._render = None if source is None else _compile(source, origin)
        if source is None:
            logger.warning("%s has no chat template: messages are joined plainly; --chat-template gives one", origin)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return the prompt's text, which ends where the assistant begins to speak.

        Absent fields are left out of the messages.

        Raises TemplateError for messages that the template refuses, or that make it fail or take
        too long.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self._render is None:
            return "".join(f"{message.get('content', '')}\n" for message in plain)
        render = functools.partial(self._render, plain, **{**self._special_tokens, **variables})
        try:
            return self._limit.run(render)
        except TimeLimitError:
            raise TemplateError(
                f"The model's chat template takes longer than {self._limit.seconds:g} s with these messages."
            ) from None
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"The model's chat template cannot render these messages: {reason[:500]}") from error


def read_chat_template(given: str) -> str:
    """Return what `--chat-template` names: a file, or the template itself.

    Raises TokenizerError when it is neither.
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
    ) as error:  # of the interpreter, for which Jinja makes Python of it: nested too deeply, a number too long
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise TokenizerError(
            f"The chat template of {origin} cannot be compiled: {reason}; --chat-template gives another."
        ) from None
    return functools.partial(render_chat, template)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
