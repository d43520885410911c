"""The rank processes that all tests of a session share. Imported inside the ranks too, so it stays light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sp_bench.measure.pool import RankFailure, RankPool, report

WORLD = 9
"""Ranks of the shared pool: enough for the Mesh paper's 3 x 3 example."""

RUNS = 24
"""After so many runs the groups of attentions are destroyed. Each has a thread in each of its ranks, which wakes a
hundred times a second; those of a whole session would take half of two cores.
"""

SIZES = (1, 2, 3, 4, 6, 8, 9)
"""The group sizes that are run."""


class Ranks:
    """One RankPool of WORLD ranks, started at its first use and again after a test has ended it."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._pool: RankPool | None = None
        self._runs = 0

    def run(self, function: Callable, *args: object) -> list[Any]:
        """function(*args) on every rank. A failure carries the last case that rank 0 reported."""
        if self._pool is None or not self._pool.alive:
            self.close()
            self._pool, self._runs = RankPool(WORLD, timeout_s=self._timeout_s), 0
        self._runs += 1
        reported: list[object] = []
        try:
            if self._runs % RUNS == 0:
                self._pool.run(_destroy_groups)
            return self._pool.run(function, *args, progress=reported.append)
        except RankFailure as failure:
            failure.add_note(f"the last case begun: {reported[-1] if reported else 'none'}")
            raise

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _destroy_groups() -> None:
    from sp_bench.run.groups import release

    release(None)


_groups: dict[int, Any] = {}


def group_of(n: int, case: object) -> Any:
    """Inside a rank: the gloo group of ranks 0 .. n-1, made once, or None on the ranks beyond. All ranks must call it.

    `case` is what the group is for, reported so that a failure can name it.
    """
    import torch.distributed as dist

    if n not in _groups:
        _groups[n] = dist.new_group(list(range(n)))
        _prove_on_rank_0_alone()
    if dist.get_rank() == 0:
        report(str(case))
    return _groups[n] if dist.get_rank() < n else None


def _prove_on_rank_0_alone() -> None:
    """Every rank proves the plans of all ranks, a third of the time of a small case. Once is enough in one machine."""
    import torch.distributed as dist

    from sp_bench.run import attention

    if dist.get_rank() > 0:
        attention.check_all = lambda *_: None
