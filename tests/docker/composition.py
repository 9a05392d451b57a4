"""`docker/compose.yaml` and what lies over it, as an engine reads them: merged, with `$$` and
defaults of variables put in.
"""

import re
from typing import Any

import yaml

from tests.support.commands import REPOSITORY

FOLDER = REPOSITORY / "docker"
FILES = tuple(FOLDER / name for name in ("compose.yaml", "compose.gpu.yaml", "compose.monitoring.yaml"))

Service = dict[str, Any]


def services() -> dict[str, Service]:
    """The services of the deployment on CPUs, by name."""
    services = yaml.safe_load(FILES[0].read_text())["services"]
    return {name: _filled(service) for name, service in services.items()}


def seconds(text: str) -> float:
    """A duration of a compose file: 30s, 5m."""
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).replace("$$", "$") if isinstance(value, str) else value
