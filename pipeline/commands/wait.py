"""`pipeline wait`: wait for the results of a batch."""

from pathlib import Path

import click

from pipeline.options import common_options, flag, fleet_redis_option


@click.command()
@click.argument("batch")
@flag("-o", "--output-file", type=click.Path(path_type=Path, dir_okay=False), help="Copy the results there.")
@flag("--fail-on-error", is_flag=True, help="Exit code 1 if a line's answer is an error.")
@fleet_redis_option
@common_options
def wait(batch: str, output_file: Path | None, fail_on_error: bool, redis_url: str, log_level: str) -> None:
    """Wait for a batch that was submitted with `run-batch --detach`, and print where its results
    are.

    It reads the queue at REDIS_URL; over HTTP use `pipeline batches wait`.
    """
    from pipeline.batch_wait import wait_for_batch

    wait_for_batch(batch, output_file, redis_url, fail_on_error)
