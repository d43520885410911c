"""Casts of rows: how even their work is, rows sent and rows needed, bytes to other nodes, queries that would travel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from sp_bench.analysis.number import Number, computed, formula, least, most, of_record, step_ms
from sp_bench.analysis.ranking import by_time
from sp_bench.analysis.runs import Point, Runs, point, request_of
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.documents import places
from sp_bench.analysis.studies.documents.places import TOKENS, asked
from sp_bench.analysis.table import Cell
from sp_bench.methods import build
from sp_bench.plan.casts import Gathering, casts
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import rows_in
from sp_bench.point.request import Request

DATA = "magi_attention"
CAST_GPUS = (64, 256)
EARLIER = ("usp", "ulysses_all_gather")
"""The fastest of the methods that are not made for packs."""
RELAYED_GPUS = (16, 32, 64)
KEY_HEADS = (8, 1)
NODE = places.NODE
TRAVELLING = ((64, 8), (64, 64), (64, 1))
"""Query and key heads."""
TRAVEL_GPUS, DEGREES = 64, (1, 8)
EVEN = 1.05
"""The most that the busiest GPU may have over the mean."""
SEEN = formula("rows-seen", "keys that a query of another chunk sees, by the mask", "plan.pack_blocks.keys_seen")
FEWER = formula("rows-travel", "of each pair of chunks the lesser of its keys and its queries", "plan.casts")


def even(runs: Runs) -> Section:
    """The busiest GPU, the rows sent over those that must be, and the step over the best of earlier methods."""
    records = runs.grid(lambda gpus, method: asked(DATA, gpus, method), CAST_GPUS, ("group_cast", *EARLIER))
    rows: list[list[Cell]] = []
    for gpus in CAST_GPUS:
        record, best = records[gpus, "group_cast"], by_time(records[gpus, method] for method in EARLIER)[0]
        needed = computed(_needed_bytes(_problem(gpus, _degree(record.variant))), SEEN)
        sent = computed(_bytes_of_rows(record.comm_bytes_by_lane or {}), *step_ms(record).sources)
        work, step = of_record(record, "work_imbalance"), step_ms(record)
        rows.append([gpus, record.variant or "", work, sent.times(1e-6), needed.times(1e-6), sent.over(needed)])
        rows[-1] += [step, best.method, step_ms(best), step.over(step_ms(best))]
    return section("documents.casts", data=DATA, earlier=" and ".join(EARLIER), rows=rows)


def relayed(runs: Runs) -> Section:
    """Bytes to other nodes and the step, with rows that cross once for each GPU or once for a node."""
    rows: list[list[Cell]] = []
    for (split, keys), kv_heads, gpus in product((("yes", {}), ("no", {"ulysses": 1})), KEY_HEADS, RELAYED_GPUS):
        records = [
            runs.ask([_with_key_heads(gpus, kv_heads, inner=inner, **keys)])[0]
            for inner in (1, "auto" if split == "yes" else NODE)
        ]
        across = [of_record(record, "comm_bytes_across_nodes_max").times(1e-6) for record in records]
        steps = [step_ms(record) for record in records]
        rows.append([split, kv_heads, gpus, records[1].variant or "", *across, *steps, steps[1].over(steps[0])])
    ratios = [row[-1] for row in rows if row[0] == "no" and isinstance(row[-1], Number)]
    values = {"least": least(ratios), "most": most(ratios)}
    return section("documents.relayed", data=DATA, node=NODE, rows=rows, **values)


def travels(runs: Runs) -> Section:
    """Bytes saved where queries travel to the keys instead, if each pair of chunks takes the lesser."""
    rows: list[list[Cell]] = []
    for degree in DEGREES:
        problem = _problem(TRAVEL_GPUS, degree)
        pairs = _pairs(problem)
        for heads, kv_heads in TRAVELLING:
            figures = _travelling(problem, pairs, heads, max(kv_heads, degree))
            rows.append([heads, kv_heads, degree, *(computed(value, FEWER) for value in figures)])
    return section("documents.travels", data=DATA, gpus=TRAVEL_GPUS, even=EVEN, rows=rows)


def _with_key_heads(gpus: int, kv_heads: int, **keys: Any) -> Point:
    pack = {"mask": "document", "data": DATA, "seqlen": f"{TOKENS * gpus}k"}
    return point(method="group_cast", gpus=gpus, **pack, **{**places.SETTING, "kv_heads": kv_heads}, **keys)


class _Pairs(NamedTuple):
    """Rows of each pair of other chunks, (chunks, chunks) by query and key chunk."""

    keys: np.ndarray
    """Keys that a query of the pair sees."""
    queries: np.ndarray
    """Queries that see a key."""


def _pairs(problem: Problem) -> _Pairs:
    of_rows, keys = casts(problem), casts(problem).counts.copy()
    np.fill_diagonal(keys, 0)
    queries = np.zeros_like(keys)
    wanted = [Gathering(int(q), (int(kv),)) for q, kv in np.argwhere(keys)]
    of_rows.find(wanted)
    for q, (kv,), _ in wanted:
        queries[q, kv] = rows_in(region.q for region in of_rows.keys(q, (kv,)).regions)
    return _Pairs(keys, queries)


def _travelling(problem: Problem, pairs: _Pairs, heads: int, kv_heads: int) -> tuple[float, float, float]:
    """(% of the bytes of rows that is saved, the busiest chunk's work over the mean; % saved while that is at most
    EVEN, where pairs that save most move first, as far as there is room).

    Of a key, K and V come and go backward with dK and dV; of a query, Q goes and O comes, and backward Q, dO and dQ.
    """
    by_keys, by_queries = 6 * kv_heads * pairs.keys, 5 * heads * pairs.queries
    gain, chunks = np.maximum(by_keys - by_queries, 0), len(pairs.keys)
    work = np.asarray(problem.blocks.pairs).reshape(chunks, chunks)
    computes = np.where(gain > 0, 0, work).sum(axis=1) + np.where(gain > 0, work, 0).sum(axis=0)
    busy, room, kept = work.sum(axis=1), EVEN * work.sum() / chunks, 0
    for pair in np.argsort(-gain, axis=None, kind="stable")[: int((gain > 0).sum())]:
        q, kv = divmod(int(pair), chunks)
        if busy[kv] + work[q, kv] <= room:
            busy[q], busy[kv], kept = busy[q] - work[q, kv], busy[kv] + work[q, kv], kept + gain[q, kv]
    saved, balanced = (100 * float(each) / float(by_keys.sum()) for each in (gain.sum(), kept))
    return saved, float(computes.max() / computes.mean()), balanced


def _problem(gpus: int, degree: int) -> Problem:
    """The pack as group_cast assigns it, with so many ranks to split heads."""
    request = request_of(asked(DATA, gpus, "group_cast", ulysses=degree))
    assert isinstance(request, Request)
    method = build("group_cast", {"ulysses": degree, "stages": 1})
    return method.assigned(replace(request.problem, layout=method.layout_of(request.problem.mask, gpus)))


def _degree(variant: str | None) -> int:
    return int((variant or "").split()[1])


def _bytes_of_rows(by_lane: dict[str, float]) -> float:
    """Bytes that casts bring a GPU forward, in the mean."""
    return sum(size for lane, size in by_lane.items() if lane.startswith("forward") and "kv" in lane.split("/")[1])


def _needed_bytes(problem: Problem) -> float:
    """Bytes of the keys that chunks see in other chunks, of all heads, a GPU's share."""
    chunks = problem.n // problem.layout.head_parallel
    seen = np.asarray(problem.blocks.keys_seen).reshape(chunks, chunks).copy()  # pyright: ignore[reportAttributeAccessIssue]
    np.fill_diagonal(seen, 0)
    row_bytes = 2 * 2 * problem.head_dim * max(problem.kv_heads, problem.layout.head_parallel)
    return float(seen.sum()) * row_bytes / problem.n
