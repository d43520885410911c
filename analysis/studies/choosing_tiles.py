"""Which tile: what it costs to take the one that sends least, and what memory a faster one takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from sp_bench.analysis.figure import Figure, colours, labelled, markers, new_figure, sources
from sp_bench.analysis.number import Number, derived, formula, of_record, record_source
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing_grid import (
    CLUSTERS,
    GPUS,
    KV_HEADS,
    METHODS,
    SEQLENS,
    Grid,
    Key,
    grid,
    payload_over_bound,
    setting,
    tally,
)
from sp_bench.analysis.table import Cell, Column, Table
from sp_bench.records import Record

TILED_GPUS = (64, 256)
MEMORY_KEYS: tuple[Key, ...] = (("h100_ndr400", 32, "512k", 64), ("h100_ndr400", 32, "2M", 256))
VOLUME_AT = "h100_ndr400", "512k"
HALF = formula("choosing-half", "sqrt(k n) / sqrt(k n / 2)", "sp_bench.account.lower_bound_bytes, causal over full")


def tiles(runs: Runs) -> Section:
    """Mesh's tile with the shortest time, against the one that sends least."""
    found = grid(runs)
    lines: list[list[Cell]] = []
    costs: list[Number] = []
    same = 0
    for cluster in CLUSTERS:
        for kv_heads in KV_HEADS:
            for gpus in TILED_GPUS:
                for seqlen in SEQLENS:
                    record = found[(cluster, kv_heads, seqlen, gpus), "mesh"]
                    least = _least_volume_tile(record)
                    time, word = _time_of(record, least)
                    cost = time.over(of_record(record, "step_ms_median"))
                    same += least["tile_a"] == record.tile_a
                    costs += [cost] if word == "simulated" else []
                    lines.append([cluster, kv_heads, gpus, seqlen, record.variant or "-", str(least["variant"])])
                    lines[-1] += [of_record(record, "step_ms_median"), time, word, cost]
    columns = [Column(name) for name in ("cluster", "key heads", "GPUs", "seqlen", "fastest tile", "sends least")]
    columns += [Column("step", "ms"), Column("with the tile that sends least", "ms"), Column("that time is")]
    columns += [Column("ratio", "", ".2f")]
    return Section(
        "Which tile of Mesh",
        [
            text(
                "The tile that sends least is known without a simulation: of 6 (a - 1) + 6 k (b - 1) chunks, the least"
                " over a * b = n, near a = sqrt(k n). The fastest tile may be another one, as links inside a node are"
                " faster than those between nodes and transfers hide behind blocks. A time that is a bound stands for"
                " a tile that was not simulated, because it can't be faster."
            ),
            _tiles_figure(found),
            text(
                "The two are the same tile in {same:.0f} of {all:.0f} points. Where both were simulated, the tile that"
                " sends least takes up to {high:.2f} times as long.",
                same=tally(same, costs, "points with one tile"),
                all=tally(len(lines), costs, "points with tiles"),
                high=derived(lambda *values: max(values), *costs),
            ),
            Table("choosing-tiles", "The fastest tile and the one that sends least", columns, lines, shown_rows=12),
        ],
    )


def _least_volume_tile(record: Record) -> dict[str, Any]:
    """The candidate that sends least, by the closed form of the Mesh paper's table 2 and our backward."""
    k = record.kv_heads / record.heads
    return min(record.candidates or (), key=lambda one: (one["tile_a"] - 1) + k * (one["tile_b"] - 1))


def _time_of(record: Record, candidate: dict[str, Any]) -> tuple[Number, str]:
    """A candidate's time, and whether it is simulated or a bound."""
    known = candidate["step_ms"] is not None
    value = candidate["step_ms"] if known else candidate["bound_ms"]
    return Number(value, "simulated", (record_source(record),)), "simulated" if known else "a bound"


def _tiles_figure(found: Grid) -> Figure:
    canvas, axes = new_figure(len(CLUSTERS), height=2.9, sharey=True)
    tones, gpus, kv_heads = colours(SEQLENS), TILED_GPUS[-1], KV_HEADS[0]
    used: list[Number] = []
    for axis, cluster in zip(axes[0], CLUSTERS, strict=True):
        for marker, seqlen in zip("osD", SEQLENS, strict=False):
            record = found[(cluster, kv_heads, seqlen, gpus), "mesh"]
            ordered = sorted(record.candidates or (), key=lambda one: one["tile_a"])
            times = [_time_of(record, one) for one in ordered]
            ratios = [time.over(of_record(record, "step_ms_median")) for time, _ in times]
            used += ratios
            shape = [one["tile_a"] for one in ordered]
            style = {"color": tones[seqlen], "marker": marker, "markersize": 4.5}
            axis.plot(shape, [ratio.known for ratio in ratios], linewidth=0.8, markerfacecolor="white", **style)
            simulated = [
                (a, r.known) for a, r, (_, word) in zip(shape, ratios, times, strict=True) if word != "a bound"
            ]
            axis.plot(*zip(*simulated, strict=True), linestyle="none", label=f"{seqlen} tokens", **style)
        axis.axvline(math.sqrt(gpus * kv_heads / 32), color="black", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axis.set_yticks([], minor=True)
        shown = [1, 4, 16, 64, 256]
        axis.set(title=cluster, xlabel="rows a of the tile", xticks=shown)
        axis.set_xticklabels(map(str, shown))
    axes[0, 0].set_ylabel("step / that of the fastest tile\n(simulated)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3)
    return Figure(
        "choosing-tiles",
        f"Tiles of Mesh on {gpus} GPUs",
        canvas,
        sources(used),
        "Filled: simulated. Hollow: a bound, the tile can't be faster than that. Dotted: the tile that sends least.",
    )


def volume(runs: Runs) -> Section:
    """Payload over the lower bound, by method and n."""
    found, (cluster, seqlen) = grid(runs), VOLUME_AT
    canvas, axes = new_figure(len(KV_HEADS), height=3.4, sharey=True)
    colour, marker = colours(METHODS), markers(METHODS)
    lines: list[list[Cell]] = []
    ratios: dict[tuple[str, int, int], Number] = {}
    for axis, kv_heads in zip(axes[0], KV_HEADS, strict=True):
        for method in METHODS:
            records = [found[(cluster, kv_heads, seqlen, gpus), method] for gpus in GPUS]
            numbers = [payload_over_bound(record) for record in records]
            ratios |= {(method, kv_heads, gpus): number for gpus, number in zip(GPUS, numbers, strict=True)}
            lines.append([method, kv_heads, *numbers])
            there = [(gpus, number.known) for gpus, number in zip(GPUS, numbers, strict=True) if number.value]
            style = {"color": colour[method], "marker": marker[method], "markersize": 5, "linewidth": 0.8}
            axis.plot(*zip(*there, strict=True), label=labelled(method, "computed"), **style)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set(title=f"{kv_heads} key heads", xlabel="GPUs", xticks=GPUS)
        axis.set_xticklabels(map(str, GPUS))
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel("sent / lower bound")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    known = [number for number in ratios.values() if number.value]
    mesh = [number for (method, *_), number in ratios.items() if method == "mesh" and number.value]
    worst = max((key for key in ratios if ratios[key].value), key=lambda key: ratios[key].known)
    return Section(
        "Volume against the lower bound",
        [
            text(
                "Computed: payload that a GPU sends forward and backward, over the least that a method can send which"
                " splits the heads as this one does (account.lower_bound_bytes; for a causal mask it counts the"
                f" unmasked half alone, so that a method which sends what a full mask needs is some {{causal:.2f}}"
                f" times above it at best). Of {cluster}, {seqlen} tokens; each method with its fastest variant, which"
                " need not be the one that sends least.",
                causal=Number(math.sqrt(2), "computed", (HALF,)),
            ),
            Figure("choosing-volume", "Sent over the lower bound", canvas, sources(known)),
            text(
                f"Furthest above its bound is {worst[0]} on {{gpus:.0f}} GPUs with {{kv:.0f}} key heads: {{high:.3g}}"
                f" times. Mesh stays between {{low:.3g}} and {{mesh:.3g}} times.",
                gpus=setting(worst[2], "gpus"),
                kv=setting(worst[1], "key heads"),
                high=ratios[worst],
                low=derived(lambda *values: min(values), *mesh),
                mesh=derived(lambda *values: max(values), *mesh),
            ),
            Table(
                "choosing-volume",
                "Payload over the lower bound",
                [Column("method"), Column("key heads"), *(Column(f"{gpus} GPUs", "", ".3g") for gpus in GPUS)],
                lines,
                "A dash: the point can't be served, for the reason listed above.",
            ),
        ],
    )


def memory(runs: Runs) -> Section:
    """Time against memory, of every variant that was simulated."""
    found = grid(runs)
    canvas, axes = new_figure(len(MEMORY_KEYS), height=3.5)
    lines: list[list[Cell]] = []
    used: list[Number] = []
    parts: list[Text] = []
    for axis, key in zip(axes[0], MEMORY_KEYS, strict=True):
        variants = [variant for method in METHODS for variant in _variants(found[key, method])]
        front = pareto(variants)
        used += [number for _, _, *numbers in variants for number in numbers]
        lines += [[f"{key[2]} on {key[3]} GPUs", method, variant, gb, ms] for method, variant, gb, ms in front]
        _scatter(axis, key, variants, front)
        (*_, fast_gb, fast_ms), (*_, lean_gb, lean_ms) = front[-1], front[0]
        parts.append(
            text(
                f"{key[2]} tokens on {{gpus:.0f}} GPUs: {{front:.0f}} of {{all:.0f}} variants are on the front. The"
                f" fastest takes {{times:.3g}} times the memory of the leanest and {{share:.2f}} of its time.",
                gpus=setting(key[3], "gpus"),
                front=tally(len(front), [fast_ms], "variants on the front"),
                all=tally(len(variants), [fast_ms], "variants simulated"),
                times=fast_gb.over(lean_gb),
                share=fast_ms.over(lean_ms),
            )
        )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    columns = [
        Column("point"),
        Column("method"),
        Column("variant"),
        Column("memory", "GB", ".3g"),
        Column("step", "ms"),
    ]
    return Section(
        "Memory against speed",
        [
            text(
                "A point is a variant of a method: its peak memory for the attention, computed from the plans, and its"
                " step, simulated. On the line are those that no other beats in both. Variants that were not simulated,"
                " because a bound on their time was above their method's best, are not shown."
            ),
            Figure("choosing-memory", f"Step against peak memory, {MEMORY_KEYS[0][0]}", canvas, sources(used)),
            *parts,
            Table("choosing-memory", "Variants that no other beats in time and memory", columns, lines),
        ],
    )


Variant = tuple[str, str, Number, Number]
"""Method, variant, GB, ms."""


def _variants(record: Record) -> list[Variant]:
    """Those of a method with a simulated time."""
    if record.status != "ok":
        return []
    if not record.candidates:
        gb, ms = of_record(record, "peak_mem_bytes_max").times(1e-9), of_record(record, "step_ms_median")
        return [(record.method, record.variant or "", gb, ms)]
    source = (record_source(record),)
    return [
        (
            record.method,
            str(one["variant"]),
            Number(one["peak_mem_bytes"] * 1e-9, "computed", source),
            Number(one["step_ms"], "simulated", source),
        )
        for one in record.candidates
        if one["step_ms"] is not None
    ]


def pareto(variants: Sequence[Variant]) -> list[Variant]:
    """Those that no other beats in both memory and time, the leanest first."""
    front: list[Variant] = []
    for variant in sorted(variants, key=lambda one: (one[2].known, one[3].known)):
        if not front or variant[3].known < front[-1][3].known:
            front.append(variant)
    return front


def _scatter(axis: Axes, key: Key, variants: Sequence[Variant], front: Sequence[Variant]) -> None:
    colour, marker = colours(METHODS), markers(METHODS)
    for method in METHODS:
        if not (at := [(gb.known, ms.known) for name, _, gb, ms in variants if name == method]):
            continue
        x, y = zip(*at, strict=True)
        style = {"color": colour[method], "marker": marker[method], "s": 28, "edgecolor": "black", "linewidth": 0.4}
        axis.scatter(x, y, label=labelled(method, "simulated"), zorder=3, **style)
    axis.plot([one[2].known for one in front], [one[3].known for one in front], color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set(title=f"{key[2]} tokens on {key[3]} GPUs", xlabel="peak memory of the attention, GB", ylabel="step, ms")
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        which.set_minor_locator(NullLocator())
        which.set_major_formatter("{x:g}")
