"""The smallest case that fails, found by hypothesis."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

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
    for name, values in AXES.items():
        own = getattr(case, name)
        upto = [*values[: values.index(own)], own] if own in values else [x for x in values if x < own] + [own]
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
            return find(st.builds(Case, **axes), tried, settings=options)
    except NoSuchExample:
        return case
