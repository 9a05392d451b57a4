"""Templates of prompts, such as `Summarize: {text}`.

Names of columns are in braces; `{{` and `}}` are literal braces.
"""

import re
from typing import NamedTuple

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NOT_PLAIN = re.compile(r"[.\[\]!:]")


class TemplatePiece(NamedTuple):
    """Text, and the column whose value follows it; None at the end of the template."""

    text: str
    column: str | None


def parse_template(template: str) -> list[TemplatePiece]:
    """Return the pieces of a template.

    Raise ValueError with a sentence for an invalid template.
    """
    pieces, text, end = [], "", 0
    for found in _PIECE.finditer(template):
        text += template[end : found.start()]
        end = found.end()
        if found[0] in ("{{", "}}"):
            text += found[0][0]
        else:
            pieces.append(TemplatePiece(text, _column(found)))
            text = ""
    if not pieces:
        raise ValueError("the template names no column; write one in braces, such as {text}")
    return [*pieces, TemplatePiece(text + template[end:], None)]


def _column(found: re.Match[str]) -> str:
    name = found[1]
    if name is None:
        raise ValueError(f"the template has a single '{found[0]}' at {found.start() + 1}; write {2 * found[0]} for one")
    if not name or _NOT_PLAIN.search(name):
        raise ValueError(
            f"the template has {{{name}}} at {found.start() + 1}; only the name of a column may be in braces, without"
            " formats and attributes"
        )
    return name
