"""The settings and results that the explorer and the report show, from the rows of records.quantities."""

from __future__ import annotations

from dataclasses import dataclass

from sp_bench.records import rows
from sp_bench.records.schema import quantities

FIRST = ("mode", "status")
"""Settings that come before the others."""


@dataclass(frozen=True)
class Setting(rows.Setting):
    """A setting with its name."""

    name: str = ""


@dataclass(frozen=True)
class Result(rows.Result):
    """A result with its name."""

    name: str = ""


def head(label: str, unit: str) -> str:
    """The head of a column or an axis: what its numbers are, and their unit."""
    return f"{label} ({unit})" if unit else label


MADE = {
    "method_options": "method's options",
    "cluster_options": "cluster's options",
    "options": "other options",
    "code": "code version",
}
"""Settings that are made from the request and the provenance of a record, and their labels."""


MARKED = [(name, one.shown) for name, one in quantities().items() if one.shown and one.shown.label]
"""The rows with a label, by name."""
SETTINGS = sorted(
    [Setting(**vars(mark), name=name) for name, mark in MARKED if isinstance(mark, rows.Setting)]
    + [Setting(label=label, name=name) for name, label in MADE.items()],
    key=lambda one: one.name not in FIRST,
)
"""Everything that points may differ in."""
RESULTS = sorted(
    (Result(**vars(mark), name=name) for name, mark in MARKED if isinstance(mark, rows.Result)),
    key=lambda one: quantities()[one.name].part == "Setup",
)
"""Every number with a label, in the order of the record: times first, what a plan's setup says last."""
KIND_WORDS = {
    "measured": "measured: wall time of all ranks together",
    "measured alone": "measured alone: wall time of single ranks, without their peers",
    "simulated": "simulated",
    "computed": "computed: counted from plans, or by a formula",
    "paper": "as printed in the paper",
}
"""The kinds of numbers (analysis.number.KINDS) in words, for legends."""
