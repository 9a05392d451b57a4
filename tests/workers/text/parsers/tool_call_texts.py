"""Answers with tool calls as models of each family write them, right and wrong.

The same seed gives the same texts; `python -m tests.workers.text.parsers.tool_call_texts` prints
them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SEED = 14

_TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "get_weather": {"city": _TEXT, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        "search-web": {"query": _TEXT, "limit": {"type": ["integer", "null"]}, "filters": {"type": "object"}},
        "book_table": {"name": _TEXT, "guests": {"type": "number"}, "dates": {"type": "array"}, "note": _TEXT},
    }.items()
]

_STRINGS = [
    "Paris",
    "São Paulo",
    "東京 🌧",
    'say "hi"',
    "C:\\temp\\new",
    "line one\nline two",
    "a {brace} and [bracket]",
    "2 < 3 && 4 > 1",
    "it's",
    "",
    "null",
    "12",
    "tab\there; semi, comma",
]
_VALUES: dict[str, Sequence[Any]] = {
    "days": [1, 0, -3, 14],
    "metric": [True, False],
    "limit": [None, 5, 100],
    "filters": [{}, {"site": "a.org", "not": ["b", {"c": "}"}]}, {"deep": {"er": {"est": [1, [2, []]]}}}],
    "guests": [2, 2.5, -0.25, 1000000],
    "dates": [[], ["2024-01-02"], [["a", 1], {"b": None}]],
}
_PROSE = ["Let me look.", "I'll check that for you.\n", "好的。", "First, a list:\n- one\n- two\n\n", "2 < 3, right?"]


class OutputText(NamedTuple):
    """An answer, and what is special about it."""

    family: str
    kind: str
    text: str


Call = tuple[str, dict[str, Any]]


def tool_call_texts(seed: int = SEED) -> list[OutputText]:
    """Return the texts of all families."""
    return [
        OutputText(family, kind, text)
        for family in _FAMILIES
        for kind, text in (*_right(family, random.Random(f"{seed} {family}")), *_WRONG[family], *_cut(family))
    ]


def _right(family: str, rng: random.Random) -> list[tuple[str, str]]:
    """Return texts that have calls, or none, as the family should write them."""
    write, join = _FAMILIES[family]
    texts = [("one call", join([write(_call(rng))])) for _ in range(10)]
    texts += [("several calls", join([write(_call(rng)) for _ in range(rng.randint(2, 4))])) for _ in range(6)]
    same = write(_call(rng))
    texts.append(("the same call twice", join([same, same])))
    texts += [("no arguments", join([write((tool["function"]["name"], {}))])) for tool in TOOLS]
    if family != "pythonic":
        texts += [("text before", prose + join([write(_call(rng))])) for prose in _PROSE]
    texts += [("no call", prose) for prose in (*_PROSE, "a <tag> is no call")]
    return texts


def _cut(family: str) -> list[tuple[str, str]]:
    """Return a text that ends too early, in several places."""
    write, join = _FAMILIES[family]
    text = join([write(("get_weather", {"city": "São Paulo", "days": 3})), write(("search", {"query": "b"}))])
    return [("ends too early", text[: len(text) * part // 12]) for part in range(1, 12)]


def _call(rng: random.Random) -> Call:
    function = rng.choice(TOOLS)["function"]
    names = list(function["parameters"]["properties"])
    chosen = [name for name in names if rng.random() < 0.8] or names[:1]
    return function["name"], {name: rng.choice(_VALUES.get(name, _STRINGS)) for name in chosen}


def _object(call: Call, key: str = "arguments", **layout: Any) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=len(call[1]) == 2, **layout)


def _hermes(call: Call) -> str:
    return f"<tool_call>\n{_object(call, indent=2 if len(call[1]) == 1 else None)}\n</tool_call>"


def _version_11(call: Call) -> str:
    separator = "[ARGS]" if len(call[1]) % 2 else ""
    return f"[TOOL_CALLS]{call[0]}{separator}{json.dumps(call[1], ensure_ascii=False)}"


def _xml(call: Call) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in call[1].items()
    )
    return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"


def _python(call: Call) -> str:
    return f"{call[0].replace('-', '_')}({', '.join(f'{name}={value!r}' for name, value in call[1].items())})"


_FAMILIES: dict[str, tuple[Callable[[Call], str], Callable[[list[str]], str]]] = {
    "hermes": (_hermes, "\n".join),
    "llama3_json": (lambda call: _object(call, "parameters"), "; ".join),
    "mistral": (_object, lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]"),
    "mistral_v11": (_version_11, "".join),
    "qwen3_coder": (_xml, "\n".join),
    "pythonic": (_python, lambda calls: f"[{', '.join(calls)}]"),
}

_GOOD = '{"name": "f", "arguments": {"a": 1}}'
_WRONG: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        ("other order", '<tool_call>{"arguments": {"a": {"name": "x"}}, "name": "f"}</tool_call>'),
        ("another key", '<tool_call>{"id": [1], "name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("another key behind", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 1}</tool_call>'),
        ("arguments in a string", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'),
        ("arguments null", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
        ("text between and behind", f"<tool_call>{_GOOD}</tool_call> then <tool_call>{_GOOD}</tool_call> done"),
        ("escapes in the name", '<tool_call>{"name": "f\\u00fc", "arguments": {}}</tool_call>'),
        ("no end tag", f"<tool_call>{_GOOD}"),
        ("no JSON", "<tool_call>get_weather(Paris)</tool_call>"),
        ("nothing", "<tool_call></tool_call>"),
        ("a list", f"<tool_call>[{_GOOD}]</tool_call>"),
        ("no name", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("no arguments", '<tool_call>{"name": "f"}</tool_call>'),
        ("a number for a name", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("two tags", f"<tool_call><tool_call>{_GOOD}</tool_call></tool_call>"),
        ("end tag alone", "so </tool_call> it is"),
        ("trailing comma", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
        ("line break in a string", '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>'),
        ("a brace is missing", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
        ("a brace too many", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>'),
        ("string left open", '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>'),
        ("one is wrong", f"<tool_call>{_GOOD}</tool_call><tool_call>oops</tool_call><tool_call>{_GOOD}</tool_call>"),
    ],
    "llama3_json": [
        ("python tag", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        ("python tag, several", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        ("type", '{"type": "function", "name": "f", "parameters": {"a": 1}}'),
        ("arguments", _GOOD),
        ("text between and behind", f"{_GOOD} and {_GOOD} done"),
        ("nothing between", f"{_GOOD}{_GOOD}"),
        ("python", "<|python_tag|>print(1)"),
        ("other object", '{"city": "Paris", "weather": {"name": "f", "parameters": {}}}'),
        ("no parameters", '{"name": "f"}'),
        ("a number for a name", '{"name": 1, "parameters": {}}'),
        ("trailing comma", '{"name": "f", "parameters": {"a": 1,}}'),
        ("a brace is missing", '{"name": "f", "parameters": {"a": 1}'),
        ("one is wrong", f'{_GOOD}; {{"b": 1}}'),
    ],
    "mistral": [
        ("nothing before the list", f"[TOOL_CALLS][{_GOOD}]"),
        ("text behind", f"[TOOL_CALLS] [{_GOOD}] done"),
        ("other order", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}]'),
        ("no list", f"[TOOL_CALLS] {_GOOD}"),
        ("arguments in a string", '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": 1}"}]'),
        ("arguments null", '[TOOL_CALLS] [{"name": "f", "arguments": null}]'),
        ("no arguments", '[TOOL_CALLS] [{"name": "f"}]'),
        ("token twice", f"[TOOL_CALLS][TOOL_CALLS] [{_GOOD}]"),
        ("empty list", "[TOOL_CALLS] []"),
        ("numbers", "[TOOL_CALLS] [1, 2]"),
        ("other objects", '[TOOL_CALLS] [{"a": 1}]'),
        ("words", "[TOOL_CALLS] I cannot do that."),
        ("token alone", "[TOOL_CALLS]"),
        ("trailing comma", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1,}}]'),
        ("a bracket is missing", f"[TOOL_CALLS] [{_GOOD}"),
        ("two lists", f"[TOOL_CALLS] [{_GOOD}][TOOL_CALLS] [{_GOOD}]"),
    ],
    "mistral_v11": [
        ("text behind", '[TOOL_CALLS]f{"a": 1} done'),
        ("text behind the first", '[TOOL_CALLS]f{"a": 1} and [TOOL_CALLS]g{"b": 2}'),
        ("name as an argument", '[TOOL_CALLS]f{"name": "x", "arguments": {}}'),
        ("space", '[TOOL_CALLS] f [ARGS] {"a": 1}'),
        ("name alone", "[TOOL_CALLS]f"),
        ("name and no arguments", "[TOOL_CALLS]f[ARGS]"),
        ("trailing comma", '[TOOL_CALLS]f{"a": 1,}'),
        ("words", "[TOOL_CALLS]I cannot do that."),
        ("token alone", "[TOOL_CALLS]"),
    ],
    "qwen3_coder": [
        ("no layout", "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>"),
        ("unknown function", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"),
        ("unknown parameter", "<tool_call><function=get_weather><parameter=x>1</parameter></function></tool_call>"),
        ("wrong type", "<tool_call><function=get_weather><parameter=days>soon</parameter></function></tool_call>"),
        ("tags in a value", "<tool_call><function=f><parameter=a><b>x</b> </param</parameter></function></tool_call>"),
        ("line breaks", "<tool_call><function=f><parameter=a>\n\nx\n\n</parameter></function></tool_call>"),
        ("no outer tags", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("no end of a parameter", "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function>"),
        ("two functions", "<tool_call><function=f></function><function=g></function></tool_call>"),
        ("text between and behind", f"a {_xml(('f', {}))}b{_xml(('g', {}))} c"),
        ("end tag alone", "so </function> it </tool_call> is"),
        ("no end of the last parameter", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
        ("no function", "<tool_call>get_weather(Paris)</tool_call>"),
        ("no name", "<tool_call><function=></function></tool_call>"),
    ],
    "pythonic": [
        ("words of JSON", "[f(a=true, b=null, c=False)]"),
        ("collections", "[f(a=(1, 2), b={'x': [1.5e3, -2]}, c=('y'), d={1, 2}, e=())]"),
        ("layout", "[\n  f(\n    a=1,\n  ),\n  g(),\n]"),
        ("quotes", """[f(a='it\\'s', b="\\"q\\"", c='''x'y''', d="")]"""),
        ("escapes", "[f(a='\\n\\t\\\\ \\x41 \\u00e9 \\101', b=r'\\d')]"),
        ("joined strings", "[f(a='b' 'c')]"),
        ("hexadecimal", "[f(a=0x1F, b=1_000)]"),
        ("empty list", "[]"),
        ("numbers", "[1, 2]"),
        ("a footnote", "[1] See the source."),
        ("no list", "f(a=1)"),
        ("text before", "Sure: [f(a=1)]"),
        ("positional", "[f(1)]"),
        ("an expression", "[f(a=1 + 1)]"),
        ("a name", "[f(a=b)]"),
        ("no bracket", "[f(a=1)"),
        ("string left open", "[f(a='b)]"),
        ("text behind", "[f(a=1)] done"),
        ("space before", "\n[f(a=1)]"),
        ("dotted name", "[a.b(c=1)]"),
        ("line break in a string", "[f(a='b\nc')]"),
        ("one is wrong", "[f(a=1), g(b), h()]"),
    ],
}


if __name__ == "__main__":
    for each in tool_call_texts():
        print(each.family, each.kind, repr(each.text), sep="\t")
