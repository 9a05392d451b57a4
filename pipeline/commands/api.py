"""`pipeline api`: one HTTP process."""

import gc
import logging
from typing import Any

import click

from api.http_settings import HttpSettings
from api.settings import ApiSettings
from pipeline.errors import Refused
from pipeline.options import (
    common_options,
    flags_of,
    fleet_redis_option,
    log_settings,
    on_demand_option,
    served_store_option,
    tracing_option,
    values_of,
)

log = logging.getLogger("api")


@click.command()
@flags_of(HttpSettings)
@flags_of(ApiSettings)
@served_store_option
@on_demand_option
@tracing_option
@fleet_redis_option
@common_options
@click.pass_context
def api(ctx: click.Context, /, redis_url: str, file_store: str, log_level: str, **_: Any) -> None:
    """Answer HTTP: live calls, files, batches, models, health.

    It holds no state; run any number of them.
    """
    log_settings(ctx)
    settings = ApiSettings.from_environment(**values_of(ApiSettings, ctx.params))
    check_open(settings)
    gc.disable()  # until `main` enables it: collections take a sixth of the import time
    from api.main import main
    from jobs.queue.base import QueueBase
    from jobs.queue.connection import check_server, connect
    from jobs.store.owner import open_own_store
    from jobs.store.storage import path_of

    with connect(redis_url) as client:
        check_server(client)
        open_own_store(QueueBase(client, settings), path_of(file_store))
    try:
        main(settings)
    except OSError as error:
        raise Refused(error.strerror or str(error)) from None


def check_open(settings: ApiSettings) -> None:
    """Raise `Refused` without API keys if other machines reach the address, unless --insecure.

    Raises `StoreError` for unreadable keys.
    """
    from jobs.store.api_keys import KeyRing

    found = KeyRing(settings.file_store).look()
    if found.are_required or settings.insecure:
        return
    if not settings.is_local:
        raise Refused(
            f"others reach {settings.host}, and there is no API key in {settings.file_store}: make one (`pipeline keys"
            " create`), listen on 127.0.0.1, or add --insecure to answer every client"
        )
    if found.exist:
        log.warning(
            "every API key is revoked, so every call is refused: make one (`pipeline keys create`), or add --insecure"
        )
