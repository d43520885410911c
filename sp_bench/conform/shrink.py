"""The smallest case that fails, found by hypothesis and then axis by axis."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from sp_bench.conform.case import AXES, Case

EXAMPLES = 150
"""How many cases hypothesis draws before it shrinks."""


def smallest(case: Case, fails: Callable[[Case], bool], limit_s: float) -> Case:
    """The smallest failing case among those that are no larger than `case` in any respect, tried for `limit_s`.

    Every axis is drawn from its values up to that of the case, half of the time that value itself.
    """
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import HypothesisWarning, NoSuchExample

    deadline = time.monotonic() + limit_s
    known: dict[Case, bool] = {case: True}

    def tried(candidate: Case) -> bool:
        if candidate not in known:
            known[candidate] = candidate.valid and time.monotonic() < deadline and fails(candidate)
        return known[candidate]

    axes = {}
    for name in AXES:
        upto = [*_simpler(case, name), getattr(case, name)]
        last = len(upto) - 1
        drawn = st.tuples(st.integers(0, last), st.booleans())
        axes[name] = drawn.map(lambda pair, upto=upto: upto[-1 if pair[1] else pair[0]])
    options = settings(
        database=None,
        deadline=None,
        derandomize=True,
        max_examples=EXAMPLES,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)
            return _axis_by_axis(find(st.builds(Case, **axes), tried, settings=options), tried)
    except NoSuchExample:
        return _axis_by_axis(case, tried)


def _axis_by_axis(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with the simplest value of each axis with which it still fails."""
    for name in AXES:
        candidates = (case.simpler(**{name: value}) for value in _simpler(case, name))
        if found := next(filter(fails, candidates), None):
            return _axis_by_axis(found, fails)
    return case


def _simpler(case: Case, name: str) -> list[Any]:
    """The values of an axis that are simpler than the case's own."""
    values, own = AXES[name], getattr(case, name)
    return [*values[: values.index(own)]] if own in values else [x for x in values if x < own]
