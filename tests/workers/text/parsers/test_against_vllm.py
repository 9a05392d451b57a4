"""The same texts through vLLM's parsers and these give the same calls.

What vLLM's parsers gave is in `tests/data/vllm_tool_calls.json` (`tests.support.vllm_tool_calls`
records it): read whole, and read token by token where that gave something else, which it does for
most texts that are cut off or wrong. These parsers have to give one of the two, however the text is
cut, but where a reason not to is listed here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.workers.text.parsers.cuts import WholeAnswer, parse_pieces, parse_whole
from tests.workers.text.parsers.tool_call_texts import SEED, TOOLS, tool_call_texts
from workers.text.parsers.base import ToolParser
from workers.text.parsers.registry import find_tool_parser

_FILE = Path(__file__).parents[3] / "data" / "vllm_tool_calls.json"

_ONE_IS_WRONG = "vLLM gives up the good calls too, or joins their arguments with others"
_RAW_ARGUMENTS = "arguments with a mistake are passed on as written; vLLM adds or drops brackets"
_CUT_OFF = "arguments that are cut off are passed on as written; vLLM closes their JSON, or adds {} to a call before"
_OTHER_CALLS = {
    ("hermes", "a brace too many"): _RAW_ARGUMENTS,
    ("hermes", "ends too early"): _CUT_OFF,
    ("hermes", "line break in a string"): _RAW_ARGUMENTS,
    ("hermes", "one is wrong"): _ONE_IS_WRONG,
    ("hermes", "trailing comma"): _RAW_ARGUMENTS,
    ("llama3_json", "ends too early"): _CUT_OFF,
    ("llama3_json", "nothing between"): "vLLM passes over a second object without a space before it",
    ("llama3_json", "one is wrong"): _ONE_IS_WRONG,
    ("llama3_json", "trailing comma"): _RAW_ARGUMENTS,
    ("mistral", "ends too early"): _CUT_OFF,
    ("mistral", "trailing comma"): _RAW_ARGUMENTS,
    ("mistral", "two lists"): "vLLM reads the first alone",
    ("mistral_v11", "ends too early"): "vLLM takes a marker that is cut off for a part of the name",
    ("mistral_v11", "words"): "vLLM takes a sentence for a name",
    ("pythonic", "line break in a string"): "models write it; vLLM reads it with other parsers",
    ("pythonic", "one is wrong"): "vLLM drops an argument without a name",
    ("pythonic", "space before"): "there is some behind reasoning",
    ("qwen3_coder", "no end of the last parameter"): "vLLM drops the parameter",
}
_OTHER_CONTENT = {
    ("llama3_json", "text before"): "vLLM drops the text, or takes the call for text if streamed",
    ("mistral", "ends too early"): "the beginning of a call is content; vLLM drops it, or all calls",
    ("pythonic", "ends too early"): "the beginning of a call is content; vLLM drops it, or all calls",
    ("qwen3_coder", "ends too early"): "the beginning of a call is content; vLLM drops it",
    ("qwen3_coder", "no function"): "text that is no call is content; vLLM drops it",
    ("qwen3_coder", "no name"): "text that is no call is content; vLLM drops it",
}


@cache
def recorded() -> list[dict[str, Any]]:
    golden = json.loads(_FILE.read_text(encoding="utf-8"))
    print(f"vLLM {golden['vllm']}, seed {golden['seed']}")
    texts: list[dict[str, Any]] = golden["texts"]
    return texts


def parser(family: str) -> ToolParser:
    return find_tool_parser(family.removesuffix("_v11"))(TOOLS)


def as_recorded(answer: WholeAnswer) -> dict[str, Any]:
    return {
        "content": answer.content.strip(),
        "calls": [[call.name, value(call.arguments)] for call in answer.calls],
    }


def value(arguments: str) -> dict[str, Any]:
    try:
        return {"json": json.loads(arguments)}
    except ValueError:
        return {"text": arguments.rstrip()}


def test_the_texts_are_those_that_vllm_read() -> None:
    assert [(each["family"], each["kind"], each["text"]) for each in recorded()] == tool_call_texts(SEED)
    assert len(recorded()) >= 200


@pytest.mark.parametrize("family", sorted({text.family for text in tool_call_texts()}))
def test_reads_what_vllm_reads(family: str) -> None:
    other_calls, other_content = set(), set()
    for each in (each for each in recorded() if each["family"] == family):
        ours = as_recorded(parse_whole(parser(family), each["text"]))
        theirs = [each["whole"], each.get("streamed", each["whole"])]
        if ours["calls"] not in [read["calls"] for read in theirs]:
            other_calls.add((family, each["kind"]))
        elif ours not in theirs:
            other_content.add((family, each["kind"]))
    assert other_calls == {key for key in _OTHER_CALLS if key[0] == family}
    assert other_content == {key for key in _OTHER_CONTENT if key[0] == family}


def test_no_call_that_vllm_reads_whole_is_lost() -> None:
    """But where the list has a reason. Of a call that is cut off vLLM may drop arguments."""
    for each in recorded():
        if each["whole"]["calls"] and (each["family"], each["kind"]) not in _OTHER_CALLS:
            ours = as_recorded(parse_whole(parser(each["family"]), each["text"]))["calls"]
            theirs = each["whole"]["calls"]
            assert [name for name, _ in ours] == [name for name, _ in theirs], each
            assert ours == theirs or each["kind"] == "ends too early", each


def test_well_formed_texts_are_read_as_vllm_reads_them_whole() -> None:
    kinds = {"one call", "several calls", "the same call twice", "no arguments", "text before", "no call"}
    texts = [each for each in recorded() if each["kind"] in kinds]
    assert len(texts) >= 150
    for each in texts:
        ours = as_recorded(parse_whole(parser(each["family"]), each["text"]))
        assert ours["calls"] == each["whole"]["calls"], each
        if (each["family"], each["kind"]) not in _OTHER_CONTENT:
            assert ours["content"] == each["whole"]["content"], each


def test_cuts_do_not_matter() -> None:
    for index, text in enumerate(tool_call_texts()):
        whole = parse_whole(parser(text.family), text.text)
        assert parse_pieces(parser(text.family), text.text) == whole, text
        for cut in range(index % 3, len(text.text), 3):
            assert parse_pieces(parser(text.family), [text.text[:cut], text.text[cut:]]) == whole, (text, cut)
