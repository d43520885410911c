"""Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, and an explainer of it."""

from __future__ import annotations

from sp_bench.analysis.studies.ring.arithmetic import explainer
from sp_bench.analysis.studies.ring.held import memory
from sp_bench.analysis.studies.ring.onset import condition, hidden
