"""Parameters declared as fields of a struct: their rows, how a body sets them, and their JSON
Schema.
"""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec

from jobs.protocol.value_types import Schema, ValueType, or_null

Declaration = TypeVar("Declaration")


class DeclaredParameter(NamedTuple, Generic[Declaration]):
    """A field of a struct with its declaration."""

    name: str
    parameter: Declaration
    default: Any


def declared_on(struct: type[msgspec.Struct], kind: type[Declaration]) -> list[DeclaredParameter[Declaration]]:
    """Return the parameters of a struct in their order, each annotated with a `kind`."""
    hints = get_type_hints(struct, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    declared = {name: next(one for one in hint.__metadata__ if isinstance(one, kind)) for name, hint in hints.items()}
    return [DeclaredParameter(name, parameter, defaults[name]) for name, parameter in declared.items()]


class ParameterTypes:
    """The types of a body's parameters: the declared ones, and those that are not supported."""

    def __init__(self, unsupported: Mapping[str, ValueType], declared: Mapping[str, ValueType]) -> None:
        self._types = {**unsupported, **declared}
        self._declared = frozenset(declared)

    @property
    def names(self) -> frozenset[str]:
        """The names of all of them."""
        return frozenset(self._types)

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the declared values that a body sets, each read independently.

        Raise `ApiError` 400 for a bad value and for an unsupported one.
        """
        types, values = self._types, {}
        for name, value in body.items():
            if value is not None and (kind := types.get(name)) is not None:
                found = kind.read(value, name)
                if name in self._declared:
                    values[name] = found
        return values

    def schemas(self) -> dict[str, Schema]:
        """Return the JSON Schema of each parameter, in the form that `read` accepts."""
        return {name: or_null(kind.schema) for name, kind in self._types.items()}
