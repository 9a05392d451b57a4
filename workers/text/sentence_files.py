"""Read the text settings in a sentence-transformers folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.model_folder import MODULES, pointer_problem, transformer_folder
from workers.text.errors import TokenizerError

SENTENCE_FILES = (
    MODULES,
    *("0_*/*.json", "0_*/*.txt", "0_*/*.model"),
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "*sentence_*_config.json",
)


@dataclass(frozen=True)
class SentenceFiles:
    """The text settings of a model.

    `prompts` are the prefixes of texts, by name; `default_prompt` is the name of the default.
    `max_seq_length` is 0 if the folder has none. With `include_prompt` the tokens of a prompt are
    pooled like those of its text.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int = 0
    do_lower_case: bool = False
    include_prompt: bool = True

    @classmethod
    def read(cls, folder: Path) -> SentenceFiles:
        """Return the settings in `folder`, or the defaults for another kind of folder. Raise
        TokenizerError.
        """
        config = _json(folder / "config_sentence_transformers.json")
        prompts = config.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise TokenizerError(f"{folder / 'config_sentence_transformers.json'} has prompts that are no texts.")
        default = config.get("default_prompt_name") or None
        if default is not None and default not in prompts:
            raise TokenizerError(f"{folder / 'config_sentence_transformers.json'} has no prompt {default!r}.")
        module = _transformer_config(folder)
        length = module.get("max_seq_length")
        return cls(
            prompts,
            default,
            length if isinstance(length, int) and length > 0 else 0,
            bool(module.get("do_lower_case", False)),
            _pooling_config(folder).get("include_prompt") is not False,
        )

    def prompt(self, name: str | None) -> str | None:
        """Return the prefix of texts, or None if the model does not have the name."""
        name = self.default_prompt if name is None else name
        return "" if name is None else self.prompts.get(name)


def _transformer_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the first module, the model itself."""
    found = sorted(transformer_folder(folder).glob("sentence_*_config.json"))
    return _json(found[0]) if found else {}


def _pooling_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the second module, the pooling."""
    modules = _json(folder / MODULES, kind=list)[1:]
    path = modules[0].get("path") if modules and isinstance(modules[0], dict) else None
    return _json(folder / str(path) / "config.json") if path else {}


def _json(path: Path, kind: type = dict) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else kind()
    except (OSError, ValueError) as error:
        raise TokenizerError(pointer_problem(path) or f"{path} cannot be read: {error}.") from None
    return value if isinstance(value, kind) else kind()
