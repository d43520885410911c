"""Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, and an explainer of it."""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies.ring_explainer import explainer
from sp_bench.analysis.studies.ring_hidden import condition, hidden
from sp_bench.analysis.studies.ring_memory import memory


def sections(runs: Runs) -> Iterator[Section]:
    """Memory by rank, when communication is hidden, and an explainer's numbers."""
    yield memory(runs)
    yield condition(runs)
    yield hidden(runs)
    yield explainer(runs)
