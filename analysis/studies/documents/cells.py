"""The fastest method and layout on a pack, and the work and volume of each layout against their lower bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm

from sp_bench.analysis.figure import STYLE, Figure, colours, new_figure, sources
from sp_bench.analysis.number import Number, count, derived, ends, least, most, of_record, step_ms, tally, valued
from sp_bench.analysis.ranking import payload_over_bound
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, Text, listed, section, text, words
from sp_bench.analysis.studies.documents import places
from sp_bench.analysis.studies.documents.places import ALL_LAYOUTS, NODE, SETTING, TOKENS, asked
from sp_bench.analysis.table import Cell
from sp_bench.records import Record
from sp_bench.records.interval import interval

Steps = dict[tuple[str, str, str], Number]
"""Times in ms by data, method and layout; without value where a point can't be served."""


def points(runs: Runs) -> Section:
    """The packs: how many documents, and how long."""
    best = places.fastest(runs)
    rows: list[list[Cell]] = []
    for data, gpus in product(places.DATA, places.GPUS):
        record = best[data, gpus, places.METHODS[0]]
        tokens, documents, longest = (of_record(record, x) for x in ("seqlen", "documents", "longest_document"))
        rows.append([data, gpus, tokens, documents, longest, longest.over(tokens).times(100)])
    return section("documents.points", tokens=places.TOKENS, cluster=places.CLUSTER, rows=rows)


def maps(runs: Runs) -> Section:
    """Each method's step on each layout over the fastest of all, by distribution of lengths."""
    records = places.cells(runs)
    steps: Steps = {key: step_ms(record) for key, record in records.items()}
    best = {data: least(valued(n for key, n in steps.items() if key[0] == data)) for data in places.DATA}
    ratios: Steps = {key: number.over(best[key[0]]) for key, number in steps.items()}
    values = {"gpus": places.MAP_GPUS, "close": places.CLOSE, "figure": _map(records, ratios)}
    return section(
        "documents.maps",
        **values,
        about=[_about_map(data, ratios) for data in places.DATA],
        rows=[
            [*key, record.variant or "", record.status, steps[key], ratios[key], of_record(record, "mfu").times(100)]
            for key, record in records.items()
        ],
    )


def _map(found: places.Cells, ratios: Steps) -> Figure:
    data_names, methods = places.DATA, places.METHODS
    canvas, axes = new_figure(2, -(-len(data_names) // 2), width=7.2, height=5.8, sharex=True, sharey=True)
    with mpl.rc_context(STYLE):
        for axis in axes.flat[len(data_names) :]:
            axis.set_visible(False)
        for axis, data in zip(axes.flat, data_names, strict=False):
            values = np.full((len(methods), len(places.ALL_LAYOUTS)), np.nan)
            for (row, method), (column, layout) in product(enumerate(methods), enumerate(places.ALL_LAYOUTS)):
                if (key := (data, method, layout)) in ratios:
                    ratio = ratios[key].value
                    values[row, column] = np.nan if ratio is None else ratio
                    shown = found[key].status if ratio is None else f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"
                    tone = "w" if ratio is not None and ratio > 3 else "k"
                    axis.text(column, row, shown, ha="center", va="center", fontsize=6, color=tone)
            axis.imshow(values, cmap="viridis_r", norm=LogNorm(1, 10), aspect="auto")
            axis.set_title(data, fontsize=8)
            axis.set_xticks(range(len(places.ALL_LAYOUTS)), places.ALL_LAYOUTS, rotation=40, ha="right", fontsize=7)
            axis.set_yticks(range(len(methods)), methods, fontsize=7)
            axis.grid(visible=False)
    note = "Step over the fastest of the panel, simulated; 1.00 is the fastest."
    numbers = sources(valued(ratios.values()))
    return Figure("documents-map", "Steps by method and layout", canvas, numbers, note)


def _about_map(data: str, ratios: Steps) -> Text:
    """The fastest cell, how many are as fast, and what a method loses on its worst layout."""
    cells = {key[1:]: number for key, number in ratios.items() if key[0] == data and number.value is not None}
    method, layout = min(cells, key=lambda cell: cells[cell].known)
    best_of = {layout: least(n for (_, d), n in cells.items() if d == layout) for _, layout in cells}
    by_method = {name: [n for (other, _), n in cells.items() if other == name] for name, _ in cells}
    lost = {name: most(row).over(least(row)) for name, row in by_method.items() if len(row) > 1}
    costly = max(lost, key=lambda name: lost[name].known)
    values = {"data": data, "method": method, "layout": layout, "tie": places.CLOSE}
    values |= {"close": count(cells.values(), lambda ratio: ratio < 1 + places.CLOSE), "cells": count(cells.values())}
    values |= {"each": listed(best_of, "{name} {value:.2f}"), "costly": costly, "lost": lost[costly]}
    return words("documents.map", **values)


def winners(runs: Runs) -> Section:
    """The fastest method and layout on each pack, of all methods and of those that don't split heads."""
    best = places.fastest(runs)
    whole = tuple(method for method in places.METHODS if method not in places.SPLIT_HEADS)
    of_all, of_whole = _winners(best, places.METHODS), _winners(best, whole)
    values = {"close": places.CLOSE, "about_all": _about_winners(of_all, "Of all methods"), "of_all": _rows(of_all)}
    return section(
        "documents.winners",
        **values,
        about_whole=_about_winners(of_whole, "Where heads can't be split, as tensor parallelism has split them"),
        of_whole=_rows(of_whole),
    )


def _winners(found: places.Fastest, methods: Sequence[str]) -> dict[tuple[str, int], places.Winner]:
    return {place: places.winner(found, *place, methods) for place in product(places.DATA, places.GPUS)}


def _about_winners(found: dict[tuple[str, int], places.Winner], which: str) -> Text:
    steps = [one.step for one in found.values()]
    methods, layouts = (
        listed({name: tally(n, steps) for name, n in Counter(names).items()}, "{name} {value:.0f}")
        for names in (
            (one.record.method for one in found.values()),
            (one.record.layout or "" for one in found.values()),
        )
    )
    data, gpus = max(found, key=lambda key: found[key].margin.value or 0.0)
    values = {"which": which, "methods": methods, "layouts": layouts}
    values |= {
        "clear": tally(sum(not one.within(places.CLOSE) for one in found.values()), steps),
        "packs": count(steps),
    }
    values |= {"close": places.CLOSE, "high": found[data, gpus].margin, "data": data, "gpus": gpus}
    return words("documents.winner", **values)


def _rows(found: dict[tuple[str, int], places.Winner]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for place, one in found.items():
        rows.append([*place, one.record.method, one.record.variant or "", one.record.layout or "", one.step])
        second = f"{one.second.method}, {one.second.layout}" if one.second else "none"
        rows[-1] += [of_record(one.record, f"step_ms_validated_{end}") for end in ("low", "high")]
        rows[-1] += [of_record(one.record, "mfu").times(100), second, one.margin.times(100)]
        rows[-1].append(
            ", ".join(f"{record.method} ({record.layout})" for record in one.within(places.CLOSE)) or "none"
        )
        rows[-1].append(_tied(one))
    return rows


def _tied(one: places.Winner) -> str:
    """The methods whose intervals overlap the fastest's, and those that have none."""
    first = interval(one.record)
    others = {record.method: interval(record) for record in one.others}
    tied = [name for name, each in others.items() if each.overlaps(first)]
    return ", ".join(tied) or ("none" if first.backed else "-")


MB = 1e-6
SHARED_DATA = "magi_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "all_gather": {"stride": 1},
    "pass_q": {},
    "tokenring": {},
    "startrail": {"team": 2},
    "mesh": {"tile": [4, 8]},
    "usp": {"ulysses": 8},
}
"""One variant of each method, so that only the layout differs."""


def bounds(runs: Runs) -> Section:
    """Imbalance of the work and the volume, by layout, beside the least that they can be."""
    of_ring = {(data, layout): r for (data, method, layout), r in places.cells(runs).items() if method == "ring"}
    served = {key: record for key, record in of_ring.items() if record.status == "ok"}
    rows: list[list[Cell]] = []
    for key, record in of_ring.items():
        work = [of_record(record, field) for field in ("work_imbalance", "work_imbalance_lower_bound")]
        sent = [of_record(record, f"comm_bytes_{name}").times(MB) for name in ("per_gpu", "lower_bound")]
        rows.append([*key, *work, *sent, payload_over_bound(record)])
    values = {"gpus": places.MAP_GPUS, "figure": _figure(served)}
    return section(
        "documents.bounds",
        **values,
        about=[_about_bounds({d: r for (of, d), r in served.items() if of == data}, data) for data in places.DATA],
        rows=rows,
    )


def _figure(found: dict[tuple[str, str], Record]) -> Figure:
    canvas, axes = new_figure(2, 1, height=3.2, sharey=True)
    tones, numbers, height = colours(ALL_LAYOUTS), [], 0.8 / len(ALL_LAYOUTS)
    panels = (("work_imbalance", 1.0, "busiest GPU's work, x mean"), ("comm_bytes_lower_bound", MB, "bound, MB a GPU"))
    with mpl.rc_context(STYLE):
        for axis, (field, factor, label) in zip(axes[0], panels, strict=True):
            for (row, data), (place, layout) in product(enumerate(places.DATA), enumerate(ALL_LAYOUTS)):
                if (data, layout) in found:
                    number = of_record(found[data, layout], field).times(factor)
                    numbers.append(number)
                    name = f"{layout} ({number.kind})" if row == 0 else None
                    y = row + (place - (len(ALL_LAYOUTS) - 1) / 2) * height
                    axis.barh(y, number.known, height=height, color=tones[layout], label=name)
            axis.set(xlabel=label)
            axis.set_xscale("symlog", linthresh=1)
            axis.set_yticks(range(len(places.DATA)), places.DATA)
        axes[0, 0].invert_yaxis()
        entries = axes[0, 0].get_legend_handles_labels()
        canvas.legend(*entries, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    note = "Left: how unequal the work is. Right: the least that has to be sent."
    return Figure("documents-bounds", "Balance and volume by layout", canvas, sources(numbers), note)


def _about_bounds(found: dict[str, Record], data: str) -> Text:
    """The most even layout, the one that needs least, and whether they are the same."""
    work = {name: of_record(record, "work_imbalance") for name, record in found.items()}
    bound = {name: of_record(record, "comm_bytes_lower_bound").times(MB) for name, record in found.items()}
    even = min(work, key=lambda name: (round(work[name].known, 3), bound[name].known))
    lean = min(bound, key=lambda name: (round(bound[name].known, 1), work[name].known))
    shared = {"data": data, "even": even, "work": work[even], "needs": bound[even]}
    if even == lean:
        return words("documents.even", **shared)
    return words("documents.traded", **shared, lean=lean, least=bound[lean], uneven=work[lean])


def shares(runs: Runs) -> Section:
    """The bytes sent on one pack, as a share of those that each method sends with full attention."""
    gpus = places.MAP_GPUS
    packed = runs.grid(lambda m, d: asked(SHARED_DATA, gpus, m, layout=d, **VARIANTS[m]), VARIANTS, ALL_LAYOUTS)
    dense = runs.by_key({method: _dense(method) for method in VARIANTS})
    whole = {method: of_record(record, "comm_bytes_per_gpu") for method, record in dense.items()}
    share = {(m, d): of_record(record, "comm_bytes_per_gpu").over(whole[m]) for (m, d), record in packed.items()}
    known = {key: number for key, number in share.items() if number.value is not None}
    by_layout = {d: numbers for d in ALL_LAYOUTS if (numbers := [n for (_, of), n in known.items() if of == d])}
    ring = {d: number for (method, d), number in known.items() if method == "ring"}
    shares_of = {d: text("{low:.0%} to {high:.0%}", **ends(x)) for d, x in by_layout.items()}
    values = {"data": SHARED_DATA, "gpus": gpus, "each": listed(shares_of, "{name} {value}")}
    return section(
        "documents.shares",
        **values,
        saved=derived(lambda low: 1 - low, least(ring.values())),
        layout=min(ring, key=lambda d: ring[d].known),
        by_layout="; ".join(f"{d} | % | .1f" for d in by_layout),
        rows=[
            [
                m,
                packed[m, ALL_LAYOUTS[0]].variant or "",
                whole[m].times(MB),
                *(share[m, d].times(100) for d in by_layout),
            ]
            for m in VARIANTS
        ],
    )


def _dense(method: str) -> Point:
    """The point with full attention, where everything is sent."""
    nodes = {"nodes": places.MAP_GPUS // NODE} if method == "tokenring" else {}
    keys = {"gpus": places.MAP_GPUS, "seqlen": f"{TOKENS * places.MAP_GPUS}k", "causal": False}
    return point(method=method, layout="contiguous", **keys, **SETTING, **nodes, **VARIANTS[method])
