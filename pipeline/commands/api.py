"""`pipeline api`: one HTTP process."""

import logging
from typing import TYPE_CHECKING, Any

import click

from pipeline.errors import Refused
from pipeline.options import (
    Size,
    all_of,
    common_options,
    flag,
    flag_arguments,
    fleet_redis_option,
    log_settings,
    store_option,
)

if TYPE_CHECKING:
    from api.settings import ApiSettings


def _check_windows(_ctx: click.Context, _param: click.Parameter, windows: tuple[str, ...]) -> tuple[str, ...]:
    from jobs.protocol.windows import window_seconds

    for window in windows:
        try:
            window_seconds(window)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return windows


api_options = all_of(
    flag(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; 0.0.0.0 for every one, which needs API keys (`pipeline keys create`).",
    ),
    flag("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 takes a free one."),
    flag("--insecure", is_flag=True, help="While no API key exists, answer every client that reaches the address."),
    flag(
        "--completion-window",
        env="PIPELINE_COMPLETION_WINDOWS",
        multiple=True,
        default=("24h",),
        callback=_check_windows,
        help="How long a batch may take, as 24h, 30m or 10s; may be repeated, and a batch names one of them.",
    ),
    flag("--max-batch-lines", type=Size(), default=50_000, help="Most requests in a batch."),
    flag("--max-file-bytes", type=Size(), default=200 * 2**20, help="Largest input file of a batch."),
)

log = logging.getLogger("api")

_API_FLAGS = ("host", "port", "insecure", "completion_window", "max_batch_lines", "max_file_bytes")


@click.command()
@api_options
@store_option
@fleet_redis_option
@common_options
@click.pass_context
def api(ctx: click.Context, /, redis_url: str | None, file_store: str, log_level: str, **flags: Any) -> None:
    """Answer HTTP: live calls, files, batches, models, health.

    It holds no state; run any number of them.
    """
    from jobs.process import configure_logs

    configure_logs("api", log_level)
    log_settings(ctx)
    if redis_url is None:
        raise Refused(
            "`pipeline api` needs the queue of a fleet: set REDIS_URL (or use `pipeline serve`, which brings its own)"
        )
    check_open(flags["host"], flags["insecure"], file_store)
    from api.main import main
    from jobs.queue.connection import check_server, connect

    settings = _settings(
        redis_url=redis_url, file_store=file_store, completion_windows=flags.pop("completion_window"), **flags
    )
    with connect(redis_url) as client:
        check_server(client)
    try:
        main(settings)
    except OSError as error:
        raise Refused(error.strerror or str(error)) from None


def _settings(**given: Any) -> "ApiSettings":
    """Return the settings, with those that only the environment holds. Raises `Refused`."""
    from pydantic import ValidationError

    from api.settings import ApiSettings

    try:
        return ApiSettings(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        variable = f"{ApiSettings.model_config['env_prefix']}{fault['loc'][0]}".upper()
        raise Refused(f"{variable} cannot be {fault['input']!r}: {fault['msg']}; correct it, or remove it") from None


def check_open(host: str, insecure: bool, file_store: str) -> None:
    """Refuse to serve without keys on an address that other machines reach, without --insecure.

    Raises `StoreError` for unreadable keys.
    """
    from api.auth import is_loopback
    from jobs.store.api_keys import KeyRing

    ring = KeyRing(file_store)
    if ring.required() or insecure:
        return
    if not is_loopback(host):
        raise Refused(
            f"others reach {host}, and there is no API key in {file_store}: make one (`pipeline keys create`), listen"
            " on 127.0.0.1, or add --insecure to answer every client"
        )
    if ring.known():
        log.warning(
            "every API key is revoked, so every call is refused: make one (`pipeline keys create`), or add --insecure"
        )


def api_arguments(values: dict[str, Any]) -> list[str]:
    """Return the command line that gives another process the same flags of `api_options`."""
    return flag_arguments(values, _API_FLAGS)
