"""A template means here what it means in transformers, and a failing one fails the request and
nothing else.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.small_tokenizers import byte_level, write_folder
from workers.text.chat_template import ChatTemplate, read_chat_template
from workers.text.errors import TemplateError, TokenizerError
from workers.text.tokenizer import TextTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You help.' %}
{%- endif %}
{{- '<|start|>system\\n' + system + ' ' + ({'a': '<é&>', 'b': [1, 2]} | tojson) + eos_token }}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if (message['role'] == 'user') != (ns.turns % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- message['role'] + ':' + message['content'] + (message.name if message.name is defined else '') }}
    {%- if ns.turns >= 4 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\nassistant:' }}{% endif %}
"""
REASONING = (
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}: {{"
    " m.content }}\n{% endfor %}{% if tools %}tools{% endif %}{{ unk_token | default('none') }}"
)
EVERYTHING = """
{%- set ns = namespace(first=true, text='') %}{% set kinds = dict(user='U', assistant='A') %}
{% for message in messages %}
    {% if loop.first and not ns.first %}never{% endif %}
    {% set ns.first = false %}
    {% set inner = dict.fromkeys(['a', 'b'], loop.index) %}
  {{ kinds.get(message.role, '?') }}{{ inner | tojson(indent=2, sort_keys=true) }}{{ message | tojson }}{{
    message.thinking }}
    {% generation %}{% set inner = 'hidden' %}{{ message.content }}
{% endgeneration %}
    {{ inner }}
{% endfor %}
{{ [tools, documents, add_generation_prompt] }}{{ undefined_name }}{{ 'é<&>"' | tojson(ensure_ascii=true) }}
"""
TOOLS = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call | tojson }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "12 + 30?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": None},
        {"role": "user", "content": "<&é🙂>"},
    ],
    [
        {"role": "user", "content": "a", "name": "n"},
        {"role": "skip", "content": ""},
        {"role": "assistant", "content": "b", "thinking": "t"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "reasoning": "r"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r", "thinking": "t"},
    ],
    [
        {"role": "user", "content": "  \n"},
        {"role": "assistant", "content": "c", "tool_calls": [{"id": "1", "with": {"x": [1, None]}}]},
    ],
]


def called(arguments: Any) -> dict[str, Any]:
    """A message that called a tool."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, REASONING, EVERYTHING])
def test_renders_as_transformers_does(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, byte_level(), template=template)
    ours = TextTokenizer.load(str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for chat in CHATS:
        rendered = ours.render(chat)
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.encode([rendered], special_tokens=False) == [
            theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ]


def test_a_template_is_read_without_transformers() -> None:
    code = (
        "import sys; from workers.text.chat_template import ChatTemplate\n"
        "print(ChatTemplate('{{ messages[0].content }}', {}).render([{'content': 'x'}]), 'transformers' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "x False\n"
    )


def test_a_variable_may_have_any_name() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ template }} {{ add_generation_prompt }}", {})
    variables = {"template": "t", "self": "s", "messages": [], "add_generation_prompt": False}
    assert template.render([{"role": "user", "content": "hello"}], **variables) == "hello t False"


def test_the_date_is_todays() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {})
    before, rendered, after = datetime.now(), template.render([]), datetime.now()
    assert rendered in {moment.strftime("%Y-%m-%d") for moment in (before, after)}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content + 'x' }}", "has no element 9|undefined"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|access"),
        ("{{ 1 / 0 }}", "division"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe|access"),
        ("{% set ns = namespace(_x=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{{ dict.__class__.__mro__ }}", "unsafe|access"),
        ("{{ tojson.__globals__ }}{{ raise_exception.__globals__ }}", "undefined|unsafe"),
    ],
)
def test_a_failing_template_fails_the_request(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_a_template_that_loops_is_ended() -> None:
    loop = "{% for i in range(99999) if messages %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loop, {}, seconds=0.2)
    for _ in range(2):
        with pytest.raises(TemplateError, match="longer than"):
            template.render([{"role": "user", "content": "x"}])
        assert template.render([]) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "not valid Jinja: Expected an expression"),
        ("{{ x | unheard_of }}", "not valid Jinja: No filter"),
        ("{{ " + 500 * "(" + "1" + 500 * ")" + " }}", "cannot be compiled: maximum recursion depth exceeded"),
        (
            25 * "{% for a in messages %}" + 25 * "{% endfor %}",
            "cannot be compiled: too many statically nested blocks;",
        ),
        ("{{ " + 5000 * "9" + " }}", "cannot be compiled: Exceeds the limit"),
    ],
    ids=["syntax", "filter", "parentheses", "loops", "digits"],
)
def test_a_template_that_is_not_jinja_is_refused_at_the_start(source: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason) as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_joins_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path, byte_level())
    with caplog.at_level(logging.WARNING):
        tokenizer = TextTokenizer.load(str(folder))
        assert not caplog.text  # models that embed need none
        tokenizer.chat_template.warn_if_missing()
    assert "no chat template" in caplog.text
    assert (
        tokenizer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        == "Be brief.\nHi\n"
    )


def test_the_given_template_wins(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", byte_level(), template=CHATML)
    path = tmp_path / "other.jinja"
    path.write_text("file {{ messages[0].content }}")
    chat = [{"role": "user", "content": "x"}]
    assert TextTokenizer.load(str(folder), str(path)).render(chat) == "file x"
    assert TextTokenizer.load(str(folder), "inline {{ messages[0].content }}").render(chat) == "inline x"
    with pytest.raises(TokenizerError, match="cannot be read"):
        read_chat_template(str(tmp_path / "nowhere.jinja"))


def test_the_configurations_template_and_its_list_form(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": ""}]
    one = write_folder(tmp_path / "one", byte_level(), config={"chat_template": "one"})
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    two = write_folder(tmp_path / "two", byte_level(), config={"chat_template": several})
    assert TextTokenizer.load(str(one)).render(chat) == "one"
    assert TextTokenizer.load(str(two)).render(chat) == "plain"
    assert TextTokenizer.load(str(two)).render(chat, tools=[]) == "plain"
    assert TextTokenizer.load(str(two)).render(chat, tools=[WEATHER]) == "tools"
    assert TextTokenizer.load(str(two), "{{ tools[0].type }}").render(chat, tools=[WEATHER]) == "function"


def test_a_template_for_tools_may_be_a_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), template="plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = TextTokenizer.load(str(folder))
    assert (tokenizer.render([]), tokenizer.render([], tools=[WEATHER])) == ("plain", "tools")


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "tools": [WEATHER]}])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_tools_and_variables_are_rendered_as_transformers_does(
    tmp_path: Path, variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    folder = write_folder(tmp_path, byte_level(), template=TOOLS)
    ours = TextTokenizer.load(str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = {"add_generation_prompt": add_generation_prompt, **variables}
    for chat in (*CHATS, [*CHATS[0], called({"city": "Köln"}), {"role": "tool", "tool_call_id": "1", "content": "12"}]):
        assert ours.render(chat, **asked) == theirs.apply_chat_template(chat, tokenize=False, **asked)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Köln", "days": [1, null]}', '{"city": "Köln", "days": [1, null]}'),
        ("", "{}"),
        ('{"city": ', r'"{\"city\": "'),
        ("12", '"12"'),
        ({"city": 1}, '{"city": 1}'),
        ("[" * 100_000, None),
    ],
    ids=["object", "empty", "broken", "number", "given", "deep"],
)
def test_arguments_of_calls_are_given_as_objects(arguments: Any, shown: str | None) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    message = called(arguments)
    assert template.render([message]) == (shown or f'"{arguments}"')
    assert message == called(arguments)


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA_LIKE, REASONING, TOOLS, TOOLS.replace("m.content", "m.content | trim")]
)
@pytest.mark.parametrize("said", ["The answer", "The answer is ", "", " ", "user\n"])
def test_a_final_message_is_continued_as_in_transformers(tmp_path: Path, template: str, said: str) -> None:
    folder = write_folder(tmp_path, byte_level(), template=template)
    ours = TextTokenizer.load(str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for chat in (CHATS[0], CHATS[1], CHATS[2][:1]):
        whole = [*chat, {"role": "assistant", "content": said}]
        asked = {"add_generation_prompt": False, "continue_final_message": True}
        assert ours.render(whole, **asked) == theirs.apply_chat_template(whole, tokenize=False, **asked)


def test_without_a_template_the_content_is_continued() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    assert ChatTemplate(None, {}).render(chat, continue_final_message=True) == "a\nb "


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages[-1].role }}", "{{ messages[-1].content[:3] }}"]
)
def test_a_final_message_that_the_template_leaves_out_cannot_be_continued(source: str) -> None:
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    with pytest.raises(TemplateError, match="content of the last message"):
        ChatTemplate(source, {}).render(chat, continue_final_message=True)
