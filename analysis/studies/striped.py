"""Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.runs import Runs
from analysis.section import Section
from analysis.studies.striped_maximum import maximum, tiles
from analysis.studies.striped_measured import measured
from analysis.studies.striped_simulated import attention, whole_model
from analysis.studies.striped_work import work


def sections(runs: Runs) -> Iterator[Section]:
    """The work that the layout balances, the speedup that follows at most, and what is simulated and measured."""
    yield work()
    yield maximum()
    yield tiles()
    yield attention(runs)
    yield whole_model(runs)
    yield measured(runs)
