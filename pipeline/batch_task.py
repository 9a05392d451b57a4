"""The parameters of a run, and the start of its worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.queue.settings import QueueSettings
from pipeline.hosting.settings import HostingSettings
from pipeline.input_names import PARTS_SUFFIX
from pipeline.options import model_arguments
from pipeline.supervisor import Supervisor

if TYPE_CHECKING:
    from jobs.batch.row_requests import RowOptions
    from pipeline.hosting.models import ServedModel

_SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parameters of a run.

    With no `redis_url` everything runs here; `model_flags` are the values of the model flags.
    `hosted` are the models where there are several.
    """

    source: Path
    rows: "RowOptions | None"
    output: Path
    model: str | None
    hosted: Sequence["ServedModel"]
    hosting: HostingSettings
    redis_url: str | None
    queue: QueueSettings
    model_flags: Mapping[str, Any]
    starts_worker: bool
    skip_invalid_requests: bool
    retry_failed: bool
    fail_on_error: bool
    log_level: str

    @property
    def root(self) -> Path:
        """The folder beside the output from which a second start goes on."""
        return self.output.with_name(f"{self.output.name}{PARTS_SUFFIX}").absolute()


def start_worker(task: Task, supervisor: Supervisor) -> None:
    """Start the run's own workers."""
    model = ["--model", task.model] if task.model else []
    supervisor.start_workers(
        [*model, "--shutdown-timeout", str(_SHUTDOWN_SECONDS), *model_arguments(task.model_flags)],
        task.model_flags["data_parallel_size"],
    )
