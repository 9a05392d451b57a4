"""What the files of Prometheus and Grafana in `docker/` ask for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from api.routes.metrics import OF_WORKER, QUEUE_METRICS
from tests.docker.composition import FOLDER
from workers.replica.statistics import declared_metrics

CONFIG = FOLDER / "prometheus" / "prometheus.yml"
ALERTS = FOLDER / "prometheus" / "alerts.yml"
BOARD = FOLDER / "grafana" / "dashboards" / "pipeline.json"
PROVISIONING = FOLDER / "grafana" / "provisioning"
COMPOSE = FOLDER / "compose.monitoring.yaml"

_SELECTOR = re.compile(r"\b((?:vllm:|pipeline_)\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*=~?")
_PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


def board() -> dict[str, Any]:
    """The dashboard."""
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, rows left out."""
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[tuple[str, str]]:
    """The title of each panel with one of its queries, its variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """The names of our series in a query, each with the labels that it is selected by."""
    return [(name, set(_LABEL.findall(labels or ""))) for name, labels in _SELECTOR.findall(query)]


def exported() -> dict[str, set[str]]:
    """Every series that the API exports, with its labels."""
    series = {}
    for own in QUEUE_METRICS:
        series |= {own.name + part: set(own.labels) for part in _PARTS[own.kind]}
    for metric in declared_metrics():
        labels = {*OF_WORKER, *([metric.label] if metric.label else [])}
        for part in _PARTS[metric.kind]:
            series[metric.name + part] = labels | ({"le"} if part == "_bucket" else set())
    return series
