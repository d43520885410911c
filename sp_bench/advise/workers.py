"""Processes that simulate several methods at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from sp_bench.errors import RequestError
from sp_bench.machine import cores_here
from sp_bench.termination import end_with_parent

Map = Callable[..., Iterable[Any]]
"""Calls a function for each of some values, or with one of several kinds each, as the built-in map does."""
MOST = 8
"""A plan of 256 GPUs may take more than a GB."""


@contextmanager
def workers() -> Iterator[Map]:
    """A map whose calls are spread over a process for each core, at most MOST; on one core, map itself.

    Processes import the caller's main module, so that a script needs `if __name__ == "__main__":`. Raises RequestError
    where one of them is killed.
    """
    count = min(cores_here(), MOST)
    if count == 1:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        try:
            yield pool.map
        except BrokenProcessPool:
            rule = "a process that simulated a method was killed, perhaps for want of memory"
            raise RequestError("advise", rule, "fewer cores, by taskset, or fewer gpus would work") from None
