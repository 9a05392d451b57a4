"""Render a chat into the prompt's text with the model's template."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from jobs.protocol.results import ApiError
from workers.text.errors import TemplateError, TemplateTimeoutError
from workers.text.tokenizer import TextTokenizer


class Chat(Protocol):
    """The parts of a call that describe a chat."""

    @property
    def messages(self) -> Sequence[dict[str, Any]]: ...
    @property
    def tools(self) -> list[dict[str, Any]]: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...
    @property
    def add_generation_prompt(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool: ...


def render(tokenizer: TextTokenizer, chat: Chat) -> str:
    """Return the prompt's text. Raise `ApiError` 400, which names the parameter that fails."""
    variables = {
        **chat.chat_template_kwargs,
        "tools": chat.tools or None,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }
    try:
        return tokenizer.render(chat.messages, **variables)
    except TemplateError as error:
        timed_out = isinstance(error, TemplateTimeoutError)
        param = "messages" if timed_out else _find_cause(tokenizer, chat, variables)
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _find_cause(tokenizer: TextTokenizer, chat: Chat, variables: dict[str, Any]) -> str:
    """Return the parameter without which the messages can be rendered, else the messages' own."""
    for param, left_out in (("tools", ["tools"]), ("chat_template_kwargs", chat.chat_template_kwargs)):
        if getattr(chat, param):
            with contextlib.suppress(TemplateError):
                left = {name: value for name, value in variables.items() if name not in left_out}
                tokenizer.render(chat.messages, **left)
                return param
    return "messages"
