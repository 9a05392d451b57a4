"""Settings: frozen dataclasses that declare each field once, with its default, help and range.

A field defines its environment variable and its check (here), its flag, key of the config file
and help (`pipeline/options.py`), and its row in `docs/settings.md`. All of it is in the metadata of
plain dataclass fields, so that the engine, which imports nothing of `jobs`, declares its fields in
the same way (`workers/engine/messages/config.py`). The keys:

- `help`: the description; a field without it is set by the program only
- `flag`: the name of its flag if not the field's own; None: it has only a variable
- `prefix`: of its variable, by default PIPELINE_
- `min`, `above`, `max`: the range of a number
- `choices`: the values of a text; only in the engine's configuration
- `check`: raises ValueError for a bad value; called for each of several values
- `kind`: the flag's kind of value if the type does not define it: a size, a folder, a device
"""

import math
import os
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self, get_args, get_origin

from jobs.errors import SettingsError

_NOUNS = {int: "a whole number", float: "a number"}
_TRUE = ("1", "true", "t", "yes", "y", "on")  # same as on the command line
_BOUNDS = {"min": ", at least", "above": " above", "max": ", at most"}


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Return a field of `Settings`."""
    return field(default=default, metadata={"help": help, **metadata})


def own_fields(settings: type) -> list[Field[Any]]:
    """Return the fields with a help that a class of settings declares itself."""
    own = vars(settings)["__annotations__"]
    return [one for one in fields(settings) if "help" in one.metadata and one.name in own]


def variable(one: Field[Any]) -> str:
    """Return the environment variable of a field."""
    return f"{one.metadata.get('prefix', 'PIPELINE_')}{one.name}".upper()


def kind_of(one: Field[Any]) -> type:
    """Return the type of a field's value, without None."""
    if isinstance(one.type, type):
        return one.type
    return tuple if get_origin(one.type) is tuple else get_args(one.type)[0]


@dataclass(frozen=True, repr=False, eq=False)
class Settings:
    """Base of the settings of a process. Raise `SettingsError` for a value that cannot be used."""

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, _checked(one, getattr(self, one.name)))

    @classmethod
    def from_environment(cls, **given: Any) -> Self:
        """Return the `given` settings, with the others from the environment or by default.

        An empty variable counts as unset, as on the command line.
        """
        left = (one for one in fields(cls) if "help" in one.metadata and one.name not in given)
        texts = {one.name: text for one in left if (text := os.environ.get(variable(one)))}
        return cls(**texts, **given)


def _checked(one: Field[Any], given: Any) -> Any:
    """Return `given`, possibly a text of the environment, as the field's type."""
    kind = kind_of(one)
    if given == "" and one.default is None:  # a flag that unsets a value of the config file
        return None
    if kind in (int, float):
        return None if given is None else _number(one, kind, given)
    if kind is bool and isinstance(given, str):
        return given.lower() in _TRUE
    values = tuple(given.split()) if kind is tuple and isinstance(given, str) else given
    if "check" in one.metadata:
        try:
            for value in values if kind is tuple else (values,):
                one.metadata["check"](value)
        except ValueError as error:
            raise SettingsError(f"{variable(one)}: {error}") from None
    return values


def _number(one: Field[Any], kind: type, given: Any) -> Any:
    limits = one.metadata
    lowest, above, highest = limits.get("min", -math.inf), limits.get("above", -math.inf), limits.get("max", math.inf)
    try:
        value = kind(given) if isinstance(given, str) else given
    except ValueError:
        value = math.nan
    if math.isfinite(value) and lowest <= value <= highest and value > above:
        return value
    bounds = (f"{word} {limits[key]}" for key, word in _BOUNDS.items() if key in limits)
    raise SettingsError(
        f"{variable(one)} must be {_NOUNS[kind]}{''.join(bounds)}, got {given!r}: give one, or leave it out for"
        f" {one.default}"
    )
