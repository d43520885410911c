"""The keys that a query of a pack sees, by the definition. Imported inside ranks: no pytest, no hypothesis."""

from __future__ import annotations

import numpy as np

from sp_bench.plan.documents import Packed


def seen(mask: Packed) -> np.ndarray:
    """Whether each query sees each key: (seqlen, seqlen)."""
    document = np.repeat(np.arange(len(mask.lengths)), mask.lengths)
    query, key = np.arange(len(document))[:, None], np.arange(len(document))
    found = document[:, None] == document
    found &= (key <= query) | (not mask.causal)
    found &= (mask.left is None) | (key >= query - (mask.left or 0))
    return found & ((mask.causal or mask.right is None) | (key <= query + (mask.right or 0)))
