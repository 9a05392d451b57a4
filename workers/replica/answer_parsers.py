"""Choose the parsers of a call's answers, and the output guide beside the grammar."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.results import ApiError
from jobs.protocol.validation import Call
from workers.engine.messages.core import OutputGuide
from workers.replica.prepared import Parsing
from workers.settings import WorkerSettings
from workers.text.chat_template import ChatTemplate
from workers.text.message_contents import text_of
from workers.text.parsers.answer import AnswerParser
from workers.text.parsers.base import OutputParser, ToolParser
from workers.text.parsers.enforced import NamedCallParser, RequiredCallsParser
from workers.text.parsers.reasoning import ReasoningParser
from workers.text.parsers.reasoning_formats import ReasoningFormat
from workers.text.parsers.registry import NO_PARSER, find_reasoning_format, find_tool_parser

logger = logging.getLogger(__name__)

_WITHOUT_CALLS = ("json_object", "json_schema", "choice")  # an answer of this form calls no tool


class AnswerParsers:
    """Hold the reasoning parser and the tool-call parser of a model; each may be missing."""

    def __init__(self, tools: type[ToolParser] | None = None, reasoning: ReasoningFormat | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self.call_syntax = None if tools is None else tools.call_syntax
        self.reasoning_markers = () if reasoning is None else reasoning.markers
        self.names = (None if tools is None else tools.name, None if reasoning is None else reasoning.name)

    def check(self, call: Call) -> None:
        """Raise ApiError for a call that needs a parser this worker does not have."""
        if call.tool_choice == "auto" and self._tools is None:
            message = (
                '\'tool_choice\' must be "none", "required" or a function: "auto" needs a parser for the'
                " model's tool calls: start the worker with --tool-call-parser."
            )
            raise ApiError(400, message, param="tool_choice", code="unsupported_value")
        if call.thinking_token_budget is not None and self._reasoning is None:
            message = "'thinking_token_budget' needs a worker with --reasoning-parser, to detect where thinking ends."
            raise ApiError(400, message, param="thinking_token_budget", code="unsupported_value")

    def in_reasoning(self, call: Call, prompt: str) -> bool | None:
        """Return whether the answer to a rendered prompt begins inside reasoning, or None if it
        may.
        """
        if self._reasoning is None or not call.messages:
            return False
        if call.continue_final_message:
            return bool(self._reasoning.in_continued(text_of(call.messages[-1]["content"])))
        return self._reasoning.in_reasoning(prompt)

    def guide(self, call: Call, inside: bool | None, output_format: OutputFormat | None) -> OutputGuide | None:
        """Return the output guide of a call without the grammar, or None if it needs no guide."""
        budget = -1 if call.thinking_token_budget is None else call.thinking_token_budget
        if self._reasoning is None or inside is False:
            return None if output_format is None else OutputGuide()
        if output_format is None and budget < 0:
            return None
        begin = "" if inside or self._reasoning.assumed else self._reasoning.begin
        return OutputGuide("", self._reasoning.end, True, budget, begin)

    def parsing(self, call: Call, inside: bool | None) -> Parsing | None:
        """Return how the answers to a call are parsed, or None if their text is their content."""
        calls = self._find_calls_parser(call)
        reasoning = self._reasoning if call.messages else None
        if reasoning is None and calls is None:
            return None
        markers = () if reasoning is None else reasoning.markers
        if call.tool_choice == "auto" and self._tools is not None:
            markers += self._tools.markers
        ends = None if reasoning is None else () if inside is False else (reasoning.end, *reasoning.also_end)

        def new_parser() -> OutputParser:
            before = None if reasoning is None else ReasoningParser(reasoning, inside)
            return AnswerParser(before, None if calls is None else calls(), call.parallel_tool_calls)

        return Parsing(new_parser, ends, markers, self._tools is not None and self._tools.name == "mistral")

    def _find_calls_parser(self, call: Call) -> Callable[[], OutputParser] | None:
        if call.tool_name is not None:
            return partial(NamedCallParser, call.tool_name)
        if call.tool_choice == "required":
            return partial(RequiredCallsParser, call.tools)
        if call.tool_choice == "none" or self._tools is None:
            return None
        form = call.output_format
        return None if form is not None and form.kind in _WITHOUT_CALLS else partial(self._tools, call.tools)


def find_parsers(settings: WorkerSettings, template: ChatTemplate) -> AnswerParsers:
    """Return the parsers named in the settings. If no parser of tool calls is named, use the one
    that fits the chat template, if any. Raises ParserError.
    """
    reasoning = settings.reasoning_parser
    return AnswerParsers(
        _tool_parser(settings.tool_call_parser, template),
        None if reasoning is None else find_reasoning_format(reasoning),
    )


def _tool_parser(name: str | None, template: ChatTemplate) -> type[ToolParser] | None:
    if name is not None:
        return None if name == NO_PARSER else find_tool_parser(name)
    from workers.text.template_parsers import recognize_tool_parser

    found = recognize_tool_parser(template)
    if found is not None:
        logger.info(
            "recognized in the chat template: --tool-call-parser %s; set the flag to override it, or to none",
            found.name,
        )
    return found
