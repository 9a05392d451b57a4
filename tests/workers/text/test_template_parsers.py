"""The parsers that fit a model are found by what its chat template writes."""

from __future__ import annotations

import pytest

from workers.text.chat_template import ChatTemplate
from workers.text.template_parsers import recognize_tool_parser

HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
EACH = "{% for key, value in f.arguments.items() %}"


def source(call: str, before: str = "", behind: str = "") -> str:
    """Return a template that writes the calls of a turn in this way; `f` is a call's function."""
    calls = "{% for call in message.tool_calls or [] %}{% set f = call.function %}" + call + "{% endfor %}"
    turn = "<|im_start|>{{ message.role }}\n{{ message.content }}" + calls + "<|im_end|>\n"
    return before + "{% for message in messages %}" + turn + "{% endfor %}" + behind


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (HERMES, "hermes"),
        (f"\n{HERMES}\n", "hermes"),
        (
            f"<tool_call>\n<function={{{{ f.name }}}}>\n{EACH}<parameter={{{{ key }}}}>\n{{{{ value }}}}\n</parameter>"
            "{% endfor %}\n</function>\n</tool_call>",
            "qwen3_coder",
        ),
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama3_json"),
        ('[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}]', "mistral"),
        ("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}", "mistral"),
        (f'[{{{{ f.name }}}}({EACH}{{{{ key }}}}="{{{{ value }}}}"{{% endfor %}})]', "pythonic"),
    ],
)
def test_the_parser_is_the_one_that_reads_a_call_as_the_template_writes_it(call: str, name: str) -> None:
    found = recognize_tool_parser(ChatTemplate(source(call), {}))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "call",
    [
        "",
        "<tool_calls>[{{ f | tojson }}]</tool_calls>",
        f"<tool_call>{{{{ f.name }}}}{EACH}<arg_key>{{{{ key }}}}</arg_key><arg_value>{{{{ value }}}}</arg_value>"
        "{% endfor %}</tool_call>",
        f'<|tool_call_start|>[{{{{ f.name }}}}({EACH}{{{{ key }}}}="{{{{ value }}}}"{{% endfor %}})]<|tool_call_end|>',
        "<|channel|>commentary to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>",
        "<function={{ f.name }}>{{ f.arguments | tojson }}</function>",
        HERMES + HERMES,
        "{{ raise_exception('calls are not supported') }}",
    ],
)
def test_no_parser_is_taken_for_another_way_to_write_calls(call: str) -> None:
    described = "{% if tools %}Write <tool_call> or [TOOL_CALLS] before each call.{% endif %}"
    assert recognize_tool_parser(ChatTemplate(source(call, before=described), {})) is None


def test_the_template_for_calls_with_tools_is_the_one_that_counts() -> None:
    plain, with_tools = source(""), source(HERMES)
    assert recognize_tool_parser(ChatTemplate(plain, {}, tool_source=with_tools)) is not None
    assert recognize_tool_parser(ChatTemplate(with_tools, {}, tool_source=plain)) is None


def test_a_model_without_a_template_has_no_parser() -> None:
    assert recognize_tool_parser(ChatTemplate(None, {})) is None
