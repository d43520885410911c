"""Tables and paragraphs in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table of a head and rows of cells, in which bars and new lines are replaced."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows with the same columns, given as mappings. Values are not formatted."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def filled(text: str) -> str:
    """The text with paragraphs of at most 120 columns; headings, tables with their titles, and pictures as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(each if each.startswith(("|", "#", "**", "!")) else _filled(each) for each in paragraphs)


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
