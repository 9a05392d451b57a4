"""Variables that a chat passes to the model's template."""

import re
from typing import Any, ClassVar

from jobs.protocol import fields
from jobs.protocol.output_format import canonical_json
from jobs.protocol.value_types import Schema

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The levels of reasoning that templates accept."""

_MOST = 64
_PATTERN = "^[a-zA-Z][a-zA-Z0-9_]{0,63}$"
_NAME = re.compile(_PATTERN[1:-1])
_RESERVED = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "raise_exception",
    "strftime_now",
    "self",
    "loop",
    "caller",
    "varargs",
    "kwargs",
)


class TemplateVariables:
    """Variables by name, except those that templates get from elsewhere."""

    schema: ClassVar[Schema] = {
        "type": "object",
        "maxProperties": _MOST,
        "propertyNames": {"pattern": _PATTERN, "not": {"enum": list(_RESERVED)}},
    }
    summary: ClassVar[str] = f"up to {_MOST} values by name"

    def read(self, value: Any, param: str) -> dict[str, Any]:
        variables = fields.mapping(value, param, _MOST)
        for name in variables:
            if name in _RESERVED:
                fields.unsupported(f"{param}.{name}", "cannot be set: templates have it from elsewhere.")
            if not _NAME.fullmatch(name):
                why = "Expected letters, digits and underscores, with a letter first."
                fields.fail(f"Invalid key in '{param}': {fields.shown(name)}. {why}", param, "invalid_value")
        canonical_json(variables, param)
        return variables


def settle_effort(values: dict[str, Any]) -> None:
    """Move `reasoning_effort` to the template's variables, in place.

    As in vLLM it also sets whether a model thinks, unless the call does.
    """
    if (effort := values.get("reasoning_effort")) is not None:
        given = values.get("chat_template_kwargs", {})
        thinks = {"enable_thinking": effort != "none"}
        values["chat_template_kwargs"] = {**thinks, **given, "reasoning_effort": effort}
