"""Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023."""

from __future__ import annotations

from sp_bench.analysis.studies.striped_maximum import maximum, tiles
from sp_bench.analysis.studies.striped_measured import measured
from sp_bench.analysis.studies.striped_simulated import attention, whole_model
from sp_bench.analysis.studies.striped_training import training
from sp_bench.analysis.studies.striped_work import work

SECTIONS = (lambda _: work(), lambda _: maximum(), lambda _: tiles(), attention, whole_model, training, measured)
