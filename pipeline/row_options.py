"""The flags of `run-batch` for requests made from the rows of a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.errors import Refused
from pipeline.options import all_of, flag, given_as_flag

if TYPE_CHECKING:
    from jobs.batch.row_requests import RowOptions

_ALONE = ("id_column", "keep_columns", "endpoint", "body")
"""Flags that need a prompt flag; other commands share the variable of one of them."""


def _check_template(_ctx: click.Context, _param: click.Parameter, template: str | None) -> str | None:
    from jobs.batch.prompt_template import parse_template

    try:
        if template is not None:
            parse_template(template)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    return template


def _check_endpoint(_ctx: click.Context, _param: click.Parameter, url: str | None) -> str | None:
    from jobs.batch.row_requests import ROW_ENDPOINTS

    if url is not None and url not in ROW_ENDPOINTS:
        raise click.BadParameter(f"{url!r} is none of {', '.join(ROW_ENDPOINTS)}.")
    return url


def _read_body(_ctx: click.Context, _param: click.Parameter, text: str | None) -> dict[str, Any] | None:
    import msgspec

    if text is None:
        return None
    path = text[1:] if text.startswith("@") else None
    try:
        raw = text.encode() if path is None else Path(path).read_bytes()
        return msgspec.json.decode(raw, type=dict[str, Any])
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        holder = "it" if path is None else path
        raise click.BadParameter(f"{holder} is not a JSON object such as '{{\"max_tokens\": 64}}': {error}.") from None


def read_names(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Read the value of a flag that names columns."""
    names = [name.strip() for name in (text or "").split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


row_flags = all_of(
    flag("--prompt-column", help="Of a Parquet or CSV file: the column that holds the prompts."),
    flag(
        "--template",
        callback=_check_template,
        help="Of a Parquet or CSV file: the prompt with columns in braces, such as 'Summarize: {text}'.",
    ),
    flag(
        "--id-column",
        help="The column that holds the ids of requests. [default: custom_id if there is one, else row-1, row-2, …]",
    ),
    flag("--keep-columns", callback=read_names, help="Columns that the results get too, separated by commas."),
    flag(
        "--endpoint",
        callback=_check_endpoint,
        help="What the prompts are for. [default: /v1/chat/completions]",
    ),
    flag(
        "--body",
        callback=_read_body,
        help="JSON object of parameters of every request, such as '{\"max_tokens\": 64}', or @FILE with one.",
    ),
)


def row_options(ctx: click.Context) -> "RowOptions | None":
    """Return the options, or None if requests are not made from rows. Raise `Refused`."""
    from jobs.batch.row_requests import RowOptions

    asked = {name: ctx.params[name] for name in ("prompt_column", "template", *_ALONE)}
    given = {name: value for name, value in asked.items() if value not in (None, ())}
    if "template" in given and "prompt_column" in given:
        raise Refused("--template and --prompt-column both say what the prompt is: give one of them")
    if "template" not in given and "prompt_column" not in given:
        if alone := given_as_flag(ctx, _ALONE):
            raise Refused(f"{alone[0]} is for rows of a table: add --prompt-column or --template")
        return None
    options = RowOptions(**given)
    _check_text(options)
    _check_body(options)
    _check_kept(options)
    return options


def check_rows(source: Path, rows: "RowOptions") -> None:
    """Raise `Refused` or `InputError` if the options do not fit the file."""
    from jobs.batch.input_files import first_line, is_table
    from jobs.protocol.validation import LineError, check_line

    if not is_table(str(source)):
        raise Refused(
            f"{source} is neither Parquet nor CSV: --prompt-column and --template make requests of such files' rows"
        )
    line = first_line(str(source), rows)
    found = check_line(line, 1, default_model="any") if line is not None else None
    if isinstance(found, LineError):
        raise Refused(f"no request can be made of the rows of {source}: {found.message}")


def _check_text(options: "RowOptions") -> None:
    import msgspec

    try:
        msgspec.json.encode(options)
    except UnicodeEncodeError:
        raise Refused("the flags for rows of a table hold bytes that are not UTF-8 text") from None


def _check_body(options: "RowOptions") -> None:
    from jobs.protocol.endpoints import BATCH_ENDPOINTS
    from jobs.protocol.results import ApiError
    from jobs.protocol.unknown_members import check_members

    endpoint = BATCH_ENDPOINTS[options.endpoint]
    if endpoint.prompt_field in options.body:
        raise Refused(f"--body has {endpoint.prompt_field}, but the rows supply it: leave it out")
    try:
        check_members(options.body, endpoint)
    except ApiError as error:
        raise Refused(f"--body cannot be used: {error.message}") from None


def _check_kept(options: "RowOptions") -> None:
    from jobs.control.result_rows import repeated_name

    if (twice := repeated_name(options.keep_columns)) is not None:
        raise Refused(f"two of --keep-columns would be the column {twice} of the results: leave one out")
