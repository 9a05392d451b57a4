"""Configuration of everything that talks to the queue; every field is also an environment variable
of the same name, in capitals.
"""

import math
import os
from dataclasses import Field, dataclass, field, fields
from typing import Any

_NOT_GIVEN: Any = object()


class SettingsError(ValueError):
    """A setting that cannot be used; one sentence that names its environment variable and says what
    to do.
    """


def _setting(default: float | str | None, *, may_be_zero: bool = False) -> Any:
    """A field that has `default` where neither its maker nor the environment says otherwise."""
    return field(default=_NOT_GIVEN, metadata={"default": default, "may_be_zero": may_be_zero})


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """One frozen set of values per process.

    Seconds and bytes unless a comment says otherwise. Raises `SettingsError`.

    Plain, for it is among the first things that every process imports.
    """

    redis_url: str | None = _setting(None)  # none: a private server is started
    lease_seconds: float = _setting(30.0)  # how long a claim lasts without being renewed
    # Between the checkpoints of a request that no client watches
    stream_interval: float = _setting(2.0)
    # How long one call retries while Redis cannot answer
    redis_retry_seconds: float = _setting(20.0, may_be_zero=True)
    # Folder of files, manifests, parts and outputs
    file_store: str = _setting("./store")
    # Request bodies of one batch that Redis holds at once
    window_bytes: int = _setting(64 * 1024 * 1024)
    # Results of a batch in Redis above which none of its lines start
    undrained_bytes: int = _setting(64 * 1024 * 1024)
    # Lost workers after which a request ends; machines die, requests do not
    worker_deaths: int = _setting(1000)
    # How long the queue knows an ended batch; its files stay
    ended_batch_seconds: int = _setting(30 * 24 * 3600)
    stream_keep_seconds: int = _setting(300)  # how long a finished token stream can still be read

    def __post_init__(self) -> None:
        for setting in fields(self):
            given = getattr(self, setting.name)
            if given is _NOT_GIVEN:  # an empty variable is none, as it is to the command line
                given = os.environ.get(setting.name.upper()) or setting.metadata["default"]
            object.__setattr__(self, setting.name, _checked(setting, given))


def _checked(setting: Field[Any], given: Any) -> Any:
    """`given` as what the setting is, a text of the environment too. Raises SettingsError."""
    default, may_be_zero = setting.metadata["default"], setting.metadata["may_be_zero"]
    if not isinstance(default, int | float):
        return given
    kind = type(default)
    try:
        value = kind(given) if isinstance(given, str) else given
    except ValueError:
        value = math.nan
    if 0 < value < math.inf or (value == 0 and may_be_zero):
        return value
    wanted = f"{'a whole number' if kind is int else 'a number'} {'from 0 up' if may_be_zero else 'above 0'}"
    raise SettingsError(
        f"{setting.name.upper()} must be {wanted}, got {given!r}: give one, or leave it out for {default}"
    )
