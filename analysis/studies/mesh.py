"""The Mesh-Attention paper: tables 2 to 5, figures 8 to 10, what its text states, and methods that it doesn't time."""

from __future__ import annotations

from sp_bench.analysis.studies.mesh_breakdown import figure9a
from sp_bench.analysis.studies.mesh_claims import claims
from sp_bench.analysis.studies.mesh_gqa import figure10
from sp_bench.analysis.studies.mesh_memory import table5
from sp_bench.analysis.studies.mesh_others import others
from sp_bench.analysis.studies.mesh_scaling import figure8
from sp_bench.analysis.studies.mesh_tables import table2, table3, table4
from sp_bench.analysis.studies.mesh_volume import figure9b

SECTIONS = (claims, lambda _: table2(), table3, table4, figure8, figure9a, table5, figure9b, figure10, others)
