"""Casts of rows: how even their work is, rows sent and rows needed, bytes to other nodes, queries that travel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from sp_bench.analysis.number import Number, computed, formula, least, most, of_record, step_ms
from sp_bench.analysis.ranking import by_time
from sp_bench.analysis.runs import Point, Runs, point, request_of
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.documents import places
from sp_bench.analysis.studies.documents.places import TOKENS, asked
from sp_bench.analysis.table import Cell
from sp_bench.cli.compose import Composer
from sp_bench.methods import build
from sp_bench.methods.ulysses import LANE
from sp_bench.plan.problem import Problem
from sp_bench.plan.travel import EVEN
from sp_bench.point.request import Request
from sp_bench.records import Record

DATA = "magi_attention"
CAST_GPUS = (64, 256)
EARLIER = ("usp", "ulysses_all_gather")
"""The fastest of the methods that are not made for packs."""
RELAYED_GPUS = (16, 32, 64)
KEY_HEADS = (8, 1)
NODE = places.NODE
TRAVELLING = ((8, 1), (16, 1), (16, 8), (64, 1), (64, 8))
"""GPUs, and how many of them split the heads of a chunk."""
TRAVEL_KEY_HEADS = (64, 8)
SEEN = formula("rows-seen", "keys that a query of another chunk sees, by the mask", "plan.pack_blocks.keys_seen")


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
    splits = {"yes": {"inner": "auto"}, "no": {"inner": NODE, "ulysses": 1}}

    def asked_for(split: str, kv_heads: int, gpus: int, relays: bool) -> Point:
        return _with_key_heads(gpus, kv_heads, **(splits[split] if relays else splits[split] | {"inner": 1}))

    found = runs.grid(asked_for, splits, KEY_HEADS, RELAYED_GPUS, (False, True))
    rows: list[list[Cell]] = []
    for split, kv_heads, gpus in product(splits, KEY_HEADS, RELAYED_GPUS):
        records = [found[split, kv_heads, gpus, relays] for relays in (False, True)]
        across = [of_record(record, "comm_bytes_across_nodes_max").times(1e-6) for record in records]
        steps = [step_ms(record) for record in records]
        rows.append([split, kv_heads, gpus, records[1].variant or "", *across, *steps, steps[1].over(steps[0])])
    ratios = [row[-1] for row in rows if row[0] == "no" and isinstance(row[-1], Number)]
    values = {"least": least(ratios), "most": most(ratios)}
    return section("documents.relayed", data=DATA, node=NODE, rows=rows, **values)


def travels(runs: Runs) -> Section:
    """Bytes of rows and the step, where keys alone travel and where the queries of some pairs of chunks do."""

    def asked_for(of: tuple[int, int], kv_heads: int, qo_comm: bool) -> Point:
        gpus, degree = of
        return _with_key_heads(gpus, kv_heads, qo_comm=qo_comm, ulysses=degree, inner=1, slices=1)

    found = runs.grid(asked_for, TRAVELLING, TRAVEL_KEY_HEADS, (False, True))
    rows: list[list[Cell]] = []
    for (gpus, degree), kv_heads in product(TRAVELLING, TRAVEL_KEY_HEADS):
        keys, both = (found[(gpus, degree), kv_heads, qo_comm] for qo_comm in (False, True))
        saved = [_saved(keys, both, phase) for phase in ("forward", "backward")]
        steps = [step_ms(record) for record in (keys, both)]
        work = of_record(both, "work_imbalance")
        rows.append([gpus, degree, kv_heads, *saved, work, *steps, steps[1].over(steps[0])])
    heads, most_saved = places.SETTING["heads"], most([row[4] for row in rows if isinstance(row[4], Number)])
    return section("documents.travels", data=DATA, heads=heads, even=EVEN, saved=most_saved, rows=rows)


def _saved(keys: Record, both: Record, phase: str) -> Number:
    """The share of the bytes of rows, %, that isn't sent where queries travel."""
    each = (
        sum(size for lane, size in (record.comm_bytes_by_lane or {}).items() if _of_rows(lane, phase))
        for record in (keys, both)
    )
    before, after = each
    return computed(100 * (before - after) / before if before else 0.0, *step_ms(both).sources)


def _of_rows(lane: str, phase: str) -> bool:
    of_phase, _, name = lane.partition("/")
    return of_phase == phase and not name.startswith(LANE)


def _with_key_heads(gpus: int, kv_heads: int, **keys: Any) -> Point:
    pack = {"mask": "document", "data": DATA, "seqlen": f"{TOKENS * gpus}k"}
    return point(method="group_cast", gpus=gpus, **pack, **{**places.SETTING, "kv_heads": kv_heads}, **keys)


def _problem(gpus: int, degree: int) -> Problem:
    """The pack as group_cast assigns it, with so many ranks to split heads."""
    with Composer() as composer:
        request = request_of(asked(DATA, gpus, "group_cast", ulysses=degree), composer)
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
