"""What form an answer gets, how it is read, and what its chat's template renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import Claim, Request, RequestKey
from tests.support.small_tokenizers import byte_level, word_piece, write_folder
from workers.engine.messages.core import OutputGuide
from workers.grammars.formats import grammar_of
from workers.replica.answer_parsers import AnswerParsers, find_parsers
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.sampling_params import ModelLimits
from workers.settings import WorkerSettings
from workers.text.chat_template import ChatTemplate
from workers.text.parsers.registry import find_reasoning_format, find_tool_parser
from workers.text.tokenizer import TextTokenizer

TEMPLATE = """
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- if style is defined %}{{ raise_exception('no such style') if style == 'bad' else style }}{% endif %}
{%- for m in messages %}
{%- if m.content == 'broken' %}{{ raise_exception('broken') }}{% endif %}
{%- if m.content == 'no tools' and tools %}{{ raise_exception('no tools here') }}{% endif %}
{{- m.role }}: {{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking is false %}<think>

</think>

{% elif enable_thinking %}<think>
{% endif %}{% endif %}"""
HELLO = [{"role": "user", "content": "Hello"}]
PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/name"}, "$ref": {"const": {"$ref": "#/x"}}},
    "required": ["place"],
    "$defs": {"name": {"enum": ["Köln", "Bonn"]}},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model")
    return TextTokenizer.load(str(write_folder(folder, byte_level(), template=TEMPLATE)))


def claim(**body: Any) -> Claim:
    raw = json.dumps({"model": "m", "messages": HELLO, "max_tokens": 5, **body}).encode()
    return Claim(RequestKey("batch_a", 0), 1, Request(CHAT, "m", raw, seed=1), None, 1, False)


def parsers(tools: str | None = None, reasoning: str | None = None) -> AnswerParsers:
    return AnswerParsers(
        None if tools is None else find_tool_parser(tools),
        None if reasoning is None else find_reasoning_format(reasoning),
    )


def preparation(tokenizer: TextTokenizer, given: AnswerParsers | None = None) -> Preparation:
    return Preparation(tokenizer, ["m"], ModelLimits(2000, 1000), given)


def prepare(tokenizer: TextTokenizer, given: AnswerParsers | None = None, **body: Any) -> PreparedRequest:
    prepared, errors = preparation(tokenizer, given).prepare([claim(**body)])
    assert errors == []
    return prepared[0]


def refuse(tokenizer: TextTokenizer, given: AnswerParsers | None = None, **body: Any) -> tuple[str, str]:
    """Return the parameter at fault and the message."""
    prepared, errors = preparation(tokenizer, given).prepare([claim(**body)])
    assert prepared == []
    assert errors[0].result.status == 400
    error = json.loads(errors[0].result.body)["error"]
    return error["param"], error["message"]


def prompt_of(tokenizer: TextTokenizer, **body: Any) -> str:
    return tokenizer.decode(prepare(tokenizer, parsers("hermes"), **body).prompts[0].token_ids)


def test_a_prompt_has_the_tools_and_the_variables(tokenizer: TextTokenizer) -> None:
    assert prompt_of(tokenizer) == "user: Hello\nassistant: "
    assert prompt_of(tokenizer, tools=[TIME]) == f"{json.dumps([TIME])}\nuser: Hello\nassistant: "
    assert prompt_of(tokenizer, tools=[TIME], tool_choice="none").startswith(json.dumps([TIME]))
    asked = {"chat_template_kwargs": {"enable_thinking": False, "style": "!"}}
    assert prompt_of(tokenizer, **asked) == "!user: Hello\nassistant: <think>\n\n</think>\n\n"
    assert prompt_of(tokenizer, add_generation_prompt=False) == "user: Hello\n"
    going_on = [*HELLO, {"role": "assistant", "content": "Good "}]
    assert (
        prompt_of(tokenizer, messages=going_on, continue_final_message=True, add_generation_prompt=False)
        == "user: Hello\nassistant: Good "
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "broken"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "broken"}], "tools": [TIME]}, "messages"),
        ({"messages": [{"role": "user", "content": "no tools"}], "tools": [TIME]}, "tools"),
        ({"chat_template_kwargs": {"style": "bad"}, "tools": [TIME]}, "chat_template_kwargs"),
    ],
)
def test_what_a_template_refuses_is_named(tokenizer: TextTokenizer, body: dict[str, Any], param: str) -> None:
    found, message = refuse(tokenizer, parsers("hermes"), **body)
    assert found == param
    assert "cannot render these messages" in message


def test_a_prompt_has_the_texts_of_its_messages_or_is_refused(tmp_path: Path) -> None:
    walks = "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
    several = [*HELLO, {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}]
    of_parts = TextTokenizer.load(str(write_folder(tmp_path / "parts", byte_level(), template=walks)))
    assert prompt_of(of_parts, messages=several) == "Hello;a;b;"
    deaf = TextTokenizer.load(str(write_folder(tmp_path / "deaf", byte_level(), template="{{ messages[0].role }}")))
    param, message = refuse(deaf)
    assert param == "messages"
    assert "omits the content of messages[0], of role 'user'" in message


def test_a_call_that_needs_a_parser_says_which_flag(tokenizer: TextTokenizer) -> None:
    assert refuse(tokenizer, tools=[TIME])[0] == "tool_choice"
    assert "--tool-call-parser" in refuse(tokenizer, parsers(None, "qwen3"), tools=[TIME])[1]
    for choice in ("none", "required", {"type": "function", "function": {"name": "time"}}):
        assert prepare(tokenizer, tools=[TIME], tool_choice=choice).claim.fence == 1
    param, message = refuse(tokenizer, parsers("hermes"), thinking_token_budget=5)
    assert param == "thinking_token_budget"
    assert "--reasoning-parser" in message


@pytest.mark.parametrize(
    ("given", "found", "logged"),
    [
        ((None, None), ("hermes", None), "recognized in the chat template: --tool-call-parser hermes;"),
        (("mistral", None), ("mistral", None), None),
        (("none", "deepseek_r1"), (None, "deepseek_r1"), None),
    ],
)
def test_a_tool_parser_that_is_not_given_follows_from_the_template(
    given: tuple[str | None, str | None],
    found: tuple[str | None, str | None],
    logged: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson"
        " }}</tool_call>{% endfor %}{% endfor %}",
        {},
    )
    settings = WorkerSettings(tool_call_parser=given[0], reasoning_parser=given[1])
    with caplog.at_level("INFO"):
        parsers = find_parsers(settings, template)
    assert parsers.names == found
    messages = [record.getMessage() for record in caplog.records]
    assert [logged in message for message in messages] == ([] if logged is None else [True])


def schema_of(tokenizer: TextTokenizer, choice: Any, **body: Any) -> dict[str, Any]:
    prepared = prepare(tokenizer, tools=[TIME, WEATHER], tool_choice=choice, **body)
    assert prepared.output_format is not None
    assert (prepared.output_format.kind, prepared.output_format.param) == ("json_schema", "tools")
    assert prepared.guide == OutputGuide()
    schema: dict[str, Any] = json.loads(prepared.output_format.source)
    return schema


def accepts(schema: dict[str, Any], answer: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(answer)


def test_a_named_functions_answer_is_its_arguments(tokenizer: TextTokenizer) -> None:
    weather, time = (
        schema_of(tokenizer, {"type": "function", "function": {"name": name}}) for name in ("weather", "time")
    )
    assert accepts(weather, {"place": "Bonn"})
    assert not accepts(weather, {"place": "Rome"})
    assert accepts(time, {})
    assert not accepts(time, {"zone": 1})


def test_required_calls_are_a_list_of_any_of_the_tools(tokenizer: TextTokenizer) -> None:
    several, one = (schema_of(tokenizer, "required", parallel_tool_calls=parallel) for parallel in (True, False))
    weather, time = {"name": "weather", "parameters": {"place": "Köln"}}, {"name": "time", "parameters": {}}
    odd = {"name": "weather", "parameters": {"place": "Köln", "$ref": {"$ref": "#/x"}}}
    for schema in (several, one):
        grammar = grammar_of(OutputFormat("json_schema", json.dumps(schema)))
        assert follows(grammar, json.dumps([weather], ensure_ascii=False))
        assert accepts(schema, [weather])
        assert accepts(schema, [odd])
        for wrong in (
            [],
            [{"name": "weather", "parameters": {"place": "Rome"}}],
            [{"name": "weather", "parameters": {}}],
            [{"name": "other", "parameters": {}}],
            [{"name": "time"}],
            [{"name": "time", "parameters": {"place": "Bonn"}}],
        ):
            assert not accepts(schema, wrong), wrong
            assert not follows(grammar, json.dumps(wrong)), wrong
    assert accepts(several, [weather, time])
    assert not accepts(one, [weather, time])


@pytest.mark.parametrize(
    ("tools", "reasoning", "body", "expected"),
    [
        ("hermes", "qwen3", {}, None),
        ("hermes", "qwen3", {"tools": [TIME]}, None),
        (None, None, {"response_format": SCHEMA}, OutputGuide()),
        (None, "qwen3", {"response_format": SCHEMA}, OutputGuide("", "</think>", True, -1, "<think>")),
        (None, "deepseek_r1", {"response_format": SCHEMA}, OutputGuide("", "</think>", True)),
        (None, "qwen3", {"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": True}},
         OutputGuide("", "</think>", True)),
        (None, "qwen3", {"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": False}}, OutputGuide()),
        (None, "tags:[a],[b]", {"thinking_token_budget": 7}, OutputGuide("", "[b]", True, 7, "[a]")),
        (None, "deepseek_r1", {"thinking_token_budget": 7, "tools": [TIME], "tool_choice": "required"},
         OutputGuide("", "</think>", True, 7)),
        (None, "qwen3", {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}, None),
        (None, "qwen3", {"thinking_token_budget": -1}, None),
    ],
)  # fmt: skip
def test_a_grammar_begins_behind_the_reasoning(
    tokenizer: TextTokenizer, tools: str | None, reasoning: str | None, body: dict[str, Any], expected: OutputGuide
) -> None:
    prepared = prepare(tokenizer, parsers(tools, reasoning), **body)
    assert prepared.guide == expected
    assert prepared.guide is not None or prepared.output_format is None


@pytest.mark.parametrize(("said", "inside"), [("", False), ("<think>a", True), ("<think>a</think>b", False)])
def test_a_continued_answer_is_where_its_first_part_ends(tokenizer: TextTokenizer, said: str, inside: bool) -> None:
    going_on = [*HELLO, {"role": "assistant", "content": said}]
    asked = {"messages": going_on, "continue_final_message": True, "response_format": SCHEMA}
    prepared = prepare(tokenizer, parsers(None, "qwen3"), **asked, add_generation_prompt=False)
    assert prepared.guide is not None
    assert prepared.guide.in_reasoning == inside


@pytest.mark.parametrize(
    ("name", "strict", "body"),
    [
        ("hermes", True, {"tool_choice": "none"}),
        ("hermes", False, {}),
        ("pythonic", True, {}),  # which does not write its arguments as JSON
    ],
)
def test_without_a_form_an_answer_is_free(
    tokenizer: TextTokenizer, name: str, strict: bool, body: dict[str, Any]
) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    prepared = prepare(tokenizer, parsers(name), tools=[tool], **body)
    assert (prepared.output_format, prepared.guide) == (None, None)


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_strict_tool_is_called_with_what_it_takes(tokenizer: TextTokenizer, name: str, parallel: bool) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    asked = {"tools": [strict, TIME], "parallel_tool_calls": parallel}
    form = prepare(tokenizer, parsers(name), **asked).output_format
    assert form is not None
    call = find_tool_parser(name).call_syntax
    assert call is not None
    weather, wrong = (f'{call.begin("weather")}{{"place": "{place}"}}{call.end}' for place in ("Bonn", "Rome"))
    time, unknown = (f'{call.begin(tool)}{{"zone": 1}}{call.end}' for tool in ("time", "other"))
    grammar = grammar_of(form)
    for text in ("Hello.", f"I look. {weather}", time):
        assert follows(grammar, text), text
    for text in (wrong, f"Hm. {unknown}", call.trigger):
        assert not follows(grammar, text), text
    assert follows(grammar, weather + call.separator + time) == parallel


def follows(grammar: str, text: str) -> bool:
    """Return whether a whole text follows a grammar."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_completions_are_not_parsed(tokenizer: TextTokenizer) -> None:
    raw = json.dumps({"model": "m", "prompt": "<think>", "max_tokens": 5, "guided_regex": "a"}).encode()
    one = Claim(RequestKey("batch_a", 0), 1, Request("/v1/completions", "m", raw, seed=1), None, 1, False)
    prepared, _ = preparation(tokenizer, parsers("hermes", "qwen3")).prepare([one])
    assert (prepared[0].parsing, prepared[0].guide) == (None, OutputGuide())


@pytest.mark.parametrize("name", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from pipeline.commands.worker import worker

    result = CliRunner().invoke(worker, ["--redis-url", "redis://127.0.0.1:1/0", name, "unheard-of"])
    assert result.exit_code == 2
    assert "unheard-of" in result.stderr


def test_a_budget_needs_tokens_with_texts_of_their_own(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(str(write_folder(tmp_path, word_piece(), template="{{ messages[0].content }}")))
    message = [{"role": "user", "content": "fox"}]
    param, text = refuse(tokenizer, parsers(None, "qwen3"), messages=message, thinking_token_budget=5)
    assert param == "thinking_token_budget"
    assert "no fixed text for each token" in text
