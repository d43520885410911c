"""How a quantity of a record is shown. The marks stand in the rows of records.quantities."""

from __future__ import annotations

from dataclasses import dataclass

CONFIG, SUMMARY = "config", "summary"
"""The places of a value in a W&B run: what was asked, and what came out."""


@dataclass(frozen=True)
class Setting:
    """A quantity that was asked for or follows from it. Points are filtered and grouped by it."""

    label: str = ""
    """Its name in words; empty if it has no column of its own."""
    words: str = ""
    """How numbers are written: tokens (256k), or as they are."""
    wandb: str = CONFIG


@dataclass(frozen=True)
class Result:
    """A quantity that came out."""

    label: str = ""
    """Its name in words; empty if it has no column of its own."""
    unit: str = ""
    factor: float = 1.0
    """A record's value times this is in `unit`."""
    better: str = ""
    """less or more; empty where neither is better by itself."""
    noisy: bool = False
    """Whether it has noise where it is measured: a time, or made of one."""
    interval: str = ""
    """How its interval follows from the step's: direct or inverse (by proportion), of simulated (as direct, and a
    measured one has none); empty: none."""
    row: str = ""
    """Its row in a point's table, where it is shown with its share of the step; empty if it has none of this kind."""
    if_any: bool = False
    """Whether that row is left out where it is 0."""
    wandb: str = SUMMARY
