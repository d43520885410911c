"""The choice of a tile: the cost of the one that sends least, volumes against bounds, and memory against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from sp_bench.analysis import number
from sp_bench.analysis.figure import VOLUME_BOUNDS, Figure, Panels, colours, labelled, log2_ticks, styles
from sp_bench.analysis.ranking import payload, payload_over_bound
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, section, source, words
from sp_bench.analysis.studies.choosing import places
from sp_bench.analysis.studies.choosing.places import Grid, Key
from sp_bench.analysis.table import Cell
from sp_bench.methods.mesh import tiles as all_tiles
from sp_bench.records import Record

VOLUME_AT = "h100_ndr400", "512k"
HALF = source("choosing.half")
Variant = tuple[str, str, number.Number, number.Number]
"""Method, variant, peak memory in GB, step in ms."""


def tiles(runs: Runs) -> Section:
    """Mesh's fastest tile against the tile that sends least."""
    records = places.grid(runs)
    rows: list[list[Cell]] = []
    costs: list[number.Number] = []
    same = 0
    for cluster, kv_heads, gpus, seqlen in product(places.CLUSTERS, places.KV_HEADS, places.TILED_GPUS, places.SEQLENS):
        record = records[(cluster, kv_heads, seqlen, gpus), "mesh"]
        smallest = _least_volume_tile(record)
        time, word = _time_of(record, smallest)
        cost = time.over(number.step_ms(record))
        same += smallest["tile_a"] == record.tile_a
        costs += [cost] if word == "simulated" else []
        variants = [record.variant or "-", str(smallest["variant"])]
        rows.append([cluster, kv_heads, gpus, seqlen, *variants, number.step_ms(record), time, word, cost])
    counts = {"same": number.tally(same, costs), "all": number.tally(len(rows), costs), "high": number.most(costs)}
    return section("choosing.tiles", figure=_tiles_figure(records), **counts, rows=rows)


def _least_volume_tile(record: Record) -> dict[str, Any]:
    """The candidate tile that sends least, by the closed form of the Mesh paper's table 2 and our backward."""
    k = record.kv_heads / record.heads
    return min(record.candidates or (), key=lambda one: (one["tile_a"] - 1) + k * (one["tile_b"] - 1))


def _time_of(record: Record, candidate: dict[str, Any]) -> tuple[number.Number, str]:
    """A candidate's time in ms, and whether it is simulated or a bound."""
    known = candidate["step_ms"] is not None
    value = candidate["step_ms"] if known else candidate["bound_ms"]
    return number.Number(value, "simulated", (number.record_source(record),)), "simulated" if known else "a bound"


def _tiles_figure(found: Grid) -> Figure:
    panels = Panels(len(places.CLUSTERS), height=2.9, sharey=True)
    tones, gpus, kv_heads = colours(places.SEQLENS), places.TILED_GPUS[-1], places.KV_HEADS[0]
    for axis, cluster in zip(panels.axes[0], places.CLUSTERS, strict=True):
        for marker, seqlen in zip("osD", places.SEQLENS, strict=False):
            record = found[(cluster, kv_heads, seqlen, gpus), "mesh"]
            times = {one["tile_a"]: _time_of(record, one) for one in record.candidates or ()}
            ratios = {a: times[a][0].over(number.step_ms(record)) for a in sorted(times)}
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
    of_points, (cluster, seqlen) = places.grid(runs), VOLUME_AT
    records = {
        (method, kv, n): of_points[(cluster, kv, seqlen, n), method]
        for method, kv, n in product(places.METHODS, places.KV_HEADS, places.GPUS)
    }
    ratios = {place: payload_over_bound(record) for place, record in records.items()}
    over_least = {place: payload_over_bound(record, "comm_bytes_least") for place, record in records.items()}
    known = {place: number for place, number in ratios.items() if number.value}
    mesh = [number for (method, *_), number in known.items() if method == "mesh"]
    method, kv_heads, gpus = worst = max(known, key=lambda place: known[place].known)
    values = {"causal": number.computed(math.sqrt(2), HALF), "cluster": cluster, "seqlen": seqlen, "method": method}
    values |= {"gpus": gpus, "kv_heads": kv_heads, "figure": _volume_figure(records), "high": known[worst]}
    values |= {"low": number.least(mesh), "mesh": number.most(mesh)}
    values |= {"over_same_split": _by_gpus(ratios), "over_any_split": _by_gpus(over_least)}
    return section("choosing.volume", **values, by_gpus="; ".join(f"{gpus} GPUs || .3g" for gpus in places.GPUS))


def _by_gpus(ratios: Mapping[tuple[str, int, int], number.Number]) -> list[list[Cell]]:
    return [
        [method, kv_heads, *(ratios[method, kv_heads, gpus] for gpus in places.GPUS)]
        for kv_heads, method in product(places.KV_HEADS, places.METHODS)
    ]


def _volume_figure(records: Mapping[tuple[str, int, int], Record]) -> Figure:
    """The bytes that each method sends, between the bounds of methods that leave heads whole and of all methods."""
    panels = Panels(len(places.KV_HEADS), height=3.8, sharey=True)
    for axis, kv_heads in zip(panels.axes[0], places.KV_HEADS, strict=True):
        for method, style in styles(places.METHODS).items():
            by_gpus = {n: records[method, kv_heads, n] for n in places.GPUS}
            sent = {n: payload(record).times(1e-9) for n, record in by_gpus.items() if record.status == "ok"}
            panels.line(sent, method, axis=axis, markersize=5, linewidth=0.8, **style)
        for field, (name, dashes) in VOLUME_BOUNDS.items():
            bounds = {n: number.gigabytes(records["mesh", kv_heads, n], field) for n in places.GPUS}
            panels.line(bounds, name, axis=axis, color="black", linestyle=dashes, linewidth=1.4)
        axis.set_yscale("log")
        axis.set(title=f"{kv_heads} KV heads", xlabel="GPUs")
        log2_ticks(axis, places.GPUS)
        axis.yaxis.set_major_formatter("{x:g}")
    panels.first.set_ylabel("payload sent by a GPU, GB")
    panels.legend_below(3, fontsize=8)
    note = "Below the dashed line are only methods that split heads, below the dotted one is none."
    return panels.figure("choosing-volume", f"Sent, and the least that can be sent, {VOLUME_AT[1]} tokens", note)


def memory(runs: Runs) -> Section:
    """Time against memory of every simulated variant."""
    records, panels = places.grid(runs), Panels(len(places.EVERY_VARIANT), height=3.5)
    rows: list[list[Cell]] = []
    fronts: list[Text] = []
    for axis, key in zip(panels.axes[0], places.EVERY_VARIANT, strict=True):
        variants = [variant for method in places.METHODS for variant in _variants(records[key, method])]
        front = pareto(variants)
        panels.numbers += [number for _, _, *numbers in variants for number in numbers]
        rows += [[f"{key[2]} on {key[3]} GPUs", *variant] for variant in front]
        _scatter(axis, key, variants, front)
        (*_, fast_gb, fast_ms), (*_, lean_gb, lean_ms) = front[-1], front[0]
        counts = {"front": number.count(ms for *_, ms in front), "all": number.count(ms for *_, ms in variants)}
        ratios = {"times": fast_gb.over(lean_gb), "share": fast_ms.over(lean_ms)}
        fronts.append(words("choosing.front", seqlen=key[2], gpus=key[3], **counts, **ratios))
    panels.legend_below(3, fontsize=8)
    figure = panels.figure("choosing-memory", f"Step against peak memory, {places.EVERY_VARIANT[0][0]}")
    return section("choosing.memory", figure=figure, fronts=fronts, rows=rows)


def _variants(record: Record) -> list[Variant]:
    """The variants of a method that have a simulated time."""
    if record.status != "ok":
        return []
    if not record.candidates:
        return [(record.method, record.variant or "", number.gigabytes(record), number.step_ms(record))]
    source = number.record_source(record)
    return [
        (
            *(record.method, str(one["variant"])),
            *(
                number.computed(one["peak_mem_bytes"] * 1e-9, source),
                number.Number(one["step_ms"], "simulated", (source,)),
            ),
        )
        for one in record.candidates
        if one["step_ms"] is not None
    ]


def pareto(variants: Sequence[Variant]) -> list[Variant]:
    """The variants that no other beats in both memory and time, the leanest first."""
    front: list[Variant] = []
    for variant in sorted(variants, key=lambda one: (one[2].known, one[3].known)):
        if not front or variant[3].known < front[-1][3].known:
            front.append(variant)
    return front


def _scatter(axis: Axes, key: Key, variants: Sequence[Variant], front: Sequence[Variant]) -> None:
    for method, style in styles(places.METHODS).items():
        if at := [(gb.known, ms.known) for name, _, gb, ms in variants if name == method]:
            edge = {"s": 28, "edgecolor": "black", "linewidth": 0.4, "zorder": 3}
            axis.scatter(*zip(*at, strict=True), label=labelled(method, "simulated"), **style, **edge)
    axis.plot([one[2].known for one in front], [one[3].known for one in front], color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", title=f"{key[2]} tokens on {key[3]} GPUs")
    axis.set(xlabel="peak memory of the attention, GB", ylabel="step, ms")
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        which.set_minor_locator(NullLocator())
        which.set_major_formatter("{x:g}")


ORDERS = {"paper": "the paper's", "rows": "by rows", "columns": "by columns"}
"""A reader's name for each value of method.schedule."""
AT = {"cluster": "h100_ndr400", "seqlen": "512k", "gpus": 64, "layout": "zigzag"}
Orders = dict[tuple[int, str], list[Variant]]
"""The variants by number of KV heads and order."""


def orders(runs: Runs) -> Section:
    """The cost of a tile's orders in time, and what they save in memory."""
    by_order = _orders(runs)
    fronts = {kv: pareto([v for order in ORDERS for v in by_order[kv, order]]) for kv in places.KV_HEADS}
    papers = {kv: pareto(by_order[kv, "paper"]) for kv in places.KV_HEADS}
    return section(
        "choosing.orders",
        **{key: AT[key] for key in ("gpus", "cluster", "seqlen")},
        figure=_orders_figure(by_order, fronts, papers),
        about=[_leanest(kv, fronts[kv], papers[kv][-1]) for kv in places.KV_HEADS],
        rows=[[kv, ORDERS[order], *rest] for kv, front in fronts.items() for order, *rest in front],
    )


def _leanest(kv: int, front: list[Variant], fastest: Variant) -> Text:
    """The leanest variant of a front that ties with the paper's fastest."""
    order, tile, gb, _ = next(one for one in front if one[3].known <= (1 + places.TIE) * fastest[3].known)
    saved = number.derived(lambda a, b: 1 - a / b, gb, fastest[2])
    return words("choosing.order", kv=kv, tie=places.TIE, tile=tile, order=ORDERS[order], saved=saved)


def _orders(runs: Runs) -> Orders:
    by_order: Orders = {(kv, order): [] for kv in places.KV_HEADS for order in ORDERS}
    records = runs.grid(
        lambda kv, order, tile: point(method="mesh", kv_heads=kv, tile=list(tile), schedule=order, **AT),
        *(places.KV_HEADS, ORDERS, all_tiles(int(AT["gpus"]))),
    )
    for (kv, order, (a, b)), record in records.items():
        if record.status == "ok":
            by_order[kv, order].append((order, f"{a}x{b}", number.gigabytes(record), number.step_ms(record)))
    return by_order


def _orders_figure(found: Orders, fronts: dict[int, list[Variant]], papers: dict[int, list[Variant]]) -> Figure:
    panels, tones = Panels(len(places.KV_HEADS), height=3.4, sharey=True), colours(list(ORDERS.values()))
    for axis, kv in zip(panels.axes[0], places.KV_HEADS, strict=True):
        for (order, name), marker in zip(ORDERS.items(), "osD", strict=True):
            variants = found[kv, order]
            panels.numbers += [number for _, _, *numbers in variants for number in numbers]
            x, y = [one[2].known for one in variants], [one[3].known for one in variants]
            axis.plot(x, y, marker, color=tones[name], markersize=4.5, label=labelled(name, "simulated"))
        for front, style in ((fronts[kv], "-"), (papers[kv], ":")):
            axis.plot([one[2].known for one in front], [one[3].known for one in front], style, color="black", lw=0.9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for formatted in (axis.xaxis.set_major_formatter, axis.yaxis.set_major_formatter):
            formatted("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.set(title=f"{kv} KV heads", xlabel="peak memory of the attention, GB")
    panels.first.set_ylabel("step, ms")
    panels.legend_below(3, fontsize=8)
    return panels.figure("choosing-orders", f"Orders of Mesh's tiles, {AT['seqlen']} tokens on {AT['gpus']} GPUs")
