"""Tables as commands print them."""

import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE = 1000  # columns; a reader may cut lines


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table under a title, whose cells are folded rather than cut."""
    table = Table(title=title, title_justify="left", caption=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def new_listing(*columns: str) -> Table:
    """Return an empty table without lines, whose first column holds ids, which stay whole."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def print_table(table: Table) -> None:
    """Print on stdout, as wide as the terminal."""
    new_console().print(table)


def new_console(color_system: Literal["auto"] | None = "auto") -> Console:
    """Return stdout, as wide as the terminal; None for `color_system` gives plain text."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(width=width, color_system=color_system, markup=False, highlight=False)
