"""Processes that simulate several methods at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from sp_bench.errors import RequestError
from sp_bench.machine import cores_here
from sp_bench.point.at_once import as_worker

Map = Callable[..., Iterable[Any]]
"""Calls a function for each of some values, or with one of several kinds each, as the built-in map does."""
MOST = 8
"""A plan of 256 GPUs may take more than a GB."""


@contextmanager
def workers() -> Iterator[Map]:
    """A map whose calls are spread over a process for each core, at most MOST; on one core, map itself.

    They are forked, and have all that this one has imported. Elsewhere than on Linux they import the caller's main
    module, so that a script needs `if __name__ == "__main__":`. Raises RequestError where one of them is killed.
    """
    count = min(cores_here(), MOST)
    if count == 1:
        yield map
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(count, context, initializer=as_worker) as pool:
        try:
            pool.submit(os.getpid).result()  # all are forked now, while no other thread draws a bar
            yield pool.map
        except BrokenProcessPool:
            rule = "a process that simulated a method was killed, perhaps for want of memory"
            raise RequestError("advise", rule, "fewer cores, by taskset, or fewer gpus would work") from None
