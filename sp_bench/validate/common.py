"""Parts that validations share: published rows, pairs that are ordered alike, and kinds of points that are backed."""

from __future__ import annotations

import csv
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from sp_bench.point.backing import Backing, Kind
from sp_bench.resources import place

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


def published_rows(name: str) -> list[dict[str, str]]:
    """The rows of a file of analysis/published, by the names of its columns."""
    with (place("analysis/published") / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


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


def by_kind(found: pd.DataFrame, workload: str) -> Iterator[tuple[Kind, str, pd.DataFrame]]:
    """(kind, implementation, rows) of the rows of each kind of points and each implementation."""
    for keys, rows in found.groupby(["mask", "transfers", "links", "implementation"]):
        mask, transfers, links, implementation = map(str, cast(tuple, keys))
        yield Kind(workload, mask, transfers, links), implementation, rows


def most_measured(rows: Iterable[Backing]) -> list[Backing]:
    """The rows of all kinds, of each the one of the implementation with the most points."""
    most: dict[Kind, Backing] = {}
    for row in rows:
        if row.kind not in most or row.points > most[row.kind].points:
            most[row.kind] = row
    return [most[kind] for kind in sorted(most)]
