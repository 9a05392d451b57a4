"""Settings of a server for all of its models together."""

from dataclasses import dataclass

from jobs.settings import Settings, setting


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class HostingSettings(Settings):
    """One frozen set of values."""

    idle_unload: float | None = setting(
        None,
        "Seconds without work after which a model is unloaded; it is loaded when work for it waits, also one model"
        " alone. [default: no model is unloaded while there is memory for the others]",
        above=0,
    )
    max_memory: int | None = setting(
        None,
        "Bytes of memory that all models may take together. [default: what the machine has]",
        min=1,
        kind="size",
    )
