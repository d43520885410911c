"""The Mesh-Attention paper: tables 2 to 5, figures 8 to 10, what its text states, and methods that it doesn't time."""

from __future__ import annotations

from sp_bench.analysis.studies.mesh.breakdown import figure9a, figure10
from sp_bench.analysis.studies.mesh.memory import table5
from sp_bench.analysis.studies.mesh.rivals import others
from sp_bench.analysis.studies.mesh.scaling import figure8
from sp_bench.analysis.studies.mesh.tables import claims, table2, table3, table4
from sp_bench.analysis.studies.mesh.volume import figure9b
