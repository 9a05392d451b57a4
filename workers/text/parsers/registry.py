"""Look up parsers by name, for `--tool-call-parser` and `--reasoning-parser`.

The command line's help lists the names, so no parser is imported before its lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.text.errors import ParserError
from workers.text.parsers.reasoning_formats import REASONING_FORMATS, ReasoningFormat

if TYPE_CHECKING:
    from workers.text.parsers.base import ToolParser

NO_PARSER = "none"

_HERMES = "workers.text.parsers.hermes:HermesParser"
_QWEN3_XML = "workers.text.parsers.qwen3_xml:Qwen3XmlParser"
_LLAMA3_JSON = "workers.text.parsers.llama3_json:Llama3JsonParser"

# vLLM's names. Qwen3 writes calls as Hermes does; Qwen3-Coder does not.
TOOL_PARSERS: dict[str, str] = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "qwen3_json": _HERMES,
    "qwen3_coder": _QWEN3_XML,
    "qwen3_xml": _QWEN3_XML,
    "llama3_json": _LLAMA3_JSON,
    "llama4_json": _LLAMA3_JSON,
    "mistral": "workers.text.parsers.mistral:MistralParser",
    "pythonic": "workers.text.parsers.pythonic:PythonicParser",
}


def find_tool_parser(name: str) -> type[ToolParser]:
    """Return the parser of this name, or the plugin `module:Class` or `file.py:Class`.

    Raises ParserError for an unknown name.
    """
    path = name if ":" in name else TOOL_PARSERS.get(name)
    if path is None:
        raise ParserError(
            f"There is no tool call parser {name!r}. Choose one of {', '.join(TOOL_PARSERS)} or {NO_PARSER}, or name a"
            " class of your own as module:Class or file.py:Class."
        )
    from workers.text.parsers.plugins import load_plugin

    return load_plugin(path)


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of this name, or of the tags in `tags:<begin>,<end>`.

    Raises ParserError for an unknown name.
    """
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name]
    kind, _, tags = name.partition(":")
    begin, _, end = tags.partition(",")
    if kind == "tags" and begin and end and begin != end:
        return ReasoningFormat(name, begin, end)
    raise ParserError(
        f"There is no reasoning parser {name!r}. Choose one of {', '.join(REASONING_FORMATS)}, or give the"
        " tags around the reasoning as tags:<think>,</think>."
    )
