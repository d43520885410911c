"""The tables that papers print, as the studies' folders hold them: analysis/studies/*/TABLE.csv."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

from sp_bench.analysis.number import Number, Source

STUDIES = Path(__file__).parent / "studies"


@cache
def path_of(table: str) -> Path:
    """The file of a table. Raises LookupError if no study has it."""
    files = list(STUDIES.glob(f"*/{table}.csv"))
    if len(files) != 1:
        raise LookupError(f"{table}: {len(files)} studies have such a table")
    return files[0]


@cache
def rows(table: str) -> tuple[dict[str, str], ...]:
    """The rows of a table, by column."""
    with path_of(table).open(newline="") as lines:
        return tuple(csv.DictReader(lines))


def claims(table: str, key: str = "claim") -> dict[str, Number]:
    """The values that a paper's text states, by column `key` of a table with columns value, unit and where."""
    return {row[key]: of_paper(float(row["value"]), table, row["where"]) for row in rows(table)}


def of_paper(value: float | None, table: str, where: str = "") -> Number:
    """A number that a paper prints: in which table, and its place in it or in the paper."""
    id, path = "-".join([table, *re.findall(r"[\w.]+", where)]), path_of(table)
    text = f"analysis/studies/{path.parent.name}/{path.name} {where}".strip()
    return Number(value, "paper", (Source(id, "paper", text),))
