"""A template gets contents in the form that it reads, and every text is in the prompt."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from workers.text.chat_template import ChatTemplate
from workers.text.errors import TemplateError


def turns(shown: str, messages: str = "messages") -> str:
    """Return a template that writes this of each message `m`."""
    return "{% for m in " + messages + " %}<{{ m.role }}>" + shown + "</{{ m.role }}>{% endfor %}"


TEXT_OF_PART = "{% if part.type == 'text' %}{{ part.text }}|{% endif %}"
IF_STRING = "{% if m.content is string %}{{ m.content }}{% else %}"
WALKS = {
    "for": turns("{% for part in m.content %}" + TEXT_OF_PART + "{% endfor %}"),
    "brackets": turns("{% for p in m['content'] %}{{ p['text'] + '|' }}{% endfor %}"),
    "get": turns("{% for p in m.get('content') %}{{ p.get('text') + '|' }}{% endfor %}"),
    "filter": turns("{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}|{% endfor %}"),
    "map": turns("{{ m.content | map(attribute='text') | join('|') }}|"),
    "alias": turns("{% set c = m.content or [] %}{% for p in c %}{{ p.text }}|{% endfor %}"),
    "index": turns("{{ m.content[0].text }}|{{ m.content[1].text + '|' if m.content | length > 1 }}"),
    "macro": (
        "{% macro shown(content, end='|') %}{% for p in content %}{{ p.text }}{{ end }}{% endfor %}{% endmacro %}"
        + turns("{{ shown(m.content) }}")
    ),
    "namespace": (
        "{% set ns = namespace(turns=messages) %}{% set ns.turns = ns.turns[0:] %}"
        + turns("{% for p in m.content %}{{ p.text }}|{% endfor %}", "ns.turns")
    ),
}
NO_WALKS = {
    "plain": turns("{{ m.content }}"),
    "string or nothing": turns(IF_STRING + "{% endif %}"),
    "lines": turns("{% for line in m.content.split('\n') %}{{ line }}{{ '\n' if not loop.last }}{% endfor %}"),
    "iterable": turns("{% if m.content is iterable and m.content is not mapping %}{{ m.content }}{% endif %}"),
    "calls": turns("{{ m.content }}{% for call in m.tool_calls %}{{ call.type }}{{ call['text'] }}{% endfor %}"),
}
WITH_TEST = IF_STRING + "{% for part in m.content %}" + TEXT_OF_PART + "{% endfor %}{% endif %}"
BOTH = turns(WITH_TEST)
STRING_SYSTEM = "{% if messages[0].role == 'system' %}{{ SYSTEM }}{% endif %}" + turns(
    WITH_TEST, "messages if m.role != 'system'"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def message(content: Any, role: str = "user", **members: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **members}


def rendered(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, {}).render(messages, **variables)


@pytest.mark.parametrize("name", WALKS)
def test_a_template_of_parts_gets_a_string_as_one_part(name: str) -> None:
    assert rendered(WALKS[name], message("Hello")) == "<user>Hello|</user>"
    assert rendered(WALKS[name], message(parts("a", "b"))) == "<user>a|b|</user>"


@pytest.mark.parametrize("name", NO_WALKS)
def test_a_template_of_strings_gets_parts_as_one_string(name: str) -> None:
    assert rendered(NO_WALKS[name], message("Hello")) == "<user>Hello</user>"
    assert rendered(NO_WALKS[name], message(parts("a", "b"))) == "<user>a\nb</user>"


def test_a_template_that_tells_strings_from_parts_gets_what_came() -> None:
    assert rendered(BOTH, message("Hello"), message(parts("a", "b"))) == "<user>Hello</user><user>a|b|</user>"


@pytest.mark.parametrize("system", ["messages[0].content", "'(' + messages[0].content + ')'"])
@pytest.mark.parametrize("content", ["Be brief.", parts("Be brief.")])
def test_a_content_that_a_template_reads_in_one_form_gets_that_form(system: str, content: Any) -> None:
    prompt = rendered(STRING_SYSTEM.replace("SYSTEM", system), message(content, "system"), message("Hello"))
    assert prompt.replace("(", "").replace(")", "") == "Be brief.<user>Hello</user>"


@pytest.mark.parametrize(
    "shown",
    ["{{ m.content[0].text }}", "{{ m.content if m.content is string else m.content[0]['text'] }}"],
)
def test_parts_of_which_a_template_reads_the_first_become_one(shown: str) -> None:
    assert rendered(turns(shown), message(parts("a b", "c d")), message("e")) == "<user>a b\nc d</user><user>e</user>"


@pytest.mark.parametrize("name", ["for", "map"])
def test_a_last_message_of_parts_is_continued(name: str) -> None:
    chat = (message("Hello"), message(parts("One. ", "Two"), "assistant"))
    prompt = rendered(WALKS[name], *chat, continue_final_message=True)
    assert prompt == "<user>Hello|</user><assistant>One. |Two"
    assert rendered(NO_WALKS["plain"], *chat, continue_final_message=True).endswith("<assistant>One. \nTwo")


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("{{ messages[-1].content }}", 0),
        ("{{ messages[0].content }}", 1),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", 1),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.text }}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.content | list }}{% endfor %}", 0),
    ],
)
def test_a_chat_with_a_text_that_the_prompt_would_not_have_is_refused(source: str, number: int) -> None:
    chat = (message("Question"), message("Answer.", "assistant"), message("Another"))
    with pytest.raises(TemplateError, match=rf"omits the content of messages\[{number}\], of role"):
        rendered(source, *chat)


def test_a_tool_result_must_be_in_the_prompt() -> None:
    chat = (message("Weather?"), message("Rain", "tool", tool_call_id="1"))
    with pytest.raises(TemplateError, match=r"messages\[1\], of role 'tool'"):
        rendered("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", *chat)


@pytest.mark.parametrize(
    "shown",
    [
        "m.content | trim",
        "m.content | tojson",
        "m.content | replace('\"', '&quot;')",
        "m.content.split('</think>')[-1].lstrip('\n')",
        "m.content | upper",
    ],
)
def test_a_text_that_a_template_changes_is_in_the_prompt(shown: str) -> None:
    text = '  <think>\nIs it "so"?\n</think>\n\nIt is "so".\n '
    chat = (message(text), message(text, "assistant"), message(text, "tool"))
    assert rendered(turns(f"{{{{ {shown} }}}}"), *chat)


def test_a_message_may_have_no_text_or_be_moved() -> None:
    moved = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}({{ messages[0].content }})"
    assert rendered(moved, message("S", "system"), message(" \n"), message("Q")) == " \nQ(S)"


def test_text_beside_tool_calls_may_be_left_out() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    source = turns("{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}")
    chat = (message("Q"), message("I look it up.", "assistant", tool_calls=calls))
    assert rendered(source, *chat) == "<user>Q</user><assistant>f</assistant>"


def test_a_system_message_that_a_template_has_no_place_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    for _ in range(2):
        assert template.render([message("Be brief.", "system"), message("Hello")]) == "Hello"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "omits messages of role system" in record.message


def test_a_text_may_look_like_a_printed_part() -> None:
    text = str(parts("a")[0])
    assert rendered(BOTH, message(parts(text, "b"))) == f"<user>{text}|b|</user>"


@pytest.mark.parametrize("source", [turns("{{ m.content }}"), turns("{{ m.content | tojson }}"), BOTH])
def test_a_long_chat_is_checked_in_little_time(source: str) -> None:
    template = ChatTemplate(source, {}, seconds=60)
    chat = [message(parts(f'{number} "quoted"' * 20, "{'type': 'text', 'text': ''}")) for number in range(10_000)]
    started = time.process_time()
    template.render(chat)
    assert time.process_time() - started < 5
