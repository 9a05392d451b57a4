"""Flags that several commands share, and where their values come from: flag, then environment, then
--config file, then default.
"""

import logging
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import click
from click.core import ParameterSource

from pipeline.errors import Refused

Command = TypeVar("Command", bound=Callable[..., Any])
log = logging.getLogger("pipeline")

CHILD_VARIABLE = "PIPELINE_CHILD"
"""In the environment of processes that another command starts."""

_PASSWORD = "pipeline.redis_password"  # in a command's `meta`: what --redis-password-file holds

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
}


class Size(click.ParamType[int]):
    """A whole number from 1 up, with k, m, g (thousands) or K, M, G (powers of 1024) behind it if
    wanted.
    """

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


def flag(*names: str, env: str | None = None, **attributes: Any) -> Callable[[Command], Command]:
    """Return a click option that can also be set by the environment variable `env`.

    The default of `env` is PIPELINE_ and the flag's name.
    """
    longest = max((name.split("/")[0] for name in names), key=len)
    variable = env or "PIPELINE_" + longest.lstrip("-").upper().replace("-", "_")
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*names, envvar=variable, show_envvar=True, **attributes)


def all_of(*flags: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return several flags as one decorator, shown in this order."""

    def decorate(command: Command) -> Command:
        for one in reversed(flags):
            command = one(command)
        return command

    return decorate


def _read_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **_config_values(ctx, path)}
    return path


def _config_values(ctx: click.Context, path: Path) -> dict[str, Any]:
    root = ctx.find_root().command
    commands = list(root.commands.values()) if isinstance(root, click.Group) else [ctx.command]
    known = {param.name for command in commands for param in command.params if isinstance(param, click.Option)}
    values = {str(key).replace("-", "_"): value for key, value in _parse_config(path).items()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise Refused(f"{path}: no flag is called {', '.join(unknown)}")
    return values


def _parse_config(path: Path) -> dict[str, Any]:
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
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Least severe level that is logged.",
    ),
)


def _check_url(ctx: click.Context, _param: click.Parameter, url: str | None) -> str | None:
    if not url:
        return None
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise click.BadParameter(
            "it must look like redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/redis.sock"
        )
    return _with_password(url, ctx.meta.get(_PASSWORD))


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


def _redis_flags(without: str) -> Callable[[Command], Command]:
    """`without` says in the help what follows where no URL is given."""
    return all_of(
        flag(
            "--redis-url",
            env="REDIS_URL",
            callback=_check_url,
            help=f"redis://, rediss:// or unix:// URL of the queue. [{without}]",
        ),
        flag(
            "--redis-password-file",
            env="REDIS_PASSWORD_FILE",
            type=click.Path(path_type=Path),
            expose_value=False,
            callback=_read_password,
            help="File that holds the password for a --redis-url that names none.",
        ),
    )


redis_option = _redis_flags("default: a private one")
fleet_redis_option = _redis_flags("required")
"""The same for commands that refuse to run without it."""


def _check_store(_ctx: click.Context, _param: click.Parameter, location: str) -> str:
    from jobs.store.file_store import store_folder
    from jobs.store.storage import StoreError

    try:
        return str(store_folder(location))
    except StoreError as error:
        raise click.BadParameter(str(error)) from None


store_option = flag(
    "--file-store",
    env="FILE_STORE",
    default="./store",
    callback=_check_store,
    help=(
        "Folder of files, batches and API keys; one and the same for every `pipeline api` and `pipeline jobs` of a"
        " fleet."
    ),
)

json_option = flag("--json", "as_json", env="PIPELINE_JSON", is_flag=True, help="Print JSON for programs.")

queue_options = all_of(
    flag("--lease-seconds", env="LEASE_SECONDS", type=click.FloatRange(min=0.2), default=30.0,
         help="Seconds for which a worker's claim on a request holds without being renewed."),
    flag("--stream-interval", env="STREAM_INTERVAL", type=click.FloatRange(min=0.02), default=2.0,
         help="Seconds between the checkpoints of a request that no client watches."),
)  # fmt: skip

model_options = all_of(
    flag(
        "--served-model-name",
        multiple=True,
        help="Name that requests use for the model; may be repeated. [default: the --model given]",
    ),
    flag("--tokenizer", help="Folder or hub name of the tokenizer. [default: the model's]"),
    flag(
        "--model-impl",
        type=click.Choice(["auto", "own", "transformers"]),
        default="auto",
        help=("Code that runs the model; auto: the engine's own if it has the architecture, else transformers'."),
    ),
    flag(
        "--device",
        type=Device(),
        default="auto",
        help="cuda (any free GPU), cuda:1 (that one) or cpu; auto: a GPU if there is one.",
    ),
    flag(
        "--tensor-parallel-size",
        type=click.IntRange(min=1),
        default=1,
        help="GPUs (on a CPU, processes) that share one copy of the model; must divide its attention heads.",
    ),
    flag(
        "--device-lock-folder",
        type=click.Path(file_okay=False),
        help=(
            "Folder of the locks on GPUs, one for all workers of a host, containers too. [default: /run/lock or /tmp]"
        ),
    ),
    flag(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Type of weights and activations.",
    ),
    flag(
        "--max-model-len",
        type=Size(),
        help="Longest prompt and answer together, in tokens. [default: from the model's config]",
    ),
    flag(
        "--max-num-seqs",
        type=Size(),
        help="Sequences (choices of requests) that run at once. [default: 64 on a CPU, 1024 on a GPU]",
    ),
    flag(
        "--max-num-batched-tokens",
        type=Size(),
        help="Tokens computed in one step. [default: 2048 on a CPU, 16384 on a GPU]",
    ),
    flag("--block-size", type=Size(), help="Tokens per block of the KV cache."),
    flag(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        help="Reuse the KV cache of shared prompt beginnings.",
    ),
    flag(
        "--gpu-memory-utilization",
        type=click.FloatRange(0.0, 1.0, min_open=True),
        default=0.9,
        help="Share of the GPU's memory to use.",
    ),
    flag(
        "--kv-cache-memory-bytes",
        type=Size(),
        help="Size of the KV cache on each GPU. [default: what the machine allows]",
    ),
    flag(
        "--enforce-eager",
        is_flag=True,
        help="Launch every kernel by itself, without CUDA graphs; saves the graphs' memory.",
    ),
    flag(
        "--step-timeout",
        type=click.FloatRange(min=1),
        help=(
            "Seconds without a step after which the engine core counts as hung. [default: 300; lowered from the"
            " measured step times]"
        ),
    ),
    flag(
        "--profile",
        type=click.Path(file_okay=False),
        help="Folder for a trace of some steps of the engine core, in Chrome's format.",
    ),
    flag("--nvtx", is_flag=True, help="Name the parts of each step for Nsight Systems."),
    flag("--chat-template", help="Jinja file, or the template itself. [default: the tokenizer's]"),
)

MODEL_FLAGS = (
    "served_model_name",
    "tokenizer",
    "model_impl",
    "device",
    "tensor_parallel_size",
    "device_lock_folder",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "step_timeout",
    "profile",
    "nvtx",
    "chat_template",
)
"""Parameter names of `model_options`."""


replicas_option = flag(
    "--data-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    help=(
        "Copies of the model that share the work. Each has a GPU (or --tensor-parallel-size of them) of its own. On a"
        " CPU they share the threads: OMP_NUM_THREADS, else one for each CPU, divided equally among all processes."
    ),
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
    """Return the model of a command that takes it as an argument and as a flag."""
    if positional is not None and option is not None and given_as_flag(ctx, ["model_option"]) and positional != option:
        raise Refused(f"two models are named: {positional} and --model {option}")
    return positional if positional is not None else option


def given(ctx: click.Context, name: str) -> bool:
    """Return whether this parameter was set, by a flag, a variable or a config file."""
    return ctx.get_parameter_source(name) in _SOURCES


def given_as_flag(ctx: click.Context, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are given on the command line, as flags."""
    return [as_flag(name) for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def log_settings(ctx: click.Context) -> None:
    """Log every setting that differs from its default, with its source.

    A child logs none: its parent logged them.
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
        log.info("settings that differ from the defaults: %s", ", ".join(changed))


def _shown(name: str, value: Any) -> str:
    if name == "redis_url" and isinstance(value, str) and "@" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return str(value)


def model_arguments(values: dict[str, Any]) -> list[str]:
    """Return the command line that gives another process the same model flags."""
    caching = as_flag("enable_prefix_caching") if values["enable_prefix_caching"] else "--no-enable-prefix-caching"
    left_out = {"enable_prefix_caching"}
    if values["kv_cache_memory_bytes"] is not None:
        left_out.add("gpu_memory_utilization")
    return [caching, *flag_arguments(values, (name for name in MODEL_FLAGS if name not in left_out))]


def flag_arguments(values: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the command line that gives another process the same values of these flags."""
    arguments: list[str] = []
    for name in names:
        value = values[name]
        if isinstance(value, bool):
            arguments += [as_flag(name)] if value else []
        elif isinstance(value, list | tuple):
            arguments += [part for one in value for part in (as_flag(name), str(one))]
        elif value is not None:
            arguments += [as_flag(name), str(value)]
    return arguments
