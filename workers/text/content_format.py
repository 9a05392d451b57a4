"""Find in a chat template's syntax tree whether it reads a message's content as a string or as
parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto

from jinja2 import nodes

from workers.text.message_contents import ContentFormat

_KEEPING = frozenset({"list", "reverse", "sort", "unique", "select", "reject", "selectattr", "rejectattr", "default"})
"""Filters that return items of the same kind."""
_PICKING = frozenset({"first", "last", "random"})
_BY_MEMBER = frozenset({"selectattr", "rejectattr", "map", "groupby"})
_MEMBERS = ("text", "type")  # that text parts have


class _Kind(Enum):
    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()
    PART = auto()


_Kinds = frozenset[_Kind]
_NOTHING: _Kinds = frozenset()
_ITEMS = {_Kind.MESSAGES: _Kind.MESSAGE, _Kind.CONTENT: _Kind.PART}


def content_format(tree: nodes.Template) -> ContentFormat:
    """Return the form of contents that a template reads."""
    names = _NameKinds(tree)
    if not any(_reads_parts(node, names) for node in _expressions(tree)):
        return ContentFormat.STRING
    tests = tree.find_all(nodes.Test)
    tells_apart = any(test.name == "string" and _Kind.CONTENT in names.kinds(test.node) for test in tests)
    return ContentFormat.EITHER if tells_apart else ContentFormat.PARTS


def _expressions(tree: nodes.Template) -> Iterator[nodes.Node]:
    return tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter))


def _reads_parts(node: nodes.Node, names: _NameKinds) -> bool:
    """Return whether an expression reads the text or the type of a part."""
    if isinstance(node, nodes.Filter):
        given = [*node.args, *(argument.value for argument in node.kwargs)]
        members = any(isinstance(value, nodes.Const) and value.value in _MEMBERS for value in given)
        return node.name in _BY_MEMBER and members and _Kind.CONTENT in names.kinds(node.node)
    owner, member = _member(node)
    return member in _MEMBERS and _Kind.PART in names.kinds(owner)


def _member(node: nodes.Node) -> tuple[nodes.Node | None, str | None]:
    """Return the owner and the name in `owner.name`, `owner["name"]` or `owner.get("name")`."""
    if isinstance(node, nodes.Getattr):
        return node.node, node.attr
    if isinstance(node, nodes.Getitem):
        return node.node, _constant(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        return node.node.node, _constant(node.args[0])
    return None, None


def _constant(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


class _NameKinds:
    """The kinds of value that each name of a template may have.

    A name has the same kinds in every scope. The members of a namespace are names with a dot.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._found: dict[str, _Kinds] = defaultdict(frozenset, {"messages": frozenset({_Kind.MESSAGES})})
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        bindings = [*_bindings(tree), *_arguments(tree, macros)]
        while any(self._bind(name, node, items) for name, node, items in bindings):
            pass

    def kinds(self, node: nodes.Node | None) -> _Kinds:
        """Return the kinds that the value of an expression may have."""
        if isinstance(node, nodes.Name):
            return self._found[node.name]
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.Getattr | nodes.Getitem | nodes.Call):
            return self._accessed(node)
        if isinstance(node, nodes.CondExpr):
            return self.kinds(node.expr1) | self.kinds(node.expr2)
        if isinstance(node, nodes.BinExpr):
            return self.kinds(node.left) | self.kinds(node.right)
        return _NOTHING

    def _filtered(self, node: nodes.Filter) -> _Kinds:
        if node.name in _KEEPING:
            return self.kinds(node.node)
        return self._items(node.node) if node.name in _PICKING else _NOTHING

    def _accessed(self, node: nodes.Node) -> _Kinds:
        owner, member = _member(node)
        if member is None:
            return self._element(node) if isinstance(node, nodes.Getitem) else _NOTHING
        own = self._found[f"{owner.name}.{member}"] if isinstance(owner, nodes.Name) else _NOTHING
        is_content = member == "content" and _Kind.MESSAGE in self.kinds(owner)
        return own | {_Kind.CONTENT} if is_content else own

    def _element(self, node: nodes.Getitem) -> _Kinds:
        return self.kinds(node.node) if isinstance(node.arg, nodes.Slice) else self._items(node.node)

    def _items(self, node: nodes.Node | None) -> _Kinds:
        return frozenset(_ITEMS[kind] for kind in self.kinds(node) if kind in _ITEMS)

    def _bind(self, name: str, node: nodes.Node, items: bool) -> bool:
        """Add the kinds of a value, or of its items, to a name; return whether any is new."""
        before = self._found[name]
        self._found[name] = before | (self._items(node) if items else self.kinds(node))
        return self._found[name] != before


_Binding = tuple[str, nodes.Node, bool]
"""A name, an expression, and whether the name is bound to the items of its value."""


def _bindings(tree: nodes.Template) -> Iterator[_Binding]:
    for node in tree.find_all((nodes.For, nodes.Assign, nodes.With)):
        if isinstance(node, nodes.For):
            yield from _bound(node.target, node.iter, True)
        elif isinstance(node, nodes.Assign):
            yield from _bound(node.target, node.node, False)
        elif isinstance(node, nodes.With):
            for target, value in zip(node.targets, node.values, strict=True):
                yield from _bound(target, value, False)


def _bound(target: nodes.Node, value: nodes.Node, items: bool) -> Iterator[_Binding]:
    if isinstance(target, nodes.NSRef):
        yield f"{target.name}.{target.attr}", value, items
    elif isinstance(target, nodes.Name):
        yield target.name, value, items
        if isinstance(value, nodes.Call):  # of namespace()
            yield from ((f"{target.name}.{argument.key}", argument.value, False) for argument in value.kwargs)


def _arguments(tree: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[_Binding]:
    """Yield the parameters of macros with what calls give for them."""
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            yield from ((name.name, value, False) for name, value in zip(macro.args, call.args, strict=False))
            yield from ((argument.key, argument.value, False) for argument in call.kwargs)
