"""`pipeline`: the command that starts every process of the product."""

import sys

import click

from pipeline.commands.api import api
from pipeline.commands.batches import batches
from pipeline.commands.files import files
from pipeline.commands.health import health
from pipeline.commands.jobs import jobs
from pipeline.commands.keys import keys
from pipeline.commands.run_batch import run_batch
from pipeline.commands.serve import serve
from pipeline.commands.status import status
from pipeline.commands.tail import tail
from pipeline.commands.wait import wait
from pipeline.commands.worker import worker
from pipeline.errors import exit_code_of


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(package_name="batch-inference-pipeline", message="%(version)s")
def cli() -> None:
    """Run batch files of language-model requests as fast as the hardware allows, and answer live
    calls meanwhile.
    """


for command in (run_batch, serve, worker, api, jobs, keys, files, batches, status, tail, wait, health):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code.

    An error that a user can correct is one sentence, never a traceback.
    """
    try:
        code = cli.main(args=arguments, prog_name="pipeline", standalone_mode=False)
    except BaseException as error:
        code = exit_code_of(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
