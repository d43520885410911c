"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table of a head and rows of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows with the same columns, given as mappings. Values are not formatted."""
    return table(list(rows[0]), [list(row.values()) for row in rows])
