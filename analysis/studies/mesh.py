"""The Mesh-Attention paper: tables 2 to 5, figures 8 to 10, what its text states, and methods that it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies.mesh_breakdown import figure9a
from sp_bench.analysis.studies.mesh_claims import claims
from sp_bench.analysis.studies.mesh_gqa import figure10
from sp_bench.analysis.studies.mesh_memory import table5
from sp_bench.analysis.studies.mesh_others import others
from sp_bench.analysis.studies.mesh_scaling import figure8
from sp_bench.analysis.studies.mesh_tables import table2, table3, table4
from sp_bench.analysis.studies.mesh_volume import figure9b

__all__ = [
    "claims",
    "figure8",
    "figure9a",
    "figure9b",
    "figure10",
    "others",
    "sections",
    "table2",
    "table3",
    "table4",
    "table5",
]


def sections(runs: Runs) -> Iterator[Section]:
    """What the text states first, then in the paper's order."""
    yield claims(runs)
    yield table2()
    yield table3(runs)
    yield table4(runs)
    yield figure8(runs)
    yield figure9a(runs)
    yield table5(runs)
    yield figure9b(runs)
    yield figure10(runs)
    yield others(runs)
