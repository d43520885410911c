"""The tables of papers that analysis/papers holds."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from sp_bench.analysis.number import Number, of_paper

PAPERS = Path(__file__).parent / "papers"


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """The rows of analysis/papers/<name>.csv, by column."""
    with (PAPERS / f"{name}.csv").open(newline="") as lines:
        return tuple(csv.DictReader(lines))


def claims(name: str, key: str = "claim") -> dict[str, Number]:
    """The values that a paper's text states, by column `key` of a file with columns value, unit and where."""
    path = PAPERS / f"{name}.csv"
    return {row[key]: of_paper(float(row["value"]), path, row["where"]) for row in rows(name)}
