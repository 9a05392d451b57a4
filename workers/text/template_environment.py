"""Run chat templates in Jinja's sandbox, with the names, limits and layout that templates expect.

A template behaves as in transformers' `apply_chat_template`; the tests compare the two. The sandbox
is created here, since importing transformers takes a second of processor time, which delays the
loading of the model.
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

from workers.text.content_format import content_format
from workers.text.message_contents import ContentFormat

_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of a message's reasoning, in the order in which templates prefer them


def compile_template(source: str) -> tuple[jinja2.Template, ContentFormat]:
    """Compile a template, and return the form of contents that it reads.

    Raise jinja2.TemplateSyntaxError.
    """
    environment = _environment()
    tree = environment.parse(source)
    return environment.from_string(tree), content_format(tree)


def render_chat(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """Return the prompt's text.

    Messages and variables must be plain JSON, since the sandbox does not check the methods of other
    objects.
    """
    names = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    return template.render(
        {**names, "messages": [_with_reasoning(message) for message in messages]}
    )  # by no name of `render`'s own


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning, if any, also under the other names."""
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
    """`{% generation %}`, which marks assistant text for training; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @staticmethod
    def _as_it_is(caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict`, reduced to its two constructors."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, names: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


class _Namespace(Namespace):
    """`namespace`, without the names that give access to Python's internals."""

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
    """Serialize as JSON, without Jinja's escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
