"""What one worker runs with.

One frozen value; the command line makes it from flags, environment and config file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jobs.queue.settings import QueueSettings
from workers.engine.messages.config import EngineConfig

DEMO_MODEL = str(Path(__file__).parent / "demo_model")
"""The small model that ships with the package and answers when no other is named."""

DEMO_NAME = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Configuration of a worker process; that of its engine core is `engine`.

    Seconds unless a field says otherwise.

    Raises ValueError for a value out of range.
    """

    redis_url: str
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=DEMO_MODEL))
    queue: QueueSettings = field(default_factory=QueueSettings)
    served_model_names: tuple[
        str, ...
    ] = ()  # none: the model as it was given, a folder's own name too, "demo" for the one that ships
    chat_template: str | None = None  # a file, or Jinja text
    start_timeout: float = 600.0
    # How long running requests may go on before they are requeued
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("start_timeout", "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if any(not name for name in self.served_model_names):
            raise ValueError("a served model name must not be empty")

    @property
    def models(self) -> list[str]:
        """The names that requests may use."""
        if self.served_model_names:
            return list(dict.fromkeys(self.served_model_names))
        if self.engine.model == DEMO_MODEL:
            return [DEMO_NAME]
        folder = Path(self.engine.model)
        return list(
            dict.fromkeys([self.engine.model, folder.resolve().name] if folder.is_dir() else [self.engine.model])
        )

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is read from."""
        return self.engine.tokenizer or self.engine.model
