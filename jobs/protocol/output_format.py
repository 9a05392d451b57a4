"""What form an answer must have."""

from typing import Literal

import msgspec

FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of an answer, whichever parameter asked for it.

    `source` is JSON text for `json_schema`, `choice` (a list of strings) and `structural_tag`, a
    regular expression for `regex`, a Lark or EBNF grammar for `grammar`, and empty for
    `json_object`. `param` is what the caller gave it as. `whitespace` is a regular expression for
    what may stand between the tokens of JSON; None for the default.
    """

    kind: FormatKind
    source: str = ""
    param: str = "response_format"
    whitespace: str | None = None
