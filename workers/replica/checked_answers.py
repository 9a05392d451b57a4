"""Check whether an answer is the JSON that its request asks for.

A grammar guarantees it, except for an answer that was truncated or never left its reasoning.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from jobs.protocol.output_format import OutputFormat
from workers.text.time_limit import TimeLimit

_LIMIT = TimeLimit(0.25)
_REGEXES = ('"pattern"', '"patternProperties"')


def is_json(form: OutputFormat | None) -> bool:
    """Return whether answers of this form can be checked as JSON."""
    return form is not None and form.kind in ("json_object", "json_schema")


def has_form(text: str, form: OutputFormat) -> bool:
    """Return whether a text is JSON that conforms to the schema of the form, if it has one."""
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) if form.kind == "json_object" else _validator(form.source)(value)


@functools.lru_cache(64)
def _validator(source: str) -> Callable[[Any], bool]:
    """Return a function that checks a value against a schema.

    The function accepts every value if the schema has regular expressions, since Python may take
    exponential time on them. It also accepts a value if the check takes too long or the schema
    cannot be read here: for example, references to other documents are not followed.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from referencing import Registry

    if any(name in source for name in _REGEXES):
        return lambda _value: True
    validator = Draft202012Validator(json.loads(source), registry=Registry())

    def is_valid(value: Any) -> bool:
        try:
            return bool(_LIMIT.run(lambda: validator.is_valid(value)))
        except Exception:
            return True

    return is_valid
