"""A frame: one line about the fleet, then its batches, queues and workers, as many as fit."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

from jobs.queue.batch_fields import LATE, URGENT
from jobs.queue.gauges import Depths, GpuGauges, WorkerGauges
from jobs.queue.registry import WorkerRecord
from pipeline.plain_text import plain
from pipeline.progress import duration
from pipeline.top.columns import Cell, Column, fitted
from pipeline.top.rates import Rates
from pipeline.top.sample import BatchSample, Sample

_BATCHES = (
    Column("batch", "left", least=12, keep_end=True),
    Column("state", "left"),
    Column("progress", "left", width=12, least=8),
    Column("completed"),
    Column("failed"),
    Column("total"),
    Column("lines/s"),
    Column("left"),
    Column("models", "left", least=8, optional=True),
)
_QUEUES = (
    Column("model", "left", least=10, keep_end=True),
    Column("live waiting"),
    Column("oldest"),
    Column("lines waiting"),
    Column("oldest"),
    Column("quarantined"),
)
_WORKERS = (
    Column("worker", "left", least=8, keep_end=True),
    Column("model", "left", least=8, keep_end=True),
    Column("state", "left"),
    Column("run"),
    Column("wait"),
    Column("tokens/s"),
    Column("KV"),
    Column("prefix"),
)
_GPUS = (Column("GPU"), Column("memory"))
FIGURES = ("vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries")
"""Names of the shown worker metrics."""

_UNKNOWN = "–"
_LINES_BESIDE_ROWS = 2  # of a table: its header, and an empty line above it
_COLORS = {
    "ready": "green",
    "loading": "yellow",
    "initializing": "yellow",
    "draining": "yellow",
    "in_progress": "green",
    URGENT: "yellow",
    LATE: "red",
    "failed": "red",
    "expired": "red",
    "cancelling": "yellow",
    "cancelled": "yellow",
}


class Section(NamedTuple):
    """A table of a frame."""

    columns: tuple[Column, ...]
    items: Sequence[Any]
    row: Callable[[Any], list[Cell]]  # makes the cells of an item
    empty: str  # text in place of rows if there are none


class Frame:
    """A frame that rich renders for the width of the console and, if `in_window`, its height.

    `trouble` is the reason why the sample is old.
    """

    def __init__(self, sample: Sample, rates: Rates, server: str, trouble: str = "", in_window: bool = False) -> None:
        self._sample = sample
        self._rates = rates
        self._server = server
        self._trouble = trouble
        self._in_window = in_window

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sections = self._sections()
        wanted = [len(section.items) or 1 for section in sections]
        room = console.height - 1 - _LINES_BESIDE_ROWS * len(sections)
        yield self._header(options.max_width)
        for section, count in zip(sections, shared(room, wanted) if self._in_window else wanted, strict=True):
            left_out = 0 if count >= len(section.items) else len(section.items) - max(0, count - 1)
            rows = [section.row(item) for item in section.items[: len(section.items) - left_out]]
            yield Text()
            yield fitted(section.columns, rows, options.max_width)
            if left_out or not rows:
                yield Text(f"… {left_out} more" if left_out else section.empty, "dim")

    def _header(self, width: int) -> Text:
        """Return the header line; in a narrow window, the server's address is cut first."""
        fleet = self._sample.fleet
        workers = len(fleet.workers)
        tokens = sum(gauges.tokens_per_second for _, gauges in fleet.reported)
        figures = (
            f"{workers} worker{'' if workers == 1 else 's'}",
            f"{tokens:,.0f} tokens/s",
            f"{_number(self._rates.requests_per_second)} requests/s",
        )
        state = Text(plain(self._trouble), "bold red") if self._trouble else Text("Redis answers", "green")
        parts = [state] if self._trouble else [state, *(Text(figure, "bold") for figure in figures)]
        rest = Text("  ").join(parts)
        server = Text(plain(self._server), "bold")
        server.truncate(max(12, width - rest.cell_len - 2), overflow="ellipsis")
        line = Text("  ").join([server, rest])
        line.truncate(width, overflow="ellipsis")
        return line

    def _sections(self) -> list[Section]:
        fleet = self._sample.fleet
        with_gpus = any(gauges.gpus for _, gauges in fleet.reported)
        reported = {worker.id: gauges for worker, gauges in fleet.reported}
        columns = (*_WORKERS, *(_GPUS if with_gpus else ()))

        def worker_row(worker: WorkerRecord) -> list[Cell]:
            return _worker_row(worker, reported.get(worker.id), with_gpus)

        return [
            Section(_BATCHES, self._sample.batches, self._batch_row, "no batch is at work or has ended"),
            Section(_QUEUES, _models(fleet.depths), partial(_queue_row, fleet.depths), "no model is known"),
            Section(columns, fleet.workers, worker_row, "no worker is alive"),
        ]

    def _batch_row(self, batch: BatchSample) -> list[Cell]:
        status, at_work = batch.status, batch.ended_ago is None
        return [
            Text(plain(batch.id), "" if at_work else "dim"),
            _batch_state(batch),
            ProgressBar(
                total=max(1, status.total), completed=status.finished, complete_style="cyan", finished_style="green"
            ),
            Text(str(status.completed)),
            Text(str(status.failed), "red" if status.failed else ""),
            Text(str(status.total)),
            Text(_number(self._rates.lines_per_second(batch.id)) if at_work else ""),
            Text(self._time_left(batch)),
            Text(plain(", ".join(status.line_models))),
        ]

    def _time_left(self, batch: BatchSample) -> str:
        if batch.ended_ago is not None:
            return f"{_coarse(batch.ended_ago)} ago"
        left = self._rates.seconds_left(batch.id)
        return _UNKNOWN if left is None else duration(left)


def shared(room: int, wanted: list[int]) -> list[int]:
    """Return the number of rows of each table: equal shares, at most the wanted number."""
    given = [0] * len(wanted)
    while room > 0 and given != wanted:
        for place, want in enumerate(wanted):
            if room > 0 and given[place] < want:
                given[place] += 1
                room -= 1
    return given


def _models(depths: Depths) -> list[str]:
    """Return the models, in falling order of waiting requests."""
    waiting: Counter[str] = Counter()
    for by_model in (depths.live, depths.batch, depths.quarantined):
        waiting.update(by_model)
    return sorted(waiting, key=lambda model: (-waiting[model], model))


def _queue_row(depths: Depths, model: str) -> list[Cell]:
    quarantined = depths.quarantined.get(model, 0)
    return [
        Text(plain(model)),
        Text(str(depths.live.get(model, 0))),
        Text(_age(depths.oldest_live, model)),
        Text(str(depths.batch.get(model, 0))),
        Text(_age(depths.oldest_batch, model)),
        Text(str(quarantined), "red" if quarantined else ""),
    ]


def _worker_row(worker: WorkerRecord, gauges: WorkerGauges | None, with_gpus: bool) -> list[Cell]:
    names = [Text(plain(worker.id)), Text(plain(", ".join(worker.models))), _state(worker.state)]
    if gauges is None:
        columns = len(_WORKERS) + (len(_GPUS) if with_gpus else 0) - len(names)
        return [*names, *(Text(_UNKNOWN) for _ in range(columns))]
    usage, hits, queries = (_figure(worker, gauges, name) for name in FIGURES)
    figures = [
        str(gauges.running),
        str(gauges.waiting),
        f"{gauges.tokens_per_second:,.0f}",
        _share(usage, 1.0),
        _share(hits, queries or 0),
    ]
    return [*names, *map(Text, [*figures, *(_gpu_figures(gauges.gpus) if with_gpus else ())])]


def _figure(worker: WorkerRecord, gauges: WorkerGauges, name: str) -> float | None:
    """Return the value of a metric that the worker declares without a label."""
    for declared, samples in zip(worker.metrics, gauges.metrics, strict=False):
        if declared.name == name and samples:
            return samples[0].value
    return None


def _gpu_figures(gpus: list[GpuGauges]) -> Iterator[str]:
    """Yield the mean utilization of a worker's GPUs and their total memory, if known."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    yield _share(sum(busy), len(busy))
    known = [gpu for gpu in gpus if gpu.memory_used is not None and gpu.memory_total is not None]
    used, total = (sum(getattr(gpu, name) for gpu in known) / 2**30 for name in ("memory_used", "memory_total"))
    yield f"{used:.0f}/{total:.0f} GiB" if known else _UNKNOWN


def _share(part: float | None, whole: float) -> str:
    return _UNKNOWN if part is None or whole <= 0 else f"{part / whole:.0%}"


def _state(state: str) -> Text:
    return Text(plain(state), _COLORS.get(state, ""))


def _batch_state(batch: BatchSample) -> Text:
    """Return the state or the risk; for an open batch, the time since the last appended lines.

    The text is at most as wide as `in_progress`.
    """
    status = batch.status
    if status.shown_risk or not status.open or status.state != "in_progress":
        return _state(status.shown_risk or status.state)
    since = "" if batch.appended_ago is None else f" {_coarse(batch.appended_ago)}"
    return Text(f"open{since}", _COLORS[status.state])


def _age(ages: Mapping[str, float], model: str) -> str:
    return _coarse(ages[model]) if model in ages else ""


def _coarse(seconds: float) -> str:
    """Return only the larger unit of a duration."""
    return " ".join(duration(seconds).split()[:2])


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
