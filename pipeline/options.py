"""Flags, most of them made from fields of settings.

The value of a flag comes from the command line, else the environment, else the --config file, else
the default.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import click
from click.core import ParameterSource

from api.http_settings import HttpSettings
from api.settings import ApiSettings
from jobs.extras import install_command, missing_module
from jobs.process import FORMAT_VARIABLE
from jobs.queue.redis_url import parse_redis_url, without_secrets
from jobs.queue.settings import QueueSettings
from jobs.settings import kind_of, own_fields, variable
from pipeline.errors import Refused
from workers.engine.messages.config import EngineConfig
from workers.settings import WorkerSettings

Command = TypeVar("Command", bound=Callable[..., Any])
log = logging.getLogger("pipeline")

CHILD_VARIABLE = "PIPELINE_CHILD"
"""Environment variable of processes that another command starts."""

# Keys of a command's `meta`: content of the --redis-password-file, path of the --config file
_PASSWORD, _CONFIG = "pipeline.redis_password", "pipeline.config"

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_PROCESSES = ("api", "jobs", "worker")  # `pipeline serve` starts them
_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
}


class Size(click.ParamType[int]):
    """A whole number from 1, with an optional suffix k, m, g (thousands) or K, M, G (1024s)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        unit = _UNITS.get(text[-1:], 1)
        try:
            number = int(float(text[:-1]) * unit) if unit > 1 else int(text)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is not a whole number such as 4096, 4k or 4K", param, ctx)
        if number < 1:
            self.fail(f"{text!r} is below 1", param, ctx)
        return number


class Device(click.ParamType[str]):
    """auto, cpu, cuda, or a GPU by its number among the visible ones."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text not in ("auto", "cpu", "cuda") and not (
            text.startswith("cuda:") and text.removeprefix("cuda:").isdecimal()
        ):
            self.fail(f"{text!r} is none of auto, cpu, cuda and cuda:N", param, ctx)
        return text


class ModelNames(click.ParamType[str]):
    """Models; the environment variable separates them as PATH separates folders."""

    name = "model"
    envvar_list_splitter = os.pathsep


_KINDS: dict[str, click.ParamType[Any]] = {
    "size": Size(),
    "folder": click.Path(file_okay=False),
    "device": Device(),
}


class CheckedText(click.ParamType[str]):
    """A text for which `check` does not raise ValueError."""

    name = "text"

    def __init__(self, check: Callable[[str], object]) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            self._check(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Flag(click.Option):
    """An option whose error for a bad value names the config file, if the value is from it."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        if ctx is not None and self.name and ctx.get_parameter_source(self.name) is ParameterSource.DEFAULT_MAP:
            return f"'{self.name.replace('_', '-')}' of {ctx.meta[_CONFIG]}"
        return super().get_error_hint(ctx)


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flag(*names: str, env: str | None = None, **attributes: Any) -> Callable[[Command], Command]:
    """Return a click option that can also be set by the environment variable `env`.

    The default of `env` is PIPELINE_ and the flag's name.
    """
    longest = max((name.split("/")[0] for name in names), key=len)
    name = env or "PIPELINE_" + longest.lstrip("-").upper().replace("-", "_")
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*names, cls=Flag, envvar=name, show_envvar=True, **attributes)


def flag_of(settings: type, name: str, note: str = "", **attributes: Any) -> Callable[[Command], Command]:
    """Return the flag of one field of settings, with `note` appended to its help."""
    one = next(one for one in fields(settings) if one.name == name)
    kind, limits, shown = kind_of(one), one.metadata, as_flag(parameter_of(one))
    if kind is bool:
        shown, attributes["is_flag"] = (f"{shown}/--no-{shown[2:]}" if one.default else shown), True
    if kind is tuple:
        attributes["multiple"] = True
    if one.default is not False and one.default not in (None, ()):
        attributes["default"] = one.default
    return flag(shown, env=variable(one), type=_type_of(kind, limits), help=limits["help"] + note, **attributes)


def flags_of(settings: type, *without: str) -> Callable[[Command], Command]:
    """Return the flags of the fields that `settings` itself declares."""
    return all_of(*(flag_of(settings, one.name) for one in declared(settings) if one.name not in without))


def declared(settings: type) -> list[Field[Any]]:
    """Return the flag fields that `settings` itself declares."""
    return [one for one in own_fields(settings) if parameter_of(one)]


def parameter_of(one: Field[Any]) -> str:
    """Return click's name of the flag of a field, or "" for a field without a flag."""
    name = one.metadata.get("flag", one.name) if "help" in one.metadata else None
    return (name or "").replace("-", "_")


def values_of(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command that belong to `settings`, by field name."""
    return {one.name: values[name] for one in fields(settings) if (name := parameter_of(one)) in values}


def arguments_of(settings: type, values: Mapping[str, Any], *without: str) -> list[str]:
    """Return the command line that gives another process the same values of `declared` flags."""
    arguments: list[str] = []
    for one in declared(settings):
        name, value = as_flag(parameter_of(one)), values.get(parameter_of(one))
        if one.name in without or value is None:
            continue
        if isinstance(value, bool):
            arguments += [name] if value else [f"--no-{name[2:]}"] if one.default else []
        else:
            arguments += [part for each in (value if kind_of(one) is tuple else (value,)) for part in (name, str(each))]
    return arguments


def api_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives an API process the same flags."""
    return [*arguments_of(HttpSettings, values), *arguments_of(ApiSettings, values)]


def _type_of(kind: type, limits: Mapping[str, Any]) -> Any:
    if "kind" in limits:
        return _KINDS[limits["kind"]]
    if "choices" in limits:
        return click.Choice(limits["choices"])
    if "check" in limits:
        return CheckedText(limits["check"])
    if kind not in (int, float):
        return None
    lowest, highest = limits.get("min", limits.get("above")), limits.get("max")
    ranges: Any = click.IntRange if kind is int else click.FloatRange
    return ranges(lowest, highest, min_open="above" in limits)


def all_of(*flags: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator for several flags; the help shows them in this order."""

    def decorate(command: Command) -> Command:
        for one in reversed(flags):
            command = one(command)
        return command

    return decorate


def _read_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        ctx.meta[_CONFIG] = path
        ctx.default_map = {**(ctx.default_map or {}), **_config_values(ctx, path)}
    return path


def _config_values(ctx: click.Context, path: Path) -> dict[str, Any]:
    root = ctx.find_root().command
    names = root.list_commands(ctx) if isinstance(root, click.Group) else []
    commands = [root.get_command(ctx, name) for name in names] if isinstance(root, click.Group) else [ctx.command]
    params = [param for command in commands if command is not None for param in command.params]
    options = [param for param in params if isinstance(param, click.Option)]
    values = {str(key).replace("-", "_"): value for key, value in _parse_config(path).items()}
    own = {param.name for param in ctx.command.params}
    unknown = sorted(set(values) - {param.name for param in options} - {"model"})
    if unknown:
        raise Refused(f"{path}: no flag is called {', '.join(unknown)}")
    if "model" in values and "models" in own:
        values["models"] = values.pop("model")
    elif isinstance(values.get("model"), list):  # a single model is also the commands' argument
        values["model_option"] = values.pop("model")
    repeated = {option.name for option in options if option.multiple}
    return {name: [value] if name in repeated and isinstance(value, str) else value for name, value in values.items()}


def _parse_config(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        import yaml  # type: ignore[import-untyped]

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise Refused(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise Refused(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read as configuration: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise Refused(f"{path}: a config file holds flag names and values, such as `max-num-seqs: 64`")
    return values


def _configure_logs(ctx: click.Context, _param: click.Parameter, level: str) -> str:
    if not ctx.resilient_parsing:
        from jobs.process import configure_logs

        configure_logs(str(ctx.info_name), level)
    return level


def _set_log_format(ctx: click.Context, _param: click.Parameter, form: str) -> None:
    """Set the log format, before logs are configured, for this process and its children."""
    if not ctx.resilient_parsing:
        os.environ[FORMAT_VARIABLE] = form


common_options = all_of(
    flag(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="YAML or TOML file of flag names and values; flags and environment variables win over it.",
    ),
    flag(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        is_eager=True,
        expose_value=False,
        callback=_set_log_format,
        help="How log lines are written; json: one object per line, also of every process that is started.",
    ),
    flag(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        callback=_configure_logs,
        help="Least severe level that is logged.",
    ),
)


def _check_url(ctx: click.Context, _param: click.Parameter, url: str | None) -> str | None:
    if not url:
        return None
    try:
        parse_redis_url(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return _with_password(url, ctx.meta.get(_PASSWORD))


def _check_fleet_url(ctx: click.Context, param: click.Parameter, url: str | None) -> str | None:
    checked = _check_url(ctx, param, url)
    if checked is None and not ctx.resilient_parsing:
        hint = " (or use `pipeline serve`, which brings its own)" if ctx.info_name in _PROCESSES else ""
        raise Refused(f"`pipeline {ctx.info_name}` needs the queue of a fleet: set REDIS_URL{hint}")
    return checked


def _with_password(url: str, password: str | None) -> str:
    parts = urlsplit(url)
    if password is None or parts.password is not None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))


def _read_password(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Refused(f"the password of Redis cannot be read from {path}: {reason}") from None
    if not password:
        raise Refused(f"the password of Redis cannot be read from {path}: it is empty")
    ctx.meta[_PASSWORD] = password
    if url := ctx.params.get("redis_url"):  # click reads the command line first
        ctx.params["redis_url"] = _with_password(url, password)


_password_option = flag(
    "--redis-password-file",
    env="REDIS_PASSWORD_FILE",
    type=click.Path(path_type=Path),
    expose_value=False,
    callback=_read_password,
    help="File that holds the password for a --redis-url that names none.",
)
redis_option, fleet_redis_option, optional_redis_option = (
    all_of(flag_of(QueueSettings, "redis_url", note, callback=check), _password_option)
    for note, check in ((" [default: a private one]", _check_url), (" [required]", _check_fleet_url), ("", _check_url))
)
"""`fleet_redis_option` is for commands that require a URL, `optional_redis_option` for others."""


def _check_store(_ctx: click.Context, _param: click.Parameter, location: str) -> str:
    from jobs.store.storage import StoreError
    from jobs.store.store_folder import store_root

    try:
        return str(store_root(location))
    except StoreError as error:
        raise click.BadParameter(str(error)) from None


def _check_served_store(ctx: click.Context, param: click.Parameter, location: str) -> str:
    from jobs.store.bucket_check import check_bucket
    from jobs.store.storage import StoreError

    try:
        check_bucket(location)
    except StoreError as error:
        raise click.BadParameter(str(error)) from None
    return _check_store(ctx, param, location)


store_option, served_store_option = (
    flag_of(QueueSettings, "file_store", callback=check) for check in (_check_store, _check_served_store)
)
"""`served_store_option` is for processes that serve; it also tests the features of a bucket."""

json_option = flag("--json", "as_json", env="PIPELINE_JSON", is_flag=True, help="Print JSON for programs.")

tracing_option = flag_of(QueueSettings, "otlp_traces_endpoint")
on_demand_option = flag_of(QueueSettings, "on_demand_models")

_WEBHOOKS = ("webhook_url", "webhook_secret_file")
webhook_options = all_of(*(flag_of(QueueSettings, name) for name in _WEBHOOKS))

control_options = flags_of(
    QueueSettings, "redis_url", "file_store", "on_demand_models", "otlp_traces_endpoint", *_WEBHOOKS
)
"""Options of processes that do not create tracing spans."""

queue_options = all_of(control_options, tracing_option)

shutdown_option = flag_of(WorkerSettings, "shutdown_timeout")

model_options = all_of(flags_of(WorkerSettings, "shutdown_timeout"), flags_of(EngineConfig))
MODEL_FLAGS = [parameter_of(one) for settings in (WorkerSettings, EngineConfig) for one in declared(settings)]

model_flags_option = flag(
    "--model-flags",
    multiple=True,
    help="Flags of one of several models, as 'NAME=--max-model-len 8K --dtype float32'; may be repeated.",
)
served_models_options = all_of(
    flag(
        "--model",
        "model_option",
        env="PIPELINE_MODEL",
        type=ModelNames(),
        multiple=True,
        help="Folder or hub name of a model, NAME=FOLDER, or a folder of models; may be repeated."
        " [default: the demo model]",
    ),
    model_flags_option,
)
"""Options of commands that serve any number of models."""

replicas_option = flag(
    "--data-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    help=(
        "Copies of the model that share the work. Each has a GPU (or --tensor-parallel-size of them) of its own. On a"
        " CPU they share the threads: OMP_NUM_THREADS, else one for each CPU, divided equally among all processes."
    ),
)


def require_extra(extra: str, ctx: click.Context) -> None:
    """Raise `Refused` if an extra that the command needs is not installed."""
    if (module := missing_module(extra)) is not None:
        raise Refused(
            f"`pipeline {ctx.info_name}` needs the extra {extra}. No module named '{module}': {install_command(extra)}"
        )


def check_model_flags(ctx: click.Context) -> None:
    """Raise `Refused` for model flags that contradict each other."""
    values = ctx.params
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if ":" in values["device"] and values.get(name, 1) > 1:
            raise Refused(
                f"--device {values['device']} names one GPU, and {as_flag(name)} {values[name]} needs more: give"
                " --device cuda"
            )
    tokens, requests = values.get("max_num_batched_tokens"), values.get("max_num_seqs")
    if tokens is not None and requests is not None and tokens < requests:
        raise Refused(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {requests}: a step gives each running request"
            " one token"
        )
    if values.get("kv_cache_memory_bytes") is not None and given(ctx, "gpu_memory_utilization"):
        raise Refused("--kv-cache-memory-bytes and --gpu-memory-utilization both size the KV cache: give one of them")


def one_model(ctx: click.Context, positional: str | None, option: str | None) -> str | None:
    """Return the model of a command that accepts it as an argument or as a flag."""
    if positional is not None and option is not None and given_as_flag(ctx, ["model_option"]) and positional != option:
        raise Refused(f"two models are named: {positional} and --model {option}")
    return positional if positional is not None else option


def all_models(ctx: click.Context, positional: str | None, options: tuple[str, ...]) -> list[str]:
    """Return the models of a command that accepts one argument, or any number of flags."""
    if positional is None:
        return list(options)
    if given_as_flag(ctx, ["model_option"]) and options != (positional,):
        others = ", ".join(options)
        raise Refused(f"two models are named: {positional} and --model {others}; give each of several as --model")
    return [positional]


def given(ctx: click.Context, name: str) -> bool:
    """Return whether this parameter was set, by a flag, a variable or a config file."""
    return ctx.get_parameter_source(name) in _SOURCES


def given_as_flag(ctx: click.Context, names: Iterable[str]) -> list[str]:
    """Return the parameters of `names` that are set on the command line, as flags."""
    return [as_flag(name) for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def log_settings(ctx: click.Context, level: int = logging.INFO) -> None:
    """Log every setting that differs from its default, with its source.

    A child process logs none, since its parent logged them.
    """
    if CHILD_VARIABLE in os.environ:
        return
    changed = [
        f"{param.name}={_shown(param.name, ctx.params.get(param.name))} ({_SOURCES[source]})"
        for param in ctx.command.params
        if isinstance(param, click.Option)
        and param.name
        and (source := ctx.get_parameter_source(param.name)) in _SOURCES
        and ctx.params.get(param.name) != param.default
        and param.name in ctx.params
    ]
    if changed:
        log.log(level, "settings that differ from the defaults: %s", ", ".join(changed))


def _shown(name: str, value: Any) -> str:
    if name == "webhook_url":  # a path or a query may be secret too
        return f"{urlsplit(value).scheme}://{urlsplit(value).hostname}"
    return without_secrets(str(value)) if name == "redis_url" else str(value)


def model_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives another process the same model flags."""
    besides = () if values["kv_cache_memory_bytes"] is None else ("gpu_memory_utilization",)
    return [*arguments_of(WorkerSettings, values), *arguments_of(EngineConfig, values, *besides)]
