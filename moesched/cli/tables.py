"""Prints tables. On a narrow terminal, spare columns are left out, or each cell gets a line of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import NamedTuple

from moesched.cli.output import columns_of_terminal, print_lines, say, stdout
from moesched.system.plain_text import plain_text
from moesched.system.standard_output import command_output

WIDE = 250
"""Width in characters if standard output is no terminal."""
NAME_WIDTH = 24
"""A column of at most this many characters is never wrapped; a wider one counts as prose unless it holds figures."""
PROSE_WIDTH = 18
"""The least width to which a column of prose is wrapped."""
GAP = 2


class _Column(NamedTuple):
    title: str
    cells: list[str]
    is_figure: bool

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    @property
    def is_prose(self) -> bool:
        return not self.is_figure and self.width > NAME_WIDTH

    @property
    def least(self) -> int:
        """The least width, in characters, that breaks no word; only cells of prose (long texts) are wrapped."""
        if not self.is_prose:
            return max(_longest_word(self.title), *map(len, self.cells))
        return max(PROSE_WIDTH, *map(_longest_word, (self.title, *self.cells)))


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, figures: int = 0, spare: Sequence[str] = ()
) -> None:
    """Print a table on standard output.

    Args:
        columns: titles of the columns.
        rows: cells of each row.
        figures: number of the last columns whose cells are numbers; these columns are aligned to the right.
        spare: titles of columns that are left out on a narrow terminal, beginning with the first of these.
    """
    width = columns_of_terminal() or WIDE
    table = [
        _Column(plain_text(title), [plain_text(row[place]) for row in rows], place >= len(columns) - figures)
        for place, title in enumerate(columns)
    ]
    left_out: list[str] = []
    for title in spare:
        if _fits(table, width):
            break
        table = [column for column in table if column.title != title]
        left_out.append(title)
    if _fits(table, width):
        _print_columns(table, width)
    else:
        print_lines(_stacked(table, width))
    if left_out:
        say(f"left out at this width: {', '.join(left_out)}")


def _fits(table: Sequence[_Column], width: int) -> bool:
    return sum(column.least + GAP for column in table) - GAP <= width


def _widths(table: Sequence[_Column], width: int) -> list[int]:
    """Return each column's width in characters, with prose and titles wrapped until the table fits into `width`."""
    widths = [column.width for column in table]
    excess = sum(widths) + GAP * (len(table) - 1) - width
    for place in sorted(range(len(table)), key=lambda place: table[place].least - table[place].width):
        given_up = min(max(0, excess), table[place].width - table[place].least)
        widths[place] -= given_up
        excess -= given_up
    return widths


def _print_columns(table: Sequence[_Column], width: int) -> None:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column, columns in zip(table, _widths(table, width), strict=True):
        drawn.add_column(
            Text(column.title),
            justify="right" if column.is_figure else "left",
            width=columns,
        )
    for row in zip(*(column.cells for column in table), strict=True):
        drawn.add_row(*map(Text, row))
    console = stdout()
    console.width = width
    with console.capture() as captured:
        console.print(drawn)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")), file=command_output())


def _stacked(table: Sequence[_Column], width: int) -> Iterator[str]:
    """Yield the lines of a table that is too wide for columns: for each row a line with its name, and one per cell.

    A row's name is its cells in the first column and in columns without a title. Each other cell has the title of its
    column before it, unless the cell is empty: then its line is left out. Lines are wrapped at `width` characters.
    """
    first, *rest = table
    others = [column for column in rest if column.title]
    space = max((len(column.title) for column in others), default=0)
    indent = " " * (space + 2 * GAP)
    wrapped = TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    names = [first, *(column for column in rest if not column.title)]
    for place in range(len(first.cells)):
        yield from wrapped.wrap(" ".join(column.cells[place] for column in names))
        for column in others:
            if column.cells[place]:
                yield from wrapped.wrap(f"  {column.title:{space}}  {column.cells[place]}")
