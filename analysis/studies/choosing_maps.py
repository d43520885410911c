"""Maps of the best method over GPUs, seqlen, key heads and cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Patch, Rectangle

from sp_bench.analysis.figure import Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, derived, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing_grid import (
    CLUSTERS,
    GPUS,
    KEYS,
    KV_HEADS,
    METHODS,
    SEQLENS,
    SPLIT_HEADS,
    TIE,
    Best,
    Grid,
    Key,
    best,
    grid,
    leanest,
    setting,
    tally,
)
from sp_bench.analysis.table import Cell, Column, Table


def points(runs: Runs) -> Section:
    """What was asked, and what could not be served."""
    found = grid(runs)
    lines: list[list[Cell]] = [
        [cluster, kv_heads, seqlen, gpus, method, record.status, record.error or ""]
        for ((cluster, kv_heads, seqlen, gpus), method), record in found.items()
        if record.status != "ok"
    ]
    numbers = [of_record(record, "step_ms_median") for record in found.values()]
    out_of_memory = sum(record.status == "oom" for record in found.values())
    columns = [Column(name) for name in ("cluster", "key heads", "seqlen", "GPUs", "method", "status", "reason")]
    return Section(
        "What was asked",
        [
            text(
                "Every time here is simulated, on clusters whose rates are published or assumed (conf/cluster), none"
                " was measured: {all:.0f} points, forward and backward, causal, 32 heads of 128 in bfloat16, batch 1."
                " Each method takes its variant with the shortest simulated time (tile, team, degree of head"
                " splitting); TokenRing runs its hybrid, one ring to a node. {refused:.0f} points can't be served,"
                " {memory:.0f} of these for want of memory; they are listed with their reason.",
                all=tally(len(found), numbers, "points asked"),
                refused=tally(len(lines), numbers, "points not served"),
                memory=tally(out_of_memory, numbers, "points out of memory"),
            ),
            Table("choosing-refused", "Points that can't be served", columns, lines, shown_rows=6),
        ],
    )


def maps(runs: Runs) -> Section:
    """The best of all methods."""
    return _section(grid(runs), METHODS, "all", "Which method: all of them")


def maps_whole_heads(runs: Runs) -> Section:
    """The best of those that leave heads alone, as where tensor parallelism has split them already."""
    rest = tuple(method for method in METHODS if method not in SPLIT_HEADS)
    return _section(grid(runs), rest, "whole-heads", "Which method: where heads can't be split")


def _section(found: Grid, methods: Sequence[str], name: str, title: str) -> Section:
    bests = {key: best(found, key, methods) for key in KEYS}
    return Section(
        title,
        [
            text(
                "A cell names the fastest method of "
                + ", ".join(methods)
                + ", and how much longer the next one takes that is not the same plan under another name. A tilde: less"
                " than {tie:.0%}, which a model of this kind can't tell.",
                tie=setting(TIE, "tie"),
            ),
            _fastest(bests, name, title),
            _about(bests),
            *_leanest(found, methods, bests, name),
            _table(bests, name),
        ],
    )


def _about(bests: dict[Key, Best | None]) -> Text:
    there = {key: one for key, one in bests.items() if one}
    numbers = [one.step for one in there.values()]
    wins = Counter(one.record.method for one in there.values())
    clear = Counter(one.record.method for one in there.values() if not one.tied)
    margins = [one.margin for one in there.values() if one.second]
    largest = max(there, key=lambda key: there[key].margin.value or 0.0)
    cluster, kv_heads, seqlen, gpus = largest
    words = ", ".join(f"{method} at {{{method}:.0f}} (clearly {{{method}_clear:.0f}})" for method in wins)
    counts = {method: tally(count, numbers, f"cells of {method}") for method, count in wins.items()}
    counts |= {f"{m}_clear": tally(clear[m], numbers, f"clear cells of {m}") for m in wins}
    return text(
        f"Fastest of {{cells:.0f}} cells: {words}. In {{ties:.0f}} cells the second is within {{tie:.0%}}, so that the"
        " choice hardly matters. The largest margin is {high:.0%}"
        f" ({there[largest].record.method} on {cluster}, {seqlen} tokens, {{gpus:.0f}} GPUs, {{kv:.0f}} key heads).",
        cells=tally(len(there), numbers, "cells"),
        ties=tally(sum(one.tied for one in there.values()), numbers, "ties"),
        tie=setting(TIE, "tie"),
        high=derived(lambda *values: max(values), *margins),
        gpus=setting(gpus, "gpus"),
        kv=setting(kv_heads, "key heads"),
        **counts,
    )


def _table(bests: dict[Key, Best | None], name: str) -> Table:
    columns = [Column(head) for head in ("cluster", "key heads", "seqlen", "GPUs", "best", "variant")]
    columns += [Column("step", "ms"), Column("MFU", "%", ".1f"), Column("memory", "GB", ".3g"), Column("second")]
    columns += [Column("second longer by", "%", ".1f")]
    lines: list[list[Cell]] = []
    for key, one in bests.items():
        if one is None:
            lines.append([*key, "none", "", "-", "-", "-", "", "-"])
            continue
        lines.append([*key, one.record.method, one.record.variant or "", one.step])
        lines[-1] += [of_record(one.record, "mfu").times(100), of_record(one.record, "peak_mem_bytes_max").times(1e-9)]
        lines[-1] += [one.second.method if one.second else "none", one.margin.times(100)]
    return Table(f"choosing-{name}", "The best method, its variant and the next one", columns, lines, shown_rows=12)


Cell2 = tuple[str, str] | None
"""What stands in a cell: a method, and a few characters below it."""


def _figure(cells: dict[Key, Cell2], numbers: Sequence[Number], name: str, title: str, note: str) -> Figure:
    canvas, axes = new_figure(len(CLUSTERS), len(KV_HEADS), height=4.4, sharex=True, sharey=True)
    used = sorted({cell[0] for cell in cells.values() if cell}, key=METHODS.index)
    colour = {method: tuple(0.6 + 0.4 * np.array(rgb)) for method, rgb in colours(used).items()}
    for row, kv_heads in zip(axes, KV_HEADS, strict=True):
        for axis, cluster in zip(row, CLUSTERS, strict=True):
            for y, seqlen in enumerate(SEQLENS):
                for x, gpus in enumerate(GPUS):
                    method, below = cells[cluster, kv_heads, seqlen, gpus] or ("none", "")
                    face = colour.get(method, (1.0, 1.0, 1.0))
                    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
                    axis.text(x, y, f"{method}\n{below}", ha="center", va="center", fontsize=6)
            axis.set(xlim=(-0.5, len(GPUS) - 0.5), ylim=(-0.5, len(SEQLENS) - 0.5))
            axis.set_title(f"{cluster}, {kv_heads} key heads", fontsize=7.5)
            axis.set_xticks(range(len(GPUS)), map(str, GPUS))
            axis.set_yticks(range(len(SEQLENS)), SEQLENS)
            axis.grid(visible=False)
    for axis in axes[-1]:
        axis.set_xlabel("GPUs")
    for axis in axes[:, 0]:
        axis.set_ylabel("seqlen, tokens")
    legend = [Patch(color=colour[method], label=labelled(method, "simulated")) for method in used]
    canvas.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8)
    return Figure(f"choosing-{name}", title, canvas, sources(numbers), note)


def _fastest(bests: dict[Key, Best | None], name: str, title: str) -> Figure:
    cells: dict[Key, Cell2] = {}
    for key, one in bests.items():
        margin = "" if one is None or one.second is None else "~" if one.tied else f"+{one.margin.known:.0%}"
        cells[key] = (one.record.method, margin) if one else None
    numbers = [number for one in bests.values() if one for number in (one.step, one.margin)]
    note = "The number is how much longer the second takes; ~: less than can be told."
    return _figure(cells, numbers, name, title, note)


def _leanest(found: Grid, methods: Sequence[str], bests: dict[Key, Best | None], name: str) -> list[Figure | Text]:
    """Of those as fast as the fastest, the one that needs least memory."""
    lean = {key: leanest(found, key, methods) for key in KEYS}
    memory = {key: of_record(record, "peak_mem_bytes_max").times(1e-9) for key, record in lean.items() if record}
    cells: dict[Key, Cell2] = {
        key: (record.method, f"{memory[key].known:.2g} GB") if record else None for key, record in lean.items()
    }
    chosen = Counter(record.method for record in lean.values() if record)
    saved = [
        derived(lambda a, b: 1 - a / b, memory[key], of_record(one.record, "peak_mem_bytes_max").times(1e-9))
        for key, one in bests.items()
        if one and key in memory
    ]
    words = ", ".join(f"{method} at {{{method}:.0f}}" for method in chosen)
    return [
        _figure(
            cells,
            list(memory.values()),
            f"{name}-leanest",
            "The leanest of those as fast as the fastest",
            "The number is its peak memory for the attention, computed from the plans.",
        ),
        text(
            "Where several are as fast as can be told, memory may decide. The leanest of those within {tie:.0%} is"
            f" {words}; it saves up to {{most:.0%}} of the fastest one's memory.",
            tie=setting(TIE, "tie"),
            most=derived(lambda *values: max(values), *saved),
            **{method: tally(count, saved, f"cells with {method} leanest") for method, count in chosen.items()},
        ),
    ]
