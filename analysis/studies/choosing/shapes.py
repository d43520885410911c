"""Which tile: the cost of the tile that sends least, volumes against their bound, and memory against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from sp_bench.analysis.figure import VOLUME_BOUNDS, Figure, Panels, colours, labelled, log2_ticks, styles
from sp_bench.analysis.number import (
    Number,
    computed,
    count,
    derived,
    formula,
    least,
    most,
    of_record,
    record_source,
    tally,
)
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing.places import (
    CLUSTERS,
    GPUS,
    KV_HEADS,
    METHODS,
    SEQLENS,
    Grid,
    Key,
    grid,
    payload_over_bound,
)
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

TILED_GPUS = (64, 256)
MEMORY_KEYS: tuple[Key, ...] = (("h100_ndr400", 32, "512k", 64), ("h100_ndr400", 32, "2M", 256))
VOLUME_AT = "h100_ndr400", "512k"
HALF = formula("choosing-half", "sqrt(k n) / sqrt(k n / 2)", "sp_bench.account.lower_bound_bytes, causal over full")


def tiles(runs: Runs) -> Section:
    """Mesh's fastest tile against the tile that sends least."""
    found = grid(runs)
    lines: list[list[Cell]] = []
    costs: list[Number] = []
    same = 0
    for cluster, kv_heads, gpus, seqlen in product(CLUSTERS, KV_HEADS, TILED_GPUS, SEQLENS):
        record = found[(cluster, kv_heads, seqlen, gpus), "mesh"]
        smallest = _least_volume_tile(record)
        time, word = _time_of(record, smallest)
        cost = time.over(of_record(record, "step_ms_median"))
        same += smallest["tile_a"] == record.tile_a
        costs += [cost] if word == "simulated" else []
        lines.append([cluster, kv_heads, gpus, seqlen, record.variant or "-", str(smallest["variant"])])
        lines[-1] += [of_record(record, "step_ms_median"), time, word, cost]
    heads = columns(
        "cluster; KV heads; GPUs; seqlen; fastest tile; tile that sends least; step with the fastest tile | ms;"
        " step with the tile that sends least | ms; how that step is known; ratio of the steps || .2f"
    )
    return Section(
        "Which tile of Mesh",
        text(
            "The tile that sends least is known without a simulation. It has the least 6 (a - 1) + 6 k (b - 1) chunks"
            " with a * b = n, near a = sqrt(k n). The fastest tile may be another one: links inside a node are faster"
            " than those between nodes, and transfers hide behind blocks. A time that is a bound stands for a tile that"
            " was not simulated, because it can't be faster."
        ),
        _tiles_figure(found),
        text(
            "The two are the same tile in {same:.0f} of {all:.0f} points. Where both were simulated, the tile that"
            " sends least takes up to {high:.2f} times as long.",
            same=tally(same, costs),
            all=tally(len(lines), costs),
            high=most(costs),
        ),
        Table("choosing-tiles", "The fastest tile and the one that sends least", heads, lines, shown_rows=12),
    )


def _least_volume_tile(record: Record) -> dict[str, Any]:
    """The candidate tile that sends least, by the closed form of the Mesh paper's table 2 and our backward."""
    k = record.kv_heads / record.heads
    return min(record.candidates or (), key=lambda one: (one["tile_a"] - 1) + k * (one["tile_b"] - 1))


def _time_of(record: Record, candidate: dict[str, Any]) -> tuple[Number, str]:
    """A candidate's time in ms, and whether it is simulated or a bound."""
    known = candidate["step_ms"] is not None
    value = candidate["step_ms"] if known else candidate["bound_ms"]
    return Number(value, "simulated", (record_source(record),)), "simulated" if known else "a bound"


def _tiles_figure(found: Grid) -> Figure:
    panels = Panels(len(CLUSTERS), height=2.9, sharey=True)
    tones, gpus, kv_heads = colours(SEQLENS), TILED_GPUS[-1], KV_HEADS[0]
    for axis, cluster in zip(panels.axes[0], CLUSTERS, strict=True):
        for marker, seqlen in zip("osD", SEQLENS, strict=False):
            record = found[(cluster, kv_heads, seqlen, gpus), "mesh"]
            times = {one["tile_a"]: _time_of(record, one) for one in record.candidates or ()}
            step = of_record(record, "step_ms_median")
            ratios = {a: times[a][0].over(step) for a in sorted(times)}
            simulated = {a: ratio for a, ratio in ratios.items() if times[a][1] == "simulated"}
            style = {"color": tones[seqlen], "marker": marker, "markersize": 4.5, "axis": axis}
            panels.line(ratios, markerfacecolor="white", linewidth=0.8, **style)
            panels.line(simulated, f"{seqlen} tokens", linestyle="none", **style)
        axis.axvline(math.sqrt(gpus * kv_heads / 32), color="black", linestyle=":", linewidth=1)
        axis.set_yscale("log")
        axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axis.set_yticks([], minor=True)
        log2_ticks(axis, [1, 4, 16, 64, 256])
        axis.set(title=cluster, xlabel="rows a of the tile")
    panels.first.set_ylabel("step / that of the fastest tile")
    panels.legend_below(3)
    note = "Filled: simulated. Hollow: a bound, the tile can't be faster than that. Dotted: the tile that sends least."
    return panels.figure("choosing-tiles", f"Tiles of Mesh on {gpus} GPUs", note)


def volume(runs: Runs) -> Section:
    """Payload over the lower bound, by method and number of GPUs."""
    found, (cluster, seqlen) = grid(runs), VOLUME_AT
    places = list(product(METHODS, KV_HEADS, GPUS))
    ratios = {(m, kv, n): payload_over_bound(found[(cluster, kv, seqlen, n), m]) for m, kv, n in places}
    over_least = {
        (m, kv, n): payload_over_bound(found[(cluster, kv, seqlen, n), m], "comm_bytes_least") for m, kv, n in places
    }
    known = {place: number for place, number in ratios.items() if number.value}
    mesh = [number for (method, *_), number in known.items() if method == "mesh"]
    method, kv_heads, gpus = worst = max(known, key=lambda place: known[place].known)
    heads = columns("; ".join(["method; KV heads", *(f"{gpus} GPUs || .3g" for gpus in GPUS)]))
    note = "A dash: the point can't be served, for the reason listed above."
    return Section(
        "Volume against the lower bound",
        text(
            "Computed: the payload that a GPU sends forward and backward, over the fewest bytes that any method with"
            " the same head split can send (account.lower_bound_bytes), and over the fewest that any method can send,"
            " however it splits heads (account.least_bytes). For a causal mask a bound counts only the"
            " unmasked half, so a method that sends as much as for a full mask is at best {causal:.2f} times above it."
            " On {cluster}, with {seqlen} tokens. Each method has its fastest variant, which need not be the one that"
            " sends least.",
            causal=computed(math.sqrt(2), HALF),
            cluster=cluster,
            seqlen=seqlen,
        ),
        _volume_figure(found),
        text(
            "{method} on {gpus} GPUs with {kv_heads} KV heads is farthest above its bound: {high:.3g} times. Mesh is"
            " between {low:.3g} and {mesh:.3g} times.",
            method=method,
            gpus=gpus,
            kv_heads=kv_heads,
            high=known[worst],
            low=least(mesh),
            mesh=most(mesh),
        ),
        Table("choosing-volume", "Payload over the least with the same split of heads", heads, _lines(ratios), note),
        Table("choosing-volume-least", "Payload over the least with any split", heads, _lines(over_least), note),
    )


def _lines(ratios: Mapping[tuple[str, int, int], Number]) -> list[list[Cell]]:
    return [
        [method, kv_heads, *(ratios[method, kv_heads, gpus] for gpus in GPUS)]
        for kv_heads, method in product(KV_HEADS, METHODS)
    ]


def _volume_figure(found: Grid) -> Figure:
    """What each method sends, between the bounds of methods that leave heads whole and of all methods."""
    panels, (cluster, seqlen) = Panels(len(KV_HEADS), height=3.8, sharey=True), VOLUME_AT
    for axis, kv_heads in zip(panels.axes[0], KV_HEADS, strict=True):
        records = {(m, n): found[(cluster, kv_heads, seqlen, n), m] for m, n in product(METHODS, GPUS)}
        for method, style in styles(METHODS).items():
            points = {
                n: _payload(record) for (m, n), record in records.items() if m == method and record.status == "ok"
            }
            panels.line(points, method, axis=axis, markersize=5, linewidth=0.8, **style)
        for field, (name, dashes) in VOLUME_BOUNDS.items():
            points = {n: of_record(record, field).times(1e-9) for (m, n), record in records.items() if m == "mesh"}
            panels.line(points, name, axis=axis, color="black", linestyle=dashes, linewidth=1.4)
        axis.set_yscale("log")
        axis.set(title=f"{kv_heads} KV heads", xlabel="GPUs")
        log2_ticks(axis, GPUS)
        axis.yaxis.set_major_formatter("{x:g}")
    panels.first.set_ylabel("payload sent by a GPU, GB")
    panels.legend_below(3, fontsize=8)
    note = "Below the dashed line are only methods that split heads, below the dotted one is none."
    return panels.figure("choosing-volume", f"Sent, and the least that can be sent, {seqlen} tokens", note)


def _payload(record: Record) -> Number:
    sent, lse = of_record(record, "comm_bytes_per_gpu"), of_record(record, "comm_bytes_statistics")
    return derived(lambda a, b: (a - b) / 1e9, sent, lse)


def memory(runs: Runs) -> Section:
    """Time against memory of every simulated variant."""
    found = grid(runs)
    panels = Panels(len(MEMORY_KEYS), height=3.5)
    lines: list[list[Cell]] = []
    parts: list[Text] = []
    for axis, key in zip(panels.axes[0], MEMORY_KEYS, strict=True):
        variants = [variant for method in METHODS for variant in _variants(found[key, method])]
        front = pareto(variants)
        panels.numbers += [number for _, _, *numbers in variants for number in numbers]
        lines += [[f"{key[2]} on {key[3]} GPUs", *variant] for variant in front]
        _scatter(axis, key, variants, front)
        (*_, fast_gb, fast_ms), (*_, lean_gb, lean_ms) = front[-1], front[0]
        parts.append(
            text(
                "{seqlen} tokens on {gpus} GPUs: {front:.0f} of {all:.0f} variants are on the front. The fastest takes"
                " {times:.3g} times the memory of the leanest and {share:.2f} of its time.",
                seqlen=key[2],
                gpus=key[3],
                front=count(ms for *_, ms in front),
                all=count(ms for *_, ms in variants),
                times=fast_gb.over(lean_gb),
                share=fast_ms.over(lean_ms),
            )
        )
    panels.legend_below(3, fontsize=8)
    heads = columns("point; method; variant; peak memory | GB | .3g; step | ms")
    return Section(
        "Memory against speed",
        text(
            "A point is a variant of a method: its peak memory for the attention, computed from the plans, and its"
            " step, simulated. The line joins the front: variants that no other beats in both. Variants whose bound was"
            " above their method's best time were not simulated and are not shown."
        ),
        panels.figure("choosing-memory", f"Step against peak memory, {MEMORY_KEYS[0][0]}"),
        *parts,
        Table("choosing-memory", "Variants that no other beats in time and memory", heads, lines),
    )


Variant = tuple[str, str, Number, Number]
"""Method, variant, peak memory in GB, step in ms."""


def _variants(record: Record) -> list[Variant]:
    """The variants of a method that have a simulated time."""
    if record.status != "ok":
        return []
    if not record.candidates:
        gb, ms = of_record(record, "peak_mem_bytes_max").times(1e-9), of_record(record, "step_ms_median")
        return [(record.method, record.variant or "", gb, ms)]
    source = (record_source(record),)
    timed = [one for one in record.candidates if one["step_ms"] is not None]
    memory = [computed(one["peak_mem_bytes"] * 1e-9, *source) for one in timed]
    times = [Number(one["step_ms"], "simulated", source) for one in timed]
    return [(record.method, str(one["variant"]), gb, ms) for one, gb, ms in zip(timed, memory, times, strict=True)]


def pareto(variants: Sequence[Variant]) -> list[Variant]:
    """The variants that no other beats in both memory and time, the leanest first."""
    front: list[Variant] = []
    for variant in sorted(variants, key=lambda one: (one[2].known, one[3].known)):
        if not front or variant[3].known < front[-1][3].known:
            front.append(variant)
    return front


def _scatter(axis: Axes, key: Key, variants: Sequence[Variant], front: Sequence[Variant]) -> None:
    for method, style in styles(METHODS).items():
        if not (at := [(gb.known, ms.known) for name, _, gb, ms in variants if name == method]):
            continue
        x, y = zip(*at, strict=True)
        edge = {"s": 28, "edgecolor": "black", "linewidth": 0.4, "zorder": 3}
        axis.scatter(x, y, label=labelled(method, "simulated"), **style, **edge)
    axis.plot([one[2].known for one in front], [one[3].known for one in front], color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set(title=f"{key[2]} tokens on {key[3]} GPUs", xlabel="peak memory of the attention, GB", ylabel="step, ms")
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        which.set_minor_locator(NullLocator())
        which.set_major_formatter("{x:g}")
