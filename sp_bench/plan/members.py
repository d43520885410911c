"""The ranks that messages of all ranks go to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from sp_bench.plan.groups import Exchange, Grid, Group


@lru_cache(maxsize=1024)  # 32 MB of 4096 ranks
def members(group: Group | Exchange | Grid, shift: int, n: int) -> np.ndarray:
    """The rank that is `shift` positions ahead of each of n ranks: (n,), read-only. The last ones are kept: thousands
    of messages of a method's variants go to the same ranks.
    """
    ahead = group.member(np.arange(n), shift)
    ahead.flags.writeable = False
    return ahead


def ahead(group: Group | Exchange | Grid, shift: int, rank, n: int | None) -> Any:
    """The rank that is `shift` positions ahead of one or an array of ranks; of an array out of n, it is looked up."""
    if n is None or not isinstance(rank, np.ndarray):
        return group.member(rank, shift)
    return members(group, shift, n)[rank]
