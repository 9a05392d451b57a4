"""Define the settings of one worker.

They are one frozen value, which the command line creates from flags, environment and config file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.queue.settings import QueueSettings
from jobs.settings import setting
from workers.engine.messages.config import EngineConfig
from workers.text.errors import ParserError
from workers.text.parsers.reasoning_formats import REASONING_FORMATS
from workers.text.parsers.registry import NO_PARSER, TOOL_PARSERS, find_reasoning_format, find_tool_parser

DEMO_MODEL = str(Path(__file__).parent / "demo_model")
"""The small model that ships with the package, used if no other is named."""

DEMO_NAME = "demo"


def _check_name(name: str) -> None:
    if not name:
        raise ValueError("a served model name must not be empty")


def _check_tool_parser(name: str | None) -> None:
    _check_found(find_tool_parser, None if name == NO_PARSER else name)


def _check_reasoning_parser(name: str | None) -> None:
    _check_found(find_reasoning_format, name)


def _check_found(find: Callable[[str], object], name: str | None) -> None:
    if name is None:
        return
    try:
        find(name)
    except ParserError as error:
        raise ValueError(str(error)) from None


def read_override(text: str | None) -> dict[str, Any]:
    """Return the value of --override-generation-config. Raise ValueError."""
    if text is None:
        return {}
    from jobs.protocol.default_parameters import GENERATION_NAMES, read_generation

    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{text!r} is no JSON object, such as '{{\"temperature\": 0.7}}'")
    if unknown := sorted(values.keys() - set(GENERATION_NAMES)):
        raise ValueError(f"there is no default of {unknown[0]}: give {', '.join(GENERATION_NAMES)}")
    read_generation(values)
    return values


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WorkerSettings(QueueSettings):
    """Configuration of a worker process, including its queue and its engine core."""

    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=DEMO_MODEL))
    # None: the model as it was given, a folder's own name too, "demo" for the one that ships
    served_model_name: tuple[str, ...] = setting(
        (), "Name that requests use for the model; may be repeated. [default: the --model given]", check=_check_name
    )
    chat_template: str | None = setting(None, "Jinja file, or the template itself. [default: the tokenizer's]")
    tool_call_parser: str | None = setting(
        None,
        f"How the model writes calls of tools: {', '.join(TOOL_PARSERS)}, a class of your own as module:Class or"
        f" file.py:Class, or {NO_PARSER}. [default: the one that fits the chat template]",
        check=_check_tool_parser,
    )
    enable_auto_tool_choice: bool = setting(
        False, "Accepted as in vLLM's commands, without effect: a parser of tool calls is enough."
    )
    reasoning_parser: str | None = setting(
        None,
        f"How the model marks its reasoning: {', '.join(REASONING_FORMATS)}, or the tags around it as"
        " tags:<think>,</think>. [default: none is looked for]",
        check=_check_reasoning_parser,
    )
    override_generation_config: str | None = setting(
        None,
        "JSON object of defaults that go before those of --generation-config; null leaves one out.",
        check=read_override,
    )
    retry_on_invalid: int = setting(
        0,
        "How often a batch line that asks for JSON is answered again, with another seed, where the answer was cut or is"
        " not the JSON that it asks for; its usage is that of all tries.",
        min=0,
        max=100,
    )
    deduplicate: bool = setting(
        True, "Compute identical lines of a batch once, if they are greedy or name a seed, and answer each."
    )
    shutdown_timeout: float = setting(10.0, "Seconds for running requests to end after SIGTERM.", min=0)
    start_timeout: float = field(default=600.0, metadata={"min": 0})

    @property
    def models(self) -> list[str]:
        """Return the model names that requests may use."""
        if self.served_model_name:
            return list(dict.fromkeys(self.served_model_name))
        if self.engine.model == DEMO_MODEL:
            return [DEMO_NAME]
        return [*self.aliases, self._own_name]

    @property
    def aliases(self) -> list[str]:
        """Return those of `models` that lists of models leave out: the path of a folder."""
        is_named = self.served_model_name or self.engine.model in (DEMO_MODEL, self._own_name)
        return [] if is_named else [self.engine.model]

    @property
    def _own_name(self) -> str:
        folder = Path(self.engine.model)
        return folder.resolve().name if folder.is_dir() else self.engine.model

    @property
    def tokenizer(self) -> str:
        """Return the source of the tokenizer."""
        return self.engine.tokenizer or self.engine.model
