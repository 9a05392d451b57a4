"""Parsers by name, as `--tool-call-parser` and `--reasoning-parser` give it."""

from __future__ import annotations

from workers.text.errors import ParserError
from workers.text.parsers.base import ToolParser
from workers.text.parsers.hermes import HermesParser
from workers.text.parsers.llama3_json import Llama3JsonParser
from workers.text.parsers.mistral import MistralParser
from workers.text.parsers.plugins import load_plugin
from workers.text.parsers.pythonic import PythonicParser
from workers.text.parsers.qwen3_xml import Qwen3XmlParser
from workers.text.parsers.reasoning import REASONING_FORMATS, ReasoningFormat

# vLLM's names. Qwen3 writes calls as Hermes does; Qwen3-Coder does not.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3": HermesParser,
    "qwen3_json": HermesParser,
    "qwen3_coder": Qwen3XmlParser,
    "qwen3_xml": Qwen3XmlParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def find_tool_parser(name: str) -> type[ToolParser]:
    """Return the parser of this name, or the plugin `module:Class` or `file.py:Class`.

    Raises ParserError where there is none.
    """
    if ":" in name:
        return load_plugin(name)
    try:
        return TOOL_PARSERS[name]
    except KeyError:
        raise ParserError(
            f"There is no tool call parser {name!r}. Choose one of {', '.join(TOOL_PARSERS)}, or name a class of "
            "your own as module:Class or file.py:Class."
        ) from None


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of this name, or the one of the tags in `tags:<begin>,<end>`.

    Raises ParserError where there is none.
    """
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name]
    kind, _, tags = name.partition(":")
    begin, _, end = tags.partition(",")
    if kind == "tags" and begin and end and begin != end:
        return ReasoningFormat(name, begin, end)
    raise ParserError(
        f"There is no reasoning parser {name!r}. Choose one of {', '.join(REASONING_FORMATS)}, or give the tags "
        "around the reasoning as tags:<think>,</think>."
    )
