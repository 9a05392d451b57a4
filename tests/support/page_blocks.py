"""The commands in shell blocks of the documentation, and what the comments above them say.

A block is fenced as bash or sh, or indented by four columns below an empty line. The comment
directly above it says where it runs: `<!-- run by: tests/x.py -->`, or what it needs:
`<!-- needs: a cluster -->`. One at the top of a page, `<!-- blocks are run by: tests/x.py -->`, is
that of every block without its own.
"""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.commands import REPOSITORY

PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((REPOSITORY / "docs").glob("*.md")))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n(?:\n(?= {4}))?)+")
_COMMAND = re.compile(
    r"^\s*(?:[A-Z_]+=\S+ )*(?:\S+ \| )?(?:\S*/bin/)?"
    r"(?:pipeline|pytest|python3?|pip|make|curl|docker|kubectl|helm|aws|redis-cli|cd|export|install|openssl)(?: |$)",
    re.MULTILINE,
)
_MARK = re.compile(r"<!-- (run by|needs): (.+) -->\n\n?\Z")
_MARK_OF_PAGE = re.compile(r"^<!-- blocks are run by: (\S+) -->$", re.MULTILINE)
_INLINE = re.compile(r"`(pipeline [^`]+)`")


class Block(NamedTuple):
    """A block of a page; `kind` is `run by` or `needs`, and empty without a comment."""

    page: str
    line: int
    language: str
    text: str
    kind: str
    said: str


def blocks_of(page: str) -> list[Block]:
    """Return a page's shell blocks, and those in Python below a comment, in their order."""
    text = (REPOSITORY / page).read_text()
    whole = _MARK_OF_PAGE.search(text)
    found = [(match.start(), match[1], match[2]) for match in _FENCED.finditer(text)]
    outside = _FENCED.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    found += [(match.start(), "", _dedented(match[0])) for match in _INDENTED.finditer(outside)]
    blocks = []
    for start, language, body in sorted(found):
        mark = _MARK.search(text[:start])
        kind, said = (mark[1], mark[2]) if mark else ("run by", whole[1]) if whole else ("", "")
        shell = language in ("bash", "sh") or (not language and _COMMAND.search(body))
        if shell or (mark and language == "python"):
            blocks.append(Block(page, text.count("\n", 0, start) + 1, language or "bash", body, kind, said))
    return blocks


def pipeline_calls(text: str) -> Iterator[list[str]]:
    """Yield the words after `pipeline` of each such command in a shell text."""
    for line in text.replace("\\\n", " ").splitlines():
        if "pipeline " in line and not line.startswith("#"):
            words = list(shlex.shlex(line, posix=True, punctuation_chars="();<>|&"))
            yield from _calls(words)


def inline_calls(page: str) -> Iterator[list[str]]:
    """Yield the words after `pipeline` of each such command within the page's sentences."""
    for found in _INLINE.findall((REPOSITORY / page).read_text()):
        yield from pipeline_calls(found.replace("\\|", "|"))


def _calls(words: list[str]) -> Iterator[list[str]]:
    call: list[str] | None = None
    for word in [*words, ";"]:
        if word and set(word) <= set("();<>|&"):
            if call is not None:
                yield call
            call = None
        elif call is not None:
            call.append(word)
        elif word.rsplit("/", 1)[-1] == "pipeline":
            call = []


def _dedented(text: str) -> str:
    return re.sub(r"^ {4}", "", text, flags=re.MULTILINE)
