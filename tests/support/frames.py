"""Rows of pandas tables."""

from __future__ import annotations

import pandas as pd

from tests.support.typed import of_kind


def rows_of(table: pd.DataFrame, **columns: str) -> pd.DataFrame:
    """The rows that have these values in these columns."""
    rows = table
    for column, value in columns.items():
        rows = of_kind(pd.DataFrame, rows[rows[column] == value])
    return rows
