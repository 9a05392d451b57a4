"""The sandbox in which chat templates run: Jinja's own, with the names, limits and layout that
templates are written for.

A template means here what it means in transformers' `apply_chat_template`, to which the tests hold
it. The sandbox is made here since importing transformers takes a second of processor time, in which
the model could have been loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names that a message's reasoning goes by, the one that templates read first


def compile_template(source: str) -> jinja2.Template:
    """Raise jinja2.TemplateSyntaxError."""
    return _environment().from_string(source)


def render_chat(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """Return the prompt's text.

    Messages and variables are plain JSON, for other objects have methods of which the sandbox knows
    nothing.
    """
    names = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    return template.render(
        {**names, "messages": [_with_reasoning(message) for message in messages]}
    )  # by no name of `render`'s own


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """With its reasoning, if it has any, also under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what an assistant said, for training; the text is the same
    without it.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @staticmethod
    def _as_it_is(caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict`, of which a template gets no more than its two ways to make one."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, names: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


class _Namespace(Namespace):
    """`namespace`, without the names through which Python's insides are reached."""

    def __init__(*arguments: Any, **named: Any) -> None:  # no `self`, which may be one of the names
        itself, given = arguments[0], dict(*arguments[1:], **named)
        for name in given:
            _check_name(name)
        Namespace.__init__(itself, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot hold {name!r}, for it begins with an underscore")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
