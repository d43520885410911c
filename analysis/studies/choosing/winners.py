"""Maps of the best method over GPUs, seqlen, KV heads and cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.patches import Patch, Rectangle

from sp_bench.analysis.figure import Figure, colours, labelled, lattice, new_figure, sources
from sp_bench.analysis.number import Number, derived, gigabytes, most, of_record, step_ms, tally
from sp_bench.analysis.ranking import Winner
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, listed, section, text
from sp_bench.analysis.studies.choosing import places
from sp_bench.analysis.studies.choosing.places import SPLIT_HEADS, TIE, Grid, Key, tied
from sp_bench.analysis.table import Cell
from sp_bench.records import Record

Entry = tuple[str, str] | None
"""The content of a map's cell: a method, and a few characters below it."""


def points(runs: Runs) -> Section:
    """The points of the grid, and those that can't be served."""
    records = places.grid(runs)
    rows: list[list[Cell]] = [
        [*key, method, record.status, record.error or ""]
        for (key, method), record in records.items()
        if record.status != "ok"
    ]
    numbers = [step_ms(record) for record in records.values()]
    memory = tally(sum(record.status == "oom" for record in records.values()), numbers)
    whole, refused = tally(len(records), numbers), tally(len(rows), numbers)
    return section("choosing.points", all=whole, refused=refused, memory=memory, rows=rows)


def maps(runs: Runs) -> Section:
    """The best of all methods."""
    return _section(places.grid(runs), places.METHODS, "all", "Which method: all of them")


def maps_whole_heads(runs: Runs) -> Section:
    """The best of the methods that don't split heads, for when tensor parallelism has split them already."""
    rest = tuple(method for method in places.METHODS if method not in SPLIT_HEADS)
    return _section(places.grid(runs), rest, "whole-heads", "Which method: where heads can't be split")


def _section(found: Grid, methods: Sequence[str], name: str, title: str) -> Section:
    bests = {key: places.best(found, key, methods) for key in places.KEYS}
    served = {key: one for key, one in bests.items() if one}
    numbers = [one.step for one in served.values()]
    wins = Counter(one.record.method for one in served.values())
    clear = Counter(one.record.method for one in served.values() if not tied(one))
    each = {m: (tally(wins[m], numbers), tally(clear[m], numbers)) for m in wins}
    counts = {m: text("{all:.0f} (clearly {clear:.0f})", all=both[0], clear=both[1]) for m, both in each.items()}
    largest = max(served, key=lambda key: served[key].margin.value or 0.0)
    lean = {key: record for key in places.KEYS if (record := places.leanest(found, key, methods))}
    saved = [
        derived(lambda a, b: 1 - a / b, gigabytes(lean[key]), gigabytes(one.record)) for key, one in served.items()
    ]
    chosen = Counter(record.method for record in lean.values())
    values = {"title": title, "name": name, "methods": ", ".join(methods), "tie": TIE}
    values |= {"fastest": _fastest(bests, name, title), "cells": tally(len(served), numbers)}
    values |= {"ties": tally(sum(tied(one) for one in served.values()), numbers), "high": served[largest].margin}
    values |= {"winner": served[largest].record.method, "leanest": _leanest(lean, name)}
    values |= {"saved": most(saved), "rows": [_row(key, one) for key, one in bests.items()]}
    return section(
        "choosing.maps",
        **values,
        wins=listed(counts, "{name} {value}"),
        lean=listed({method: tally(count, saved) for method, count in chosen.items()}, "{name} {value:.0f}"),
        **dict(zip(("cluster", "kv_heads", "seqlen", "gpus"), largest, strict=True)),
    )


def _row(key: Key, one: Winner | None) -> list[Cell]:
    if one is None:
        return [*key, "none", "", "-", "-", "-", "", "-"]
    about = [one.step, of_record(one.record, "mfu").times(100), gigabytes(one.record)]
    second = one.second.method if one.second else "none"
    return [*key, one.record.method, one.record.variant or "", *about, second, one.margin.times(100)]


def _figure(entries: Mapping[Key, Entry], numbers: Sequence[Number], name: str, title: str, note: str) -> Figure:
    clusters, kv_heads = places.CLUSTERS, places.KV_HEADS
    canvas, axes = new_figure(len(clusters), len(kv_heads), height=4.4, sharex=True, sharey=True)
    used = sorted({entry[0] for entry in entries.values() if entry}, key=places.METHODS.index)
    colour = {method: tuple(0.6 + 0.4 * np.array(rgb)) for method, rgb in colours(used).items()}
    for axis, (kv, cluster) in zip(axes.flat, product(kv_heads, clusters), strict=True):
        labels = {"xlabel": "GPUs", "ylabel": "seqlen, tokens"}
        for x, y, gpus, seqlen in lattice(axis, places.GPUS, places.SEQLENS, **labels):
            method, below = entries[cluster, kv, seqlen, gpus] or ("none", "")
            face = colour.get(method, (1.0, 1.0, 1.0))
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
            axis.text(x, y, f"{method}\n{below}", ha="center", va="center", fontsize=6)
        axis.set_title(f"{cluster}, {kv} KV heads", fontsize=7.5)
        axis.label_outer()
    legend = [Patch(color=colour[method], label=labelled(method, "simulated")) for method in used]
    canvas.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return Figure(f"choosing-{name}", title, canvas, sources(numbers), note)


def _fastest(bests: Mapping[Key, Winner | None], name: str, title: str) -> Figure:
    entries: dict[Key, Entry] = {}
    for key, one in bests.items():
        margin = "" if one is None or one.second is None else "~" if tied(one) else f"+{one.margin.known:.0%}"
        entries[key] = (one.record.method, margin) if one else None
    numbers = [number for one in bests.values() if one for number in (one.step, one.margin)]
    note = "The number is how much longer the second takes; ~: less than the model can tell."
    return _figure(entries, numbers, name, title, note)


def _leanest(lean: Mapping[Key, Record], name: str) -> Figure:
    """The method with the least memory among those that tie with the fastest."""
    memory = {key: gigabytes(record) for key, record in lean.items()}
    entries = {key: (lean[key].method, f"{memory[key].known:.2g} GB") if key in lean else None for key in places.KEYS}
    title = "The method with the least memory among the fastest"
    note = "The number is the peak memory of the attention, computed from the plans."
    return _figure(entries, list(memory.values()), f"{name}-leanest", title, note)
