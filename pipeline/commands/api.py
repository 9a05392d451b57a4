"""`pipeline api`: one HTTP process."""

import click

from pipeline.errors import Refused
from pipeline.options import all_of, common_options, flag, log_settings, redis_option

listen_options = all_of(
    flag("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for every one."),
    flag("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 takes a free one."),
)


@click.command()
@listen_options
@redis_option
@common_options
@click.pass_context
def api(ctx: click.Context, host: str, port: int, redis_url: str | None, log_level: str) -> None:
    """Answers HTTP: live calls, models, health. Holds no state; run as many as you like."""
    from pipeline.logs import configure_logs

    configure_logs("api", log_level)
    log_settings(ctx)
    if redis_url is None:
        raise Refused("`pipeline api` needs the queue of a fleet: set REDIS_URL (or use `pipeline serve`, which brings its own)")
    from api.main import main
    from api.settings import ApiSettings
    from jobs.connection import check_server, connect

    with connect(redis_url) as client:
        check_server(client)
    try:
        main(ApiSettings(redis_url=redis_url, host=host, port=port))
    except OSError as error:
        raise Refused(error.strerror or str(error)) from None
