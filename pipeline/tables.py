"""Tables that commands print."""

import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE = 1000  # columns; a reader may cut lines


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table with a title; long cells are wrapped, not cut."""
    table = Table(title=title, title_justify="left", caption=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def new_listing(*columns: str) -> Table:
    """Return an empty table without borders; the ids in its first column are never wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as the terminal."""
    new_console().print(table)


def new_console(color_system: Literal["auto"] | None = "auto") -> Console:
    """Return a console on stdout, as wide as the terminal; no `color_system`: plain text."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(width=width, color_system=color_system, markup=False, highlight=False)
