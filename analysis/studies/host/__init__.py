"""The host of a GPU: the time to queue a plan, beside ring-flash-attention's loop with the same stubs.

before=CHECKOUT    another checkout of this repository, whose times stand beside this one's
ranks=8,64,256     the numbers of ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module

from sp_bench.analysis import earlier
from sp_bench.analysis.runs import Runs
from sp_bench.plan.method import PHASES

OPTIONS = {"before": "", "ranks": "8,64,256"}
KNOWN = ("method", "ranks")


@cache
def _measured(before: str, ranks: str) -> list[dict[str, str]]:
    """The rows of the benchmark, which only a checkout has."""
    host_path = import_module("benchmarks.host_path")
    numbers = [int(n) for n in ranks.split(",")]
    return host_path.compared(before, ranks=numbers) if before else host_path.rows(ranks=numbers)


def _columns(runs: Runs, first: Sequence[str], parts: Sequence[str]) -> list[dict[str, str]]:
    """The columns of some parts of the rows, behind those that come first."""
    rows = _measured(runs.options["before"], runs.options["ranks"])
    own = [key for key in rows[0] if key.partition(",")[0] in parts]
    return [{key: row[key] for key in (*first, *own)} for row in rows]


def blocks(runs: Runs) -> list[dict[str, str]]:
    """Microseconds of a block with its folds and transfers: a row for each method and number of ranks."""
    return _columns(runs, KNOWN, PHASES)


def parts(runs: Runs) -> list[dict[str, str]]:
    """Microseconds of a block with its folds, and of a transfer, each alone."""
    return _columns(runs, (*KNOWN, "blocks", "transfers", "events a block"), ("blocks alone", "transfer"))


def code(runs: Runs) -> str:
    """Words that name the code of before, if there is any."""
    return earlier.in_words(runs.options["before"])
