"""Pairs of points, and whether their simulations are ordered as their measurements."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


def count_in_order(
    groups: Iterable[tuple[object, pd.DataFrame]],
    measured: str,
    simulated: str,
    *,
    tied: Callable[[Row, Row], bool],
    words: Callable[[Row, Row], str],
    faster: Callable[[float, float], bool] = operator.lt,
) -> tuple[int, int, list[str]]:
    """(pairs ordered alike, pairs, the others in words) of the rows of each group, as of DataFrame.groupby.

    `measured` and `simulated` are columns of times or, with `faster=operator.gt`, of rates. `tied` pairs don't count.
    """
    alike, count, wrong = 0, 0, []
    for _, group in groups:
        for one, other in itertools.combinations(group.to_dict("records"), 2):
            if tied(one, other):
                continue
            count += 1
            if faster(one[measured], other[measured]) == faster(one[simulated], other[simulated]):
                alike += 1
            else:
                wrong.append(words(one, other))
    return alike, count, wrong
