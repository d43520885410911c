"""The smallest case that fails, found axis by axis."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sp_bench.conform.case import AXES, Case


def smallest(case: Case, fails: Callable[[Case], bool], limit_s: float) -> Case:
    """The case with the simplest value of each axis with which it still fails, tried for `limit_s`.

    After each step all axes are tried again, since values that didn't fit together may do so now.
    """
    deadline, known = time.monotonic() + limit_s, {case}

    def still_fails(candidate: Case) -> bool:
        new = candidate not in known and candidate.valid and time.monotonic() < deadline
        known.add(candidate)
        return new and fails(candidate)

    while simpler := next(filter(still_fails, _simpler(case)), None):
        case = simpler
    return case


def _simpler(case: Case) -> list[Case]:
    """The case with one value that is simpler, the simplest first."""
    cases = []
    for name, values in AXES.items():
        own: Any = getattr(case, name)
        below = values[: values.index(own)] if own in values else [x for x in values if x < own]  # pyright: ignore
        cases += [case.simpler(**{name: value}) for value in below]
    return cases
