"""Write the tables of `docs/` that follow from the code: `python -m tools.docs_tables`.

A table is between `<!-- table: NAME -->` and the next `<!-- end -->`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from api.http_settings import HttpSettings
from api.routes.metrics import QUEUE_METRICS, QueueMetric
from api.settings import ApiSettings
from jobs.protocol import parameters, pooling_parameters
from jobs.protocol.endpoints import POOLING_ENDPOINTS
from jobs.protocol.value_types import ValueType
from jobs.queue.gauges import MetricDescriptor
from jobs.queue.settings import QueueSettings
from jobs.settings import own_fields, variable
from pipeline.hosting.settings import HostingSettings
from pipeline.options import as_flag, parameter_of
from pipeline.ray.settings import FleetSettings
from tools.errors import TREES, exception_classes
from workers.engine.messages.config import EngineConfig
from workers.replica import statistics
from workers.settings import WorkerSettings

DOCS = Path(__file__).parents[1] / "docs"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write every page whose tables are not those of the code."""
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text()
        new = with_tables(old)
        if new != old:
            page.write_text(new)
            print(f"wrote {page.name}")


def with_tables(text: str) -> str:
    """Return a page with its tables as the code has them."""
    return _MARKED.sub(lambda found: f"{found[1]}{_table(TABLES[found[2]]())}{found[3]}", text)


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    """Rows in Markdown, the first as the head."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _parameters() -> Iterator[tuple[str, ...]]:
    yield "parameter", "values", "default", "what it does"
    for name, parameter, default in parameters.rows():
        values = parameter.values.summary
        if parameter.in_chats is not None:
            values = f"chats {parameter.in_chats.summary}, completions {values}"
        yield f"`{name}`", values, parameter.default or _default(default), parameter.does


def _unsupported(kinds: Mapping[str, ValueType]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each set of values that pass, with all parameters that take it."""
    yield "parameter", "values that pass"
    names: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        names.setdefault(kind.summary, []).append(f"`{name}`")
    yield from ((", ".join(group), summary) for summary, group in names.items())


def _pooling_parameters() -> Iterator[tuple[str, ...]]:
    yield "parameter", "values", "default", "of", "what it does"
    for name, parameter, default in pooling_parameters.pooling_rows():
        names = [url.removeprefix("/v1/") for url in parameter.urls]
        of = "all" if len(names) == len(POOLING_ENDPOINTS) else ", ".join(names)
        yield f"`{name}`", parameter.values.summary, parameter.default or _default(default), of, parameter.does


def _worker_metrics() -> Iterator[tuple[str, ...]]:
    yield "name", "kind", "label", "what it is"
    for metric in statistics.declared_metrics():
        yield f"`{_exported(metric)}`", metric.kind, metric.label and f"`{metric.label}`", metric.help


def _queue_metrics() -> Iterator[tuple[str, ...]]:
    yield "name", "kind", "labels", "what it is"
    for metric in QUEUE_METRICS:
        yield f"`{_exported(metric)}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help


def _exported(metric: MetricDescriptor | QueueMetric) -> str:
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def _settings(*classes: type) -> Iterator[tuple[str, ...]]:
    yield "flag", "variable", "default", "what it is"
    for settings in classes:
        for one in own_fields(settings):
            does, _, default = one.metadata["help"].removesuffix("]").partition(" [default: ")
            flag = f"`{as_flag(name)}`" if (name := parameter_of(one)) else "–"
            yield flag, f"`{variable(one)}`", default or _setting(one.default), does


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    value = " ".join(value) if isinstance(value, tuple) else value
    return "none" if value is None else f"`{value}`"


def _errors() -> Iterator[tuple[str, ...]]:
    yield "error", "HTTP status", "exit code", "retry"
    kinds = [kind for kind in exception_classes() if not kind.__name__.startswith("_")]
    for root in TREES:
        yield from _branch(root, kinds, ())


def _branch(kind: Any, kinds: list[Any], above: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of an error and of its subclasses, but none that repeats the row above it."""
    retry = getattr(kind, "retry", None)
    columns = (
        str(getattr(kind, "status", "–")),
        str(getattr(kind, "exit_code", "–")),
        {True: "yes", False: "no", None: "–"}[retry],
    )
    if above[-1:] != (columns,):
        yield f"{'· ' * len(above)}`{kind.__name__}`", *columns
        above = (*above, columns)
    for one in sorted(kinds, key=lambda one: str(one.__name__)):
        if kind in one.__bases__:
            yield from _branch(one, kinds, above)


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else "none"


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "parameters": _parameters,
    "unsupported": partial(_unsupported, parameters.UNSUPPORTED),
    "pooling_parameters": _pooling_parameters,
    "pooling_unsupported": partial(_unsupported, pooling_parameters.POOLING_UNSUPPORTED),
    "worker_metrics": _worker_metrics,
    "queue_metrics": _queue_metrics,
    "errors": _errors,
    "queue_settings": partial(_settings, QueueSettings),
    "worker_settings": partial(_settings, WorkerSettings, EngineConfig),
    "hosting_settings": partial(_settings, HostingSettings),
    "fleet_settings": partial(_settings, FleetSettings),
    "api_settings": partial(_settings, HttpSettings, ApiSettings),
}

if __name__ == "__main__":
    main()
