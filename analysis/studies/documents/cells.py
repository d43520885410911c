"""Which method and dealing is the fastest on a pack: maps at one number of GPUs, and the winners at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm

from sp_bench.analysis.figure import STYLE, Figure, new_figure, sources
from sp_bench.analysis.number import Number, count, least, most, of_record, tally
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.documents.places import (
    CLOSE,
    CLUSTER,
    DATA,
    DEALINGS,
    DEALT_GPUS,
    GPUS,
    METHODS,
    SPLIT_HEADS,
    TOKENS,
    Dealt,
    Fastest,
    Winner,
    dealt,
    fastest,
    winner,
)
from sp_bench.analysis.table import Cell, Table, columns

Key = tuple[str, str, str]
Steps = dict[Key, Number]
"""Times in ms by data, method and dealing; without value where a point can't be served."""


def points(runs: Runs) -> Section:
    """The packs: how many documents, and how long."""
    found = fastest(runs)
    lines: list[list[Cell]] = []
    for data in DATA:
        for gpus in GPUS:
            record = next(found[data, gpus, method] for method in METHODS)
            tokens = of_record(record, "seqlen")
            documents, longest = of_record(record, "documents"), of_record(record, "longest_document")
            lines.append([data, gpus, tokens, documents, longest, longest.over(tokens).times(100)])
    heads = columns(
        "lengths; GPUs; tokens || ,.0f; documents || ,.0f; longest document | tokens | ,.0f;"
        " longest document | % of the pack | .1f"
    )
    return Section(
        "The packs",
        text(
            "Documents of different lengths are packed into one sequence of {tokens}k tokens for each GPU, and a query"
            " sees the keys of its own document up to its own position. Lengths are drawn from the distributions in"
            " conf/data. All times are simulated on cluster={cluster}, forward and backward, 64 query heads and 8 KV"
            " heads of 128 in bfloat16. A block of several documents is simulated as one kernel call, at the rate of"
            " its mean piece. Pieces shorter than the kernel's published figures are simulated too fast; a record's"
            " notes say how much of its work they are. A method takes its variant with the shortest simulated time"
            " (tile, team, degree of head splitting); TokenRing runs its hybrid, one ring in each node.",
            tokens=TOKENS,
            cluster=CLUSTER,
        ),
        Table("documents-packs", "The packs", heads, lines),
    )


def maps(runs: Runs) -> Section:
    """Each method's step on each dealing over the fastest of all, by distribution of lengths."""
    found = dealt(runs)
    steps: Steps = {key: of_record(record, "step_ms_median") for key, record in found.items()}
    ratios: Steps = {}
    for data in DATA:
        here = {key: number for key, number in steps.items() if key[0] == data}
        best = least(number for number in here.values() if number.value is not None)
        ratios |= {key: number.over(best) for key, number in here.items()}
    return Section(
        f"Methods and dealings, {DEALT_GPUS} GPUs",
        text(
            "A cell is the simulated step over the fastest of the panel. Ulysses has one layout, as each GPU computes"
            " whole sequences of its heads. Simulated gaps of up to {close:.0%} are too close to call.",
            close=CLOSE,
        ),
        _map(found, ratios),
        *(_about_map(data, ratios) for data in DATA),
        _steps_table(found, steps, ratios),
    )


def _map(found: Dealt, ratios: Steps) -> Figure:
    canvas, axes = new_figure(2, -(-len(DATA) // 2), width=7.2, height=5.8, sharex=True, sharey=True)
    with mpl.rc_context(STYLE):
        for axis in axes.flat[len(DATA) :]:
            axis.set_visible(False)
        for axis, data in zip(axes.flat, DATA, strict=False):
            values = np.full((len(METHODS), len(DEALINGS)), np.nan)
            for row, method in enumerate(METHODS):
                for column, dealing in enumerate(DEALINGS):
                    key = data, method, dealing
                    if key not in ratios:
                        continue
                    ratio = ratios[key].value
                    values[row, column] = np.nan if ratio is None else ratio
                    shown = found[key].status if ratio is None else f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"
                    dark = ratio is not None and ratio > 3
                    axis.text(column, row, shown, ha="center", va="center", fontsize=6, color="w" if dark else "k")
            axis.imshow(values, cmap="viridis_r", norm=LogNorm(1, 10), aspect="auto")
            axis.set_title(data, fontsize=8)
            axis.set_xticks(range(len(DEALINGS)), DEALINGS, rotation=40, ha="right", fontsize=7)
            axis.set_yticks(range(len(METHODS)), METHODS, fontsize=7)
            axis.grid(visible=False)
    numbers = [number for number in ratios.values() if number.value is not None]
    note = "Step over the fastest of the panel, simulated; 1.00 is the fastest."
    return Figure("documents-map", "Steps by method and dealing", canvas, sources(numbers), note)


def _about_map(data: str, ratios: Steps) -> Text:
    """The fastest cell, how many are as fast, and what a method loses on its worst dealing."""
    here = {key[1:]: number for key, number in ratios.items() if key[0] == data and number.value is not None}
    method, dealing = min(here, key=lambda cell: here[cell].known)
    best_of = {dealing: least(n for (_, d), n in here.items() if d == dealing) for _, dealing in here}
    lost: dict[str, Number] = {}
    for name in dict.fromkeys(name for name, _ in here):
        row = [number for (other, _), number in here.items() if other == name]
        if len(row) > 1:
            lost[name] = most(row).over(least(row))
    costly = max(lost, key=lambda name: lost[name].known)
    return text(
        "{data}: {method} on {dealing} is the fastest; {close:.0f} of {cells:.0f} cells are within {tie:.0%} of it,"
        " itself among them. The fastest method of each dealing, over it: "
        + ", ".join(f"{name} {{of_{name}:.2f}}" for name in best_of)
        + ". The dealing matters most to {costly}, whose slowest takes {lost:.1f} times as long as its fastest.",
        data=data,
        method=method,
        dealing=dealing,
        close=count(here.values(), lambda ratio: ratio < 1 + CLOSE),
        cells=count(here.values()),
        tie=CLOSE,
        costly=costly,
        lost=lost[costly],
        **{f"of_{name}": ratio for name, ratio in best_of.items()},
    )


def _steps_table(found: Dealt, steps: Steps, ratios: Steps) -> Table:
    lines: list[list[Cell]] = [
        [*key, record.variant or "", record.status, steps[key], ratios[key], of_record(record, "mfu").times(100)]
        for key, record in found.items()
    ]
    heads = columns("lengths; method; dealing; variant; status; step | ms; step / fastest step || .3f; MFU | % | .1f")
    return Table("documents-steps", "Steps by method and dealing", heads, lines, shown_rows=12)


def winners(runs: Runs) -> Section:
    """The fastest method and dealing on each pack, of all methods and of those that don't split heads."""
    found = fastest(runs)
    whole = tuple(method for method in METHODS if method not in SPLIT_HEADS)
    of_all, of_whole = _winners(found, METHODS), _winners(found, whole)
    return Section(
        "Which method and dealing",
        text(
            "The fastest method of each pack with its variant and dealing, and the other methods within {close:.0%} of"
            " it. A simulated gap of a few per cent is too close to call; only a measurement could tell them apart.",
            close=CLOSE,
        ),
        _about_winners(of_all, "Of all methods"),
        _winners_table(of_all, "documents-winners", "The fastest method and dealing, of all methods"),
        _about_winners(of_whole, "Where heads can't be split, as tensor parallelism has split them"),
        _winners_table(of_whole, "documents-winners-whole-heads", "The fastest that doesn't split heads"),
    )


def _winners(found: Fastest, methods: Sequence[str]) -> dict[tuple[str, int], Winner]:
    return {(data, gpus): winner(found, data, gpus, methods) for data in DATA for gpus in GPUS}


def _about_winners(found: dict[tuple[str, int], Winner], which: str) -> Text:
    steps = [one.step for one in found.values()]
    methods = Counter(one.record.method for one in found.values())
    layouts = Counter(one.record.layout or "" for one in found.values())
    data, gpus = max(found, key=lambda key: found[key].margin.value or 0.0)
    return text(
        which
        + ", the number of packs on which each is the fastest: "
        + ", ".join(f"{name} {{method_{name}:.0f}}" for name in methods)
        + ". By dealing: "
        + ", ".join(f"{name} {{layout_{name}:.0f}}" for name in layouts)
        + ". On {clear:.0f} of {packs:.0f} packs no other method is within {close:.0%}. The largest gap to the second"
        " is {high:.0%} ({data}, {gpus} GPUs).",
        clear=tally(sum(not one.close for one in found.values()), steps),
        packs=count(steps),
        close=CLOSE,
        high=found[data, gpus].margin,
        data=data,
        gpus=gpus,
        **{f"method_{name}": tally(number, steps) for name, number in methods.items()},
        **{f"layout_{name}": tally(number, steps) for name, number in layouts.items()},
    )


def _winners_table(found: dict[tuple[str, int], Winner], name: str, title: str) -> Table:
    lines: list[list[Cell]] = []
    for (data, gpus), one in found.items():
        lines.append([data, gpus, one.record.method, one.record.variant or "", one.record.layout or "", one.step])
        second = f"{one.others[0].method}, {one.others[0].layout}" if one.others else "none"
        lines[-1] += [of_record(one.record, "mfu").times(100), second, one.margin.times(100)]
        lines[-1].append(", ".join(f"{record.method} ({record.layout})" for record in one.close) or "none")
    heads = columns(
        "lengths; GPUs; fastest; variant; dealing; step | ms; MFU | % | .1f; second;"
        " step of the second is longer by | % | .1f;"
        f" too close to call (< {CLOSE:.0%})"
    )
    return Table(name, title, heads, lines)
