"""Tables for the reports under docs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows that all have the same columns; numbers as they are."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(docstring: str | None) -> str:
    """A script's docstring without its first line, which says how to run it."""
    return (docstring or "").split("\n", 2)[2].strip()
