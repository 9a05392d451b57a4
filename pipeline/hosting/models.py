"""The models of a server, from the flags --model and --model-flags."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeline.errors import Refused
from pipeline.hosting.needs import cache_bytes_of, uses_gpus
from pipeline.options import all_of, check_model_flags, model_arguments, model_options, replicas_option
from pipeline.worker_settings import check_model_config, check_model_folder, unchecked_settings
from workers.model_folder import MODULES, other_kind
from workers.settings import WorkerSettings

_MARKS = ("config.json", MODULES)
"""Files by which a model's folder is recognized; it has at least one."""

_NAME_OF_FLAGS = "--model-flags"


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One of a server's models, and the flags of its worker."""

    title: str  # name in log lines and in --model-flags
    folder: str | None
    settings: WorkerSettings
    values: Mapping[str, Any]  # of its flags
    replicas: int

    @property
    def arguments(self) -> list[str]:
        """The command line of its worker."""
        return [*([self.folder] if self.folder else []), *model_arguments(self.values)]

    def sized(self, most_cache: int) -> "ServedModel":
        """Return the model with a KV cache of at most `most_cache` bytes for each replica.

        A model on a GPU, or with a size in its flags, is returned unchanged.
        """
        engine = self.settings.engine
        if engine.kv_cache_memory_bytes is not None or uses_gpus(engine.device):
            return self
        size = cache_bytes_of(engine, most_cache)
        settings = replace(self.settings, engine=replace(engine, kv_cache_memory_bytes=size))
        return replace(self, settings=settings, values={**self.values, "kv_cache_memory_bytes": size})

    @property
    def names(self) -> list[str]:
        """The names that requests may use."""
        return self.settings.models

    @property
    def listed_names(self) -> list[str]:
        """These names without aliases."""
        return [name for name in self.names if name not in self.settings.aliases]


@dataclass(frozen=True)
class _Named:
    """A model of a --model flag."""

    name: str  # "" for the model's own
    folder: str | None
    checked: bool  # whether a bad model is refused at once


def served_models(
    given: Sequence[str],
    flags: Sequence[str],
    redis_url: str | None,
    values: Mapping[str, Any],
    more: Callable[[click.Command], click.Command] = replicas_option,
) -> list[ServedModel]:
    """Return the models of a server or of a run; the demo model if none is `given`.

    `values` are the flags of all models; `flags` has flags for single models, as NAME=FLAGS. They
    may be flags of a worker or flags that `more` adds. Raises `Refused`.
    """
    named = [model for text in given for model in _named(text)] or [_Named("", None, checked=True)]
    if len(named) > 1 and values["served_model_name"]:
        raise Refused("--served-model-name names one model, and there are several: give --model NAME=FOLDER")
    own: dict[str, str] = {}
    for title, text in map(_split_flags, flags):
        own[title] = f"{own.get(title, '')} {text}"
    command = all_of(model_options, more)(click.Command(_NAME_OF_FLAGS, add_help_option=False))
    models = [_served(model, own, redis_url, values, command) for model in named]
    if unknown := [title for title in own if title not in {model.title for model in models}]:
        titles = ", ".join(model.title for model in models)
        raise Refused(f"{_NAME_OF_FLAGS} {unknown[0]}=...: no model is called so; there are: {titles}")
    _check_names(models)
    return models


def _served(
    named: _Named,
    own: Mapping[str, str],
    redis_url: str | None,
    values: Mapping[str, Any],
    command: click.Command,
) -> ServedModel:
    name, folder = named.name, named.folder
    if name:
        values = {**values, "served_model_name": (name,)}
    title = name or unchecked_settings(folder, redis_url or "", values).models[-1]
    if title in own:
        values = {**values, **_read_flags(title, own[title], values, command)}
    settings = unchecked_settings(folder, redis_url or "", values)
    if named.checked:
        check_model_config(folder, values)
    return ServedModel(title, folder, settings, values, values["data_parallel_size"])


def _named(text: str) -> list[_Named]:
    """Return the models of one --model flag.

    A named model is checked here; a bad model in a folder of models is refused when it is loaded.
    """
    name, separator, folder = text.partition("=")
    if separator and name and "/" not in name and not Path(text).exists():
        if not folder:
            raise Refused(f"--model {text} gives {name} no folder: it is NAME=FOLDER, or NAME=HUB-NAME")
        check_model_folder(folder)
        return [_Named(name, folder, checked=True)]
    if _is_model(Path(text)) or not Path(text).is_dir():
        check_model_folder(text)
        return [_Named("", text, checked=True)]
    found = [_Named("", str(path), checked=False) for path in sorted(Path(text).iterdir()) if _is_model(path)]
    if not found:
        no_model = f"the folder {text} has no config.json, and neither has a folder in it: it holds no model"
        raise Refused(other_kind(Path(text)) or no_model)
    return found


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() or (folder / name).is_symlink() for name in _MARKS)


def _split_flags(text: str) -> tuple[str, str]:
    title, separator, flags = text.partition("=")
    if not separator or not title:
        raise Refused(f"{_NAME_OF_FLAGS} {text!r} is not NAME=FLAGS, such as 'chat=--max-model-len 8K'")
    return title, flags


def _read_flags(title: str, flags: str, values: Mapping[str, Any], command: click.Command) -> dict[str, Any]:
    try:
        ctx = command.make_context(_NAME_OF_FLAGS, shlex.split(flags))
    except (click.UsageError, ValueError) as error:
        reason = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise Refused(f"{_NAME_OF_FLAGS} {title}: {reason.rstrip('.')}") from None
    own = {name: value for name, value in ctx.params.items() if _is_given(ctx, name)}
    ctx.params = {**values, **own}
    check_model_flags(ctx)
    return own


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _check_names(models: Sequence[ServedModel]) -> None:
    owners: dict[str, ServedModel] = {}
    for model in models:
        for name in model.names:
            other = owners.setdefault(name, model)
            if other is not model:
                raise Refused(
                    f"two models are called {name}, {other.settings.engine.model} and {model.settings.engine.model}:"
                    " give --model NAME=FOLDER"
                )
