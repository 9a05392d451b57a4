"""Feed a parser a text in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from workers.text.parsers.answer import WholeAnswer
from workers.text.parsers.base import OutputParser


def parse_pieces(parser: OutputParser, pieces: Iterable[str]) -> WholeAnswer:
    answer = WholeAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    return answer


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


def calls(answer: WholeAnswer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]
