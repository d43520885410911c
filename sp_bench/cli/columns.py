"""Tables as wide as a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

ONE, SEVERAL = 80, 100
"""The most characters of a line of a point that is printed by itself, and of several side by side or in rows."""
LEFT = ("method", "variant", "shape", "layout", "workload", "cluster", "mode", "status")
"""Columns that are aligned to the left."""
Columns = Mapping[str, Sequence[str]]
"""The cells of each column, by its name."""


def make_console(*, beside_data: bool = False) -> Console:
    """A console without markup, at most as wide as several points. `beside_data`: it prints to stderr.

    If the output is not a terminal, it is as wide as $COLUMNS says.
    """
    output = sys.stderr if beside_data else sys.stdout
    known = output.isatty() or "COLUMNS" in os.environ
    console = Console(file=output, width=None if known else SEVERAL, markup=False, highlight=False)
    console.width = min(console.width, SEVERAL)
    return console


def print_columns(console: Console, columns: Columns, less: Sequence[str] = (), *, bold: Container[int] = ()) -> None:
    """Print columns as one table, its rows `bold` so; `less` are left out, from the last, if it is too wide.

    Those left out are named below. If the others don't fit either, they stand in several tables.
    """
    kept = {name: cells for name, cells in columns.items() if name not in less}
    for name in less:
        if name in columns and width_of(kept | {name: columns[name]}) <= console.width:
            kept[name] = columns[name]
    for fitting in _that_fit({name: cells for name, cells in columns.items() if name in kept}, console.width):
        console.print(table_of(fitting, bold=bold), crop=False)
    if left_out := [name for name in columns if name not in kept]:
        console.print(f"--all prints these too: {', '.join(left_out)}")


def _that_fit(columns: Columns, width: int) -> Iterator[Columns]:
    """All columns or, if they are wider than `width` characters, groups of columns beside the rows' numbers."""
    if width_of(columns) <= width:
        yield columns
        return
    rest = dict(columns)
    rows = {"#": [str(i + 1) for i in range(len(columns["method"]))], "method": rest.pop("method")}
    while rest:
        fitting = dict(rows)
        for name in list(rest):
            if len(fitting) > len(rows) and width_of({**fitting, name: rest[name]}) > width:
                break
            fitting[name] = rest.pop(name)
        yield fitting


def table_of(columns: Columns, left: Container[str] = LEFT, *, bold: Container[int] = ()) -> Table:
    """A table as wide as its columns, so that no cell is wrapped or cut; `left` are aligned to the left."""
    table = Table(width=width_of(columns))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for i, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, style="bold" if i in bold else None)
    return table


def width_of(columns: Columns) -> int:
    """The width of a table in characters, with borders."""
    return 1 + sum(3 + max(map(cell_len, (name, *cells))) for name, cells in columns.items())
