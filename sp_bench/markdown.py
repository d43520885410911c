"""Tables for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows that all have the same columns; values as they are."""
    return table(list(rows[0]), [list(row.values()) for row in rows])
