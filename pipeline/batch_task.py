"""The parameters of a run, and the start of its worker."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.batch.manifest import BatchSpec
from jobs.queue.settings import QueueSettings
from pipeline.hosting.settings import HostingSettings
from pipeline.input_names import PARTS_SUFFIX, Location
from pipeline.options import model_arguments
from pipeline.supervisor import Supervisor
from pipeline.uris.addresses import AllowedHosts
from pipeline.uris.fetching import FOLDER as INPUT_FOLDER
from pipeline.uris.uri import Uri
from pipeline.worker_settings import worker_settings

if TYPE_CHECKING:
    from jobs.batch.row_requests import RowOptions
    from jobs.protocol.default_parameters import DefaultParameters
    from pipeline.hosting.models import ServedModel
    from workers.settings import WorkerSettings

_RESULTS_FOLDER = "results"
_SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parameters of a run.

    Without `redis_url` everything runs on this machine. `model_flags` are the values of the model
    flags. `hosted` are the models if there are several. An http input may come from `allowed`.
    """

    source: Location
    rows: "RowOptions | None"
    output: Location
    partition_by: tuple[str, ...]
    allowed: AllowedHosts
    model: str | None
    hosted: Sequence["ServedModel"]
    hosting: HostingSettings
    redis_url: str | None
    queue: QueueSettings
    model_flags: Mapping[str, Any]
    starts_worker: bool
    skip_invalid_requests: bool
    strict_parameters: bool
    keep_parts: bool
    retry_failed: bool
    fail_on_error: bool
    log_level: str

    @property
    def root(self) -> Path:
        """The folder from which a second start resumes.

        It is beside the output; for a URI it is in the current folder.
        """
        if isinstance(self.output, Path):
            return self.output.with_name(f"{self.output.name}{PARTS_SUFFIX}").absolute()
        digest = hashlib.sha256(str(self.output).encode()).hexdigest()[:8]
        return Path(f"{self.output.name}.{digest}{PARTS_SUFFIX}").absolute()

    @property
    def keeps_folder(self) -> bool:
        """Whether the folder is kept when the run is complete.

        It is kept on request, if a fleet works in it, or if it holds the notes on a fetched input
        or an upload.
        """
        by_uri = isinstance(self.source, Uri) or self.upload_to is not None
        return self.keep_parts or self.redis_url is not None or by_uri

    @property
    def source_file(self) -> Path:
        """The input on disk; for a URI, the fetched file."""
        if isinstance(self.source, Path):
            return self.source
        return self.root / INPUT_FOLDER / self.source.file_name

    @property
    def output_file(self) -> Path:
        """The results on disk as one file, the source of an upload."""
        if isinstance(self.output, Path) and not self.partition_by:
            return self.output
        return self.root / _RESULTS_FOLDER / (f"{self.output.name}.parquet" if self.partition_by else self.output.name)

    @property
    def upload_to(self) -> Uri | None:
        """The destination of an upload of `output_file`; None if that file is the output."""
        if isinstance(self.output, Path):
            return Uri(self.output.absolute().as_uri()) if self.partition_by else None
        return self.output


def spec_of(task: Task, served: Sequence[str], models: tuple[str, ...] | None = None) -> BatchSpec:
    """Return the specification of the run's batch; its lines may name `models`."""
    default = served[0] if served else task.model
    return BatchSpec(
        input=str(task.source_file.absolute()),
        root=str(task.root),
        output=str(task.output_file.absolute()),
        error_file="inline",
        default_model=None if len(task.hosted) > 1 else default,
        models=models,
        seed=task.model_flags["seed"],
        rows=task.rows,
        skip_invalid_requests=task.skip_invalid_requests,
        strict_parameters=task.strict_parameters,
    )


def own_settings(task: Task) -> "list[WorkerSettings]":
    """Return the settings of the run's own workers, for each of its models; none if no worker is
    started.

    Raises `Refused`.
    """
    if task.hosted:
        return [model.settings for model in task.hosted]
    return [worker_settings(task.model, "", task.model_flags)] if task.starts_worker else []


def own_defaults(task: Task) -> "dict[str, DefaultParameters]":
    """Return the defaults of the models that the run serves, as far as known.

    Raises `Refused` and `WorkerError`.
    """
    from workers.default_parameters import local_defaults

    known = ((one, local_defaults(one)) for one in own_settings(task))
    return {name: defaults for one, defaults in known if defaults is not None for name in one.models}


def start_worker(task: Task, supervisor: Supervisor) -> None:
    """Start the run's own workers."""
    model = ["--model", task.model] if task.model else []
    supervisor.start_workers(
        [*model, "--shutdown-timeout", str(_SHUTDOWN_SECONDS), *model_arguments(task.model_flags)],
        task.model_flags["data_parallel_size"],
    )
