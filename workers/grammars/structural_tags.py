"""Compile structural tags: free text in which tags have contents of a given form.

Two shapes are accepted: vLLM's older one of `structures` and `triggers`, and the newer one, a tree
of formats under `format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from workers.grammars.json_schema import prepare_parsed
from workers.grammars.lark import literal, regex_terminal, to_lark
from workers.text.errors import FormatError

_ANY_TEXT = r"/(?s:.*)/"


def structural_tag(value: Any, whitespace: str | None = None) -> str:
    """Return the grammar of a structural tag, in llguidance's JSON form. Raises FormatError."""
    _check(isinstance(value, dict), "The structural tag must be a JSON object.")
    builder = _Builder(whitespace)
    if "structures" in value:
        start = builder.triggered(_tags_of_structures(value), _texts(value, "triggers"), {})
    else:
        _check("format" in value, "The structural tag needs 'format', or 'structures' and 'triggers'.")
        start = builder.rule_of(value["format"])
    return builder.finish(start)


def _tags_of_structures(value: dict[str, Any]) -> list[Any]:
    """Convert the older shape's structures to tags of the newer one."""
    structures = value["structures"]
    _check(isinstance(structures, list) and bool(structures), "'structures' must be a list of one object or more.")
    for number, item in enumerate(structures):
        _check(isinstance(item, dict) and "schema" in item, f"structures[{number}] must be an object with 'schema'.")
    return [
        {
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item["schema"]},
            "end": item.get("end"),
        }
        for item in structures
    ]


class _Builder:
    """Build Lark rules in sequence; nested formats are referenced by rule name."""

    def __init__(self, whitespace: str | None) -> None:
        self._whitespace = whitespace
        self._lines: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def finish(self, start: str) -> str:
        lark = "\n".join([f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def rule_of(self, wanted: Any) -> str:
        """Return an expression for one format of the tree."""
        _check(isinstance(wanted, dict), "Each format of a structural tag must be an object with a 'type'.")
        kind = wanted.get("type")
        make = _MAKERS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise FormatError(
                f"Structural tags of type {kind!r} are not supported; supported are: {', '.join(sorted(_MAKERS))}."
            )
        return make(self, wanted)

    def const_string(self, wanted: dict[str, Any]) -> str:
        return _literal(_text(wanted, "value"))

    def json_schema(self, wanted: dict[str, Any]) -> str:
        style = wanted.get("style", "json")
        _check(style == "json", f"Structural tags of style {style!r} are not supported; use 'json'.")
        schema = wanted.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise FormatError("'json_schema' of a structural tag must be an object or a boolean.")
        return self._embed({"json_schema": prepare_parsed(schema, self._whitespace)})

    def grammar(self, wanted: dict[str, Any]) -> str:
        return self._embed({"lark_grammar": to_lark(_text(wanted, "grammar"))})

    def regex(self, wanted: dict[str, Any]) -> str:
        _refuse(wanted, "excludes")
        return self._define(regex_terminal(_text(wanted, "pattern")), terminal=True)

    def any_text(self, wanted: dict[str, Any]) -> str:
        _refuse(wanted, "max_tokens")
        most = wanted.get("max_chars")
        text = _ANY_TEXT if most is None else rf"/(?s:.{{0,{int(most)}}})/"
        return self._define(text + "".join(map(_without, _texts(wanted, "excludes"))), terminal=True)

    def sequence(self, wanted: dict[str, Any]) -> str:
        return self._group(self._elements(wanted), " ")

    def alternatives(self, wanted: dict[str, Any]) -> str:
        return self._group(self._elements(wanted), " | ")

    def optional(self, wanted: dict[str, Any]) -> str:
        return f"({self.rule_of(wanted.get('content'))})?"

    def star(self, wanted: dict[str, Any]) -> str:
        return f"({self.rule_of(wanted.get('content'))})*"

    def plus(self, wanted: dict[str, Any]) -> str:
        return f"({self.rule_of(wanted.get('content'))})+"

    def tag(self, wanted: Any) -> str:
        return self._tag(wanted, _text(wanted, "begin"))

    def tags_with_separator(self, wanted: dict[str, Any]) -> str:
        one = self._group([self.tag(tag) for tag in _tags(wanted)], " | ")
        separator = _literal(_text(wanted, "separator"))
        many = one if _flag(wanted, "stop_after_first") else f"{one} ({separator} {one})*"
        return f"({many})" if _flag(wanted, "at_least_one") else f"({many})?"

    def triggered_tags(self, wanted: dict[str, Any]) -> str:
        return self.triggered(_tags(wanted), _texts(wanted, "triggers"), wanted)

    def triggered(self, tags: Sequence[Any], triggers: list[str], options: dict[str, Any]) -> str:
        """Return an expression for free text until a trigger, which must then become one of the
        tags that begin with it.
        """
        _check(bool(triggers) and all(triggers), "'triggers' must be a list of one text or more, none of them empty.")
        excluded = "".join(map(_without, _texts(options, "excludes")))
        text = self._define(_ANY_TEXT + excluded, terminal=True)
        calls = self._calls(tags, triggers, text)
        last = self._define(_ANY_TEXT + excluded + "".join(map(_without, triggers)), terminal=True)
        if _flag(options, "stop_after_first"):
            return calls if _flag(options, "at_least_one") else f"({calls} | {last})"
        return f"({calls}){'+' if _flag(options, 'at_least_one') else '*'} {last}"

    def _calls(self, tags: Sequence[Any], triggers: list[str], text: str) -> str:
        """Return an expression for free text that ends in a tag."""
        by_trigger: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise FormatError(f"The tag that begins with {begin!r} begins with none of the triggers.")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, begin.removeprefix(trigger)))
        calls = []
        for trigger, rest in by_trigger.items():
            head = f"r{len(self._lines)}"
            self._lines.append(f"{head}[lazy]: {text} {literal(trigger)}")
            calls.append(f"{head} ({' | '.join(rest)})")
        return self._group(calls, " | ")

    def _tag(self, wanted: Any, begin: str) -> str:
        _check(isinstance(wanted, dict) and "content" in wanted, "Each tag must be an object with 'content'.")
        ends = wanted.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        right = isinstance(ends, list) and bool(ends) and all(isinstance(end, str) for end in ends)
        _check(right, "'end' of a tag must be a text, or a list of texts.")
        content = wanted["content"]
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return f"{_literal(begin)} {self._text_until(content, ends)}"
        return f"{_literal(begin)} {self.rule_of(content)} {self._group(list(map(_literal, ends)), ' | ')}"

    def _text_until(self, wanted: dict[str, Any], ends: list[str]) -> str:
        """Return an expression for free text up to and including the first of `ends`."""
        text = self.any_text(wanted)
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: {text} ({' | '.join(map(literal, ends))})")
        return name

    def _elements(self, wanted: dict[str, Any]) -> list[str]:
        elements = wanted.get("elements")
        _check(isinstance(elements, list) and bool(elements), "'elements' must be a list of one format or more.")
        return [self.rule_of(element) for element in elements or []]

    def _group(self, expressions: list[str], joint: str) -> str:
        return self._define(joint.join(expressions)) if len(expressions) > 1 else expressions[0]

    def _define(self, expression: str, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def _embed(self, grammar: dict[str, Any]) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"


_MAKERS: dict[str, Callable[[_Builder, Any], str]] = {
    "const_string": _Builder.const_string,
    "json_schema": _Builder.json_schema,
    "grammar": _Builder.grammar,
    "regex": _Builder.regex,
    "any_text": _Builder.any_text,
    "sequence": _Builder.sequence,
    "or": _Builder.alternatives,
    "optional": _Builder.optional,
    "star": _Builder.star,
    "plus": _Builder.plus,
    "tag": _Builder.tag,
    "tags_with_separator": _Builder.tags_with_separator,
    "triggered_tags": _Builder.triggered_tags,
}


def _check(right: bool, sentence: str) -> None:
    if not right:
        raise FormatError(sentence)


def _refuse(wanted: dict[str, Any], name: str) -> None:
    _check(wanted.get(name) in (None, []), f"{name!r} of a structural tag is not supported; leave it out.")


def _text(wanted: Any, name: str) -> str:
    value = wanted.get(name) if isinstance(wanted, dict) else None
    if not isinstance(value, str):
        raise FormatError(f"A structural tag needs {name!r}, a text, at this place: {json.dumps(wanted)[:100]}.")
    return value


def _texts(wanted: dict[str, Any], name: str) -> list[str]:
    value = wanted.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FormatError(f"{name!r} of a structural tag must be a list of texts.")
    return value


def _tags(wanted: dict[str, Any]) -> list[Any]:
    tags = wanted.get("tags")
    if not isinstance(tags, list) or not tags:
        raise FormatError("'tags' must be a list of one tag or more.")
    return tags


def _flag(wanted: dict[str, Any], name: str) -> bool:
    value = wanted.get(name, False)
    _check(isinstance(value, bool), f"{name!r} of a structural tag must be true or false.")
    return bool(value)


def _literal(text: str) -> str:
    return literal(text) if text else '""'


def _without(text: str) -> str:
    """Return the Lark suffix that excludes a text from a terminal."""
    _check(bool(text), "A text that is excluded must not be empty.")
    return f" & ~(/(?s:.*)/ {literal(text)} /(?s:.*)/)"
