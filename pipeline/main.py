"""`pipeline`: the command that starts every process of the product."""

import sys
from importlib import import_module

import click

from jobs.process import buffer_stdout, die_with_parent
from pipeline.errors import exit_code_of
from pipeline.stderr import drop_unwritten

COMMANDS = {
    "api": "Answer HTTP: live calls, files, batches, models, health.",
    "batches": "Create, show, wait for and cancel batches of a server.",
    "demo": "Answer the requests of the demo with its model.",
    "files": "Upload, list, fetch and delete files of a server.",
    "fleet": "Place workers on a Ray cluster as the queue grows and shrinks.",
    "health": "Exit with 0 if the processes of this host are at work.",
    "jobs": "Validate, feed and finalize batches.",
    "keys": "Make, show and revoke API keys.",
    "models": "Show and forget the models of a fleet.",
    "run-batch": "Answer every line of a file.",
    "serve": "Serve one model over HTTP, with all that belongs to it.",
    "status": "Show the workers, models and batches of a fleet.",
    "tail": "Show the text of a running request or batch.",
    "top": "Show a fleet at work, again every second.",
    "wait": "Wait for a batch that was submitted with `run-batch --detach`.",
    "worker": "Answer the requests of a queue with one model.",
}
"""The description of each command in `pipeline --help`; its module is imported when it runs."""


class CommandGroup(click.Group):
    """Finds its commands in `pipeline.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"pipeline.commands.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(package_name="batch-inference-pipeline", message="%(version)s")
def cli() -> None:
    """Run batch files of language-model requests as fast as the hardware allows, and answer live
    calls meanwhile.
    """


def main(arguments: list[str] | None = None, parent: int | None = None) -> None:
    """Run the command line and exit with its code.

    An error that a user can correct is printed as one sentence, never as a traceback. The kernel
    kills this process when the thread of `parent` that started it ends.
    """
    if parent is not None:
        die_with_parent(parent)
    buffer_stdout()
    try:
        code = cli.main(args=arguments, prog_name="pipeline", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # raises an error if stdout cannot be written
    except BaseException as error:
        code = exit_code_of(error)
    drop_unwritten()
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
