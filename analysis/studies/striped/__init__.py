"""Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023."""

from __future__ import annotations

from sp_bench.analysis.studies.striped.kernels import measured
from sp_bench.analysis.studies.striped.limit import maximum, tiles
from sp_bench.analysis.studies.striped.rounds import work
from sp_bench.analysis.studies.striped.simulated import attention, training, whole_model
