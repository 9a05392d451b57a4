"""Conversion of the values of the model flags to the settings of a worker."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import Refused
from pipeline.options import values_of
from workers.engine.messages.config import EngineConfig, most_processes
from workers.engine.messages.errors import ModelLoadError
from workers.engine.profiling import make_profile_folder
from workers.model_folder import folder_problem, pointer_problem
from workers.settings import DEMO_MODEL, WorkerSettings

_SUFFIXES = {".safetensors", ".json"}


def worker_settings(model: str | None, redis_url: str, values: Mapping[str, Any]) -> WorkerSettings:
    """Return the settings of a worker for `model` (None: the demo model). Raises `Refused`."""
    check_model_folder(model)
    settings = unchecked_settings(model, redis_url, values)
    check_model_config(model, values)
    return settings


def unchecked_settings(model: str | None, redis_url: str, values: Mapping[str, Any]) -> WorkerSettings:
    """Return the settings of a worker without checking the model's folder. Raises `Refused`."""
    _check_processes(values["tensor_parallel_size"], values.get("data_parallel_size", 1))
    try:
        if values["profile"] is not None:
            make_profile_folder(Path(values["profile"]))
        engine = EngineConfig(model=model or DEMO_MODEL, **values_of(EngineConfig, values))
        return WorkerSettings.from_environment(
            **{**values_of(WorkerSettings, values), "redis_url": redis_url, "engine": engine}
        )
    except ValueError as error:
        raise Refused(str(error)) from None


def _check_processes(ranks: int, replicas: int) -> None:
    asked, most = ranks * replicas, most_processes()
    if asked > most:
        sizes = {"--tensor-parallel-size": ranks, "--data-parallel-size": replicas}
        flags = " and ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise Refused(f"{flags}: that is {asked} engine processes, and the CPUs here can take {most} at most")


def check_model_folder(model: str | None) -> None:
    """Raise `Refused` for a local path that is no model's folder, or lacks what its files link or
    point to.

    The worker checks the rest.
    """
    if model is None:
        return
    path = Path(model).expanduser()
    if not path.exists():
        if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
            raise Refused(f"there is no model folder {model}")
        return
    _check_links(path)
    if problem := folder_problem(path):
        raise Refused(problem)


def check_model_config(model: str | None, values: Mapping[str, Any]) -> None:
    """Raise `Refused` for a local model whose config.json cannot be run with these flags."""
    folder = Path(model or DEMO_MODEL).expanduser()
    if not folder.exists():
        return
    from workers.engine.checkpoint.config_file import check_config_file

    try:
        check_config_file(folder, values["model_impl"], values["task"], values["tensor_parallel_size"])
    except ModelLoadError as error:
        raise Refused(f"the model {folder} cannot run: {error}") from None


def _check_links(folder: Path) -> None:
    """Raise `Refused` for a broken link, such as in a partly moved hub cache, and for a pointer of
    Git LFS.
    """
    for file in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if file.suffix in _SUFFIXES and file.is_symlink() and not file.exists():
            raise Refused(
                f"{file} is a link to {os.readlink(file)}, which is not there: download the model again, or copy it"
                " with the files behind its links (cp -rL)"
            )
        if file.suffix in _SUFFIXES and (problem := pointer_problem(file)):
            raise Refused(problem)
