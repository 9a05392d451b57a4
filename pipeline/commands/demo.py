"""`pipeline demo`: the demo's requests, answered by the demo model."""

import json
from pathlib import Path

import click

from pipeline.options import flag, require_extra

REQUESTS = Path(__file__).parents[1] / "demo_requests.jsonl"
_STRUCTURED = 2
"""Number of last requests; their answers follow a schema or call a tool."""


@click.command()
@flag(
    "-o",
    "--output-file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo.results.jsonl"),
    help="The file of results.",
)
@click.pass_context
def demo(ctx: click.Context, output_file: Path) -> None:
    """Answer the requests of the demo with its model, on this machine, as run-batch does.

    The requests can be checked: the model counts, sorts and repeats. The last two have a schema
    and a tool.
    """
    require_extra("worker", ctx)
    from pipeline.commands.run_batch import run_batch
    from pipeline.summary import shown

    arguments = [str(REQUESTS), "-o", str(output_file), "--redis-url", ""]
    run_batch.main(arguments, prog_name="pipeline run-batch", standalone_mode=False)
    click.echo("Answers with structure, of the last two lines:")
    for line in output_file.read_text().splitlines()[-_STRUCTURED:]:
        click.echo(shown(json.loads(line)))
