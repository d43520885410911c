"""Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023."""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies.striped_maximum import maximum, tiles
from sp_bench.analysis.studies.striped_measured import measured
from sp_bench.analysis.studies.striped_simulated import attention, whole_model
from sp_bench.analysis.studies.striped_work import work


def sections(runs: Runs) -> Iterator[Section]:
    """The work that the layout balances, the speedup that follows at most, and what is simulated and measured."""
    yield work()
    yield maximum()
    yield tiles()
    yield attention(runs)
    yield whole_model(runs)
    yield measured(runs)
