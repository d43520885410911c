"""The settings and results that the explorer and the report show, from the rows of records.quantities."""

from __future__ import annotations

from sp_bench.records.rows import Result, Setting
from sp_bench.records.schema import quantities

FIRST = ("mode", "status")
"""Settings that come before the others."""


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


_MARKED = {name: one.shown for name, one in quantities().items() if one.shown and one.shown.label}
SETTINGS = {name: mark for name, mark in _MARKED.items() if isinstance(mark, Setting)}
SETTINGS |= {name: Setting(label=label) for name, label in MADE.items()}
SETTINGS = {name: SETTINGS[name] for name in sorted(SETTINGS, key=lambda name: name not in FIRST)}
"""Everything that points may differ in, by name."""
RESULTS = {name: mark for name, mark in _MARKED.items() if isinstance(mark, Result)}
RESULTS = {name: RESULTS[name] for name in sorted(RESULTS, key=lambda name: quantities()[name].part == "Setup")}
"""Every number with a label, by name, in the order of the record: times first, what a plan's setup says last."""
KIND_WORDS = {
    "measured": "measured: wall time of all ranks together",
    "measured alone": "measured alone: wall time of single ranks, without their peers",
    "simulated": "simulated",
    "computed": "computed: counted from plans, or by a formula",
    "paper": "as printed in the paper",
}
"""The kinds of numbers (analysis.number.KINDS) in words, for legends."""
