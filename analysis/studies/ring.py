"""Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, and an explainer of it."""

from __future__ import annotations

from sp_bench.analysis.studies.ring_explainer import explainer
from sp_bench.analysis.studies.ring_hidden import condition, hidden
from sp_bench.analysis.studies.ring_memory import memory

SECTIONS = (memory, condition, hidden, explainer)
