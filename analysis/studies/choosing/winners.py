"""Maps of the best method over GPUs, seqlen, KV heads and cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.patches import Patch, Rectangle

from sp_bench.analysis.figure import Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, derived, most, of_record, tally
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing.places import (
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
)
from sp_bench.analysis.table import Cell, Table, columns

Bests = dict[Key, Best | None]


def points(runs: Runs) -> Section:
    """The points of the grid, and those that can't be served."""
    found = grid(runs)
    lines: list[list[Cell]] = [
        [*key, method, record.status, record.error or ""]
        for (key, method), record in found.items()
        if record.status != "ok"
    ]
    numbers = [of_record(record, "step_ms_median") for record in found.values()]
    heads = columns("cluster; KV heads; seqlen; GPUs; method; status; reason")
    return Section(
        "The points",
        text(
            "Every time is simulated, on clusters whose rates are published or assumed (conf/cluster); none was"
            " measured. There are {all:.0f} points, forward and backward, causal, 32 heads of 128 in bfloat16, batch 1."
            " Each method takes its variant with the shortest simulated time (tile, team, degree of head splitting);"
            " TokenRing runs its hybrid, one ring in each node. {refused:.0f} points can't be served, {memory:.0f} of"
            " them for lack of memory; the table lists them with the reason.",
            all=tally(len(found), numbers),
            refused=tally(len(lines), numbers),
            memory=tally(sum(record.status == "oom" for record in found.values()), numbers),
        ),
        Table("choosing-refused", "Points that can't be served", heads, lines, shown_rows=6),
    )


def maps(runs: Runs) -> Section:
    """The best of all methods."""
    return _section(grid(runs), METHODS, "all", "Which method: all of them")


def maps_whole_heads(runs: Runs) -> Section:
    """The best of the methods that don't split heads, for when tensor parallelism has split them already."""
    rest = tuple(method for method in METHODS if method not in SPLIT_HEADS)
    return _section(grid(runs), rest, "whole-heads", "Which method: where heads can't be split")


def _section(found: Grid, methods: Sequence[str], name: str, title: str) -> Section:
    bests = {key: best(found, key, methods) for key in KEYS}
    return Section(
        title,
        text(
            "A cell names the fastest method of {methods}, and how much longer the second takes: the next one with a"
            " different plan. A tilde stands for less than {tie:.0%}, which a model of this kind can't tell.",
            methods=", ".join(methods),
            tie=TIE,
        ),
        _fastest(bests, name, title),
        _about(bests),
        *_leanest(found, methods, bests, name),
        _table(bests, name),
    )


def _about(bests: Bests) -> Text:
    there = {key: one for key, one in bests.items() if one}
    numbers = [one.step for one in there.values()]
    wins = Counter(one.record.method for one in there.values())
    clear = Counter(one.record.method for one in there.values() if not one.tied)
    cluster, kv_heads, seqlen, gpus = largest = max(there, key=lambda key: there[key].margin.value or 0.0)
    counts = {method: tally(count, numbers) for method, count in wins.items()}
    counts |= {f"{method}_clear": tally(clear[method], numbers) for method in wins}
    return text(
        "Number of {cells:.0f} cells in which a method is the fastest: "
        + ", ".join(f"{method} {{{method}:.0f}} (clearly {{{method}_clear:.0f}})" for method in wins)
        + ". In {ties:.0f} cells the second is within {tie:.0%}, and the choice hardly matters. The largest margin is"
        " {high:.0%} ({winner} on {cluster}, {seqlen} tokens, {gpus} GPUs, {kv_heads} KV heads).",
        cells=tally(len(there), numbers),
        ties=tally(sum(one.tied for one in there.values()), numbers),
        tie=TIE,
        high=there[largest].margin,
        winner=there[largest].record.method,
        cluster=cluster,
        seqlen=seqlen,
        gpus=gpus,
        kv_heads=kv_heads,
        **counts,
    )


def _table(bests: Bests, name: str) -> Table:
    lines: list[list[Cell]] = []
    for key, one in bests.items():
        if one is None:
            lines.append([*key, "none", "", "-", "-", "-", "", "-"])
            continue
        lines.append([*key, one.record.method, one.record.variant or "", one.step])
        lines[-1] += [of_record(one.record, "mfu").times(100), of_record(one.record, "peak_mem_bytes_max").times(1e-9)]
        lines[-1] += [one.second.method if one.second else "none", one.margin.times(100)]
    heads = columns(
        "cluster; KV heads; seqlen; GPUs; fastest; variant; step | ms; MFU | % | .1f; peak memory | GB | .3g; second;"
        " step of the second is longer by | % | .1f"
    )
    return Table(f"choosing-{name}", "The best method, its variant and the second", heads, lines, shown_rows=12)


Entry = tuple[str, str] | None
"""What a cell of a map shows: a method, and a few characters below it."""


def _figure(entries: Mapping[Key, Entry], numbers: Sequence[Number], name: str, title: str, note: str) -> Figure:
    canvas, axes = new_figure(len(CLUSTERS), len(KV_HEADS), height=4.4, sharex=True, sharey=True)
    used = sorted({entry[0] for entry in entries.values() if entry}, key=METHODS.index)
    colour = {method: tuple(0.6 + 0.4 * np.array(rgb)) for method, rgb in colours(used).items()}
    for axis, (kv_heads, cluster) in zip(axes.flat, product(KV_HEADS, CLUSTERS), strict=True):
        for (y, seqlen), (x, gpus) in product(enumerate(SEQLENS), enumerate(GPUS)):
            method, below = entries[cluster, kv_heads, seqlen, gpus] or ("none", "")
            face = colour.get(method, (1.0, 1.0, 1.0))
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
            axis.text(x, y, f"{method}\n{below}", ha="center", va="center", fontsize=6)
        axis.set(xlim=(-0.5, len(GPUS) - 0.5), ylim=(-0.5, len(SEQLENS) - 0.5))
        axis.set_title(f"{cluster}, {kv_heads} KV heads", fontsize=7.5)
        axis.set_xticks(range(len(GPUS)), map(str, GPUS))
        axis.set_yticks(range(len(SEQLENS)), SEQLENS)
        axis.set(xlabel="GPUs", ylabel="seqlen, tokens")
        axis.label_outer()
        axis.grid(visible=False)
    legend = [Patch(color=colour[method], label=labelled(method, "simulated")) for method in used]
    canvas.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return Figure(f"choosing-{name}", title, canvas, sources(numbers), note)


def _fastest(bests: Bests, name: str, title: str) -> Figure:
    entries: dict[Key, Entry] = {}
    for key, one in bests.items():
        margin = "" if one is None or one.second is None else "~" if one.tied else f"+{one.margin.known:.0%}"
        entries[key] = (one.record.method, margin) if one else None
    numbers = [number for one in bests.values() if one for number in (one.step, one.margin)]
    note = "The number is how much longer the second takes; ~: less than the model can tell."
    return _figure(entries, numbers, name, title, note)


def _leanest(found: Grid, methods: Sequence[str], bests: Bests, name: str) -> list[Figure | Text]:
    """The method with the least memory among those that tie with the fastest."""
    lean = {key: record for key in KEYS if (record := leanest(found, key, methods))}
    memory = {key: of_record(record, "peak_mem_bytes_max").times(1e-9) for key, record in lean.items()}
    entries = {key: (lean[key].method, f"{memory[key].known:.2g} GB") if key in lean else None for key in KEYS}
    chosen = Counter(record.method for record in lean.values())
    saved = [
        derived(lambda a, b: 1 - a / b, memory[key], of_record(one.record, "peak_mem_bytes_max").times(1e-9))
        for key, one in bests.items()
        if one and key in memory
    ]
    title = "The method with the least memory among the fastest"
    note = "The number is the peak memory of the attention, computed from the plans."
    return [
        _figure(entries, list(memory.values()), f"{name}-leanest", title, note),
        text(
            "Where several methods are equally fast, memory may decide. Number of cells in which a method has the least"
            " memory of those within {tie:.0%} of the fastest: "
            + ", ".join(f"{method} {{{method}:.0f}}" for method in chosen)
            + ". It saves up to {high:.0%} of the memory of the fastest.",
            tie=TIE,
            high=most(saved),
            **{method: tally(count, saved) for method, count in chosen.items()},
        ),
    ]
