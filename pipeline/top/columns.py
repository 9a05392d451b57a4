"""Tables that fit a window: a row is one line, numbers stay whole, and text is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Cell = Text | ProgressBar
_MORE = "…"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, and how it may be narrowed in a small window."""

    title: str
    justify: Literal["left", "right"] = "right"
    width: int = 0  # width of content without its own, such as a bar
    least: int | None = None  # least width after cutting; None: it is not cut
    keep_end: bool = False  # cut at the beginning, for ids whose ends differ
    optional: bool = False  # left out if not all columns fit


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> Table:
    """Return a table of at most `width`, unless its uncut columns need more."""
    natural = [_width(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    places, gap = _places(columns, natural, width)
    shown = _cut(columns, natural, places, width - gap * (len(places) - 1))
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for place in places:
        column = columns[place]
        table.add_column(
            Text(column.title), justify=column.justify, width=shown[place], no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*(_cell(row[place], columns[place], shown[place]) for place in places))
    return table


def _width(column: Column, cells: Sequence[Cell]) -> int:
    return max(column.width, cell_len(column.title), *(cell.cell_len for cell in cells if isinstance(cell, Text)))


def _places(columns: Sequence[Column], natural: Sequence[int], width: int) -> tuple[list[int], int]:
    """Return the indexes of the columns that fit, and the width of the gap between them."""
    places = list(range(len(columns)))
    for gap in (2, 1):
        if sum(natural) + gap * (len(places) - 1) <= width:
            return places, gap
    return [place for place in places if not columns[place].optional], 1


def _cut(columns: Sequence[Column], natural: Sequence[int], places: Sequence[int], width: int) -> list[int]:
    """Return the widths; the widest column that may be cut is narrowed until all fit."""
    widths = list(natural)
    while sum(widths[place] for place in places) > width:
        longer = [place for place in places if widths[place] > (columns[place].least or widths[place])]
        if not longer:
            break
        widths[max(longer, key=lambda place: widths[place])] -= 1
    return widths


def _cell(cell: Cell, column: Column, width: int) -> Cell:
    if not (column.keep_end and isinstance(cell, Text) and cell.cell_len > width):
        return cell
    end = cell.plain
    while cell_len(end) > width - 1:
        end = end[1:]
    return Text(_MORE + end, cell.style)
