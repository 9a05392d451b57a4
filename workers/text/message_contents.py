"""Give messages' contents the form that a chat template reads, and find those that it omits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from workers.text.errors import TemplateError

Message = Mapping[str, Any]
Content = str | list[dict[str, Any]]
"""A text, or text parts."""

_MARK = re.compile(r"qz\d+x\d+zq")
_PRINTED = "{'type': 'text', 'text': "
_PRINTED_MARK = re.compile(re.escape(_PRINTED) + f"'({_MARK.pattern})'")


class ContentFormat(Enum):
    """The form in which a template reads contents; `EITHER` if it distinguishes both."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


def text_of(content: Content) -> str:
    """Return the text of a content; its parts are joined by line breaks."""
    return "\n".join(_texts(content))


def fitted(message: Message, form: ContentFormat) -> dict[str, Any]:
    """Return a message whose content has this form."""
    if form is ContentFormat.EITHER or "content" not in message:
        return dict(message)
    content = message["content"]
    if form is ContentFormat.STRING:
        return {**message, "content": text_of(content)}
    return {**message, "content": _parts([content]) if isinstance(content, str) else content}


def in_other_form(message: Message, form: ContentFormat) -> dict[str, Any]:
    """Return a message for a template of this form that omits its content.

    A string becomes a part, several parts become one if the template reads parts alone, and other
    parts become a string.
    """
    content = message.get("content", "")
    if isinstance(content, str):
        return fitted(message, ContentFormat.PARTS)
    joined = text_of(content)
    one_part = form is ContentFormat.PARTS and len(content) > 1
    return {**message, "content": _parts([joined]) if one_part else joined}


def with_suffix(message: Message, suffix: str) -> dict[str, Any]:
    """Return a message whose text ends with `suffix`."""
    content = message.get("content", "")
    *before, last = _texts(content) or [""]
    return {**message, "content": _with_texts(content, [*before, last + suffix])}


def find_omitted(messages: Sequence[Message], prompt: str, render: Callable[[list[dict[str, Any]]], str]) -> list[int]:
    """Return the indexes of the messages whose text is not in their prompt.

    A template may trim, escape or cut a text, so texts that are not found are looked for again as
    marks: `render` is called with a short word in place of each text. A part that is printed whole,
    as Python writes a dict, is omitted too.
    """
    if _has_all(messages, prompt):
        return []
    marked = [_marked(message, number) for number, message in enumerate(messages)]
    try:
        shown = render(marked)
    except TemplateError:  # the template reads the texts
        return []
    found = {*_MARK.findall(shown.lower())} - {*_PRINTED_MARK.findall(shown)}
    return [
        number
        for number, message in enumerate(marked)
        if not found.issuperset(_MARK.findall(text_of(message.get("content", ""))))
    ]


def _has_all(messages: Sequence[Message], prompt: str) -> bool:
    contents = [message.get("content", "") for message in messages]
    if _PRINTED in prompt and any(isinstance(content, list) for content in contents):
        return False
    end = 0
    for text in (text.strip() for content in contents for text in _texts(content)):
        if (start := prompt.find(text, end)) >= 0:
            end = start + len(text)
        elif text not in prompt:
            return False
    return True


def _marked(message: Message, number: int) -> dict[str, Any]:
    content = message.get("content", "")
    texts = [f"qz{number}x{part}zq" if text.strip() else text for part, text in enumerate(_texts(content))]
    return {**message, "content": _with_texts(content, texts)} if "content" in message else dict(message)


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _with_texts(content: Content, texts: list[str]) -> Content:
    """Return a content of the same form with other texts."""
    return texts[0] if isinstance(content, str) else _parts(texts)


def _parts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]
