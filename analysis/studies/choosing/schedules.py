"""Memory against time of Mesh's orders: the paper's, by rows and by columns, on every tile."""

from __future__ import annotations

from itertools import product

from sp_bench.analysis.figure import Figure, Panels, colours, labelled
from sp_bench.analysis.number import derived, of_record
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.choosing.places import KV_HEADS, TIE
from sp_bench.analysis.studies.choosing.shapes import Variant, pareto
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.methods.mesh import tiles

ORDERS = {"paper": "the paper's", "rows": "by rows", "columns": "by columns"}
"""What a reader calls each value of method.schedule."""
AT = {"cluster": "h100_ndr400", "seqlen": "512k", "gpus": 64, "layout": "zigzag"}
Orders = dict[tuple[int, str], list[Variant]]
"""The variants by number of KV heads and order."""


def orders(runs: Runs) -> Section:
    """What a tile's orders cost in time, and save in memory."""
    found = _found(runs)
    fronts = {kv: pareto([v for order in ORDERS for v in found[kv, order]]) for kv in KV_HEADS}
    alone = {kv: pareto(found[kv, "paper"]) for kv in KV_HEADS}
    lines: list[list[Cell]] = [[kv, ORDERS[order], *rest] for kv, front in fronts.items() for order, *rest in front]
    heads = columns("KV heads; order; tile; peak memory | GB | .3g; step | ms")
    leanest = {
        kv: next(one for one in fronts[kv] if one[3].known <= (1 + TIE) * alone[kv][-1][3].known) for kv in KV_HEADS
    }
    saved = {kv: derived(lambda a, b: 1 - a / b, leanest[kv][2], alone[kv][-1][2]) for kv in KV_HEADS}
    return Section(
        "Memory against time: Mesh by rows and by columns",
        text(
            "The paper leaves to future work to release KV as columns finish. method.schedule=columns does: Q stays, KV"
            " streams by. method.schedule=rows is the other way round. Both send what the paper's order sends. Each"
            " marker is a tile of {gpus} ranks in one order: peak memory of the attention from the plans, and its step,"
            " simulated on {cluster} with {seqlen} tokens. Lines join what no other variant beats in both: solid with"
            " all orders, dotted with the paper's alone.",
            gpus=str(AT["gpus"]),
            cluster=str(AT["cluster"]),
            seqlen=str(AT["seqlen"]),
        ),
        _figure(found, fronts, alone),
        *(
            text(
                "{kv} KV heads: of all orders, the leanest within {tie:.0%} of the paper's fastest step is {tile}"
                " {order} and needs {saved:.0%} less memory.",
                kv=str(kv),
                tie=TIE,
                tile=leanest[kv][1],
                order=ORDERS[leanest[kv][0]],
                saved=saved[kv],
            )
            for kv in KV_HEADS
        ),
        Table("choosing-orders", "Tiles and orders that no other beats in time and memory", heads, lines),
    )


def _found(runs: Runs) -> Orders:
    gpus = int(AT["gpus"])
    asked = {
        (kv, order, tile): point(method="mesh", kv_heads=kv, tile=list(tile), schedule=order, **AT)
        for kv, order, tile in product(KV_HEADS, ORDERS, tiles(gpus))
    }
    found: Orders = {(kv, order): [] for kv, order in product(KV_HEADS, ORDERS)}
    for (kv, order, (a, b)), record in runs.by_key(asked).items():
        if record.status == "ok":
            gb, ms = of_record(record, "peak_mem_bytes_max").times(1e-9), of_record(record, "step_ms_median")
            found[kv, order].append((order, f"{a}x{b}", gb, ms))
    return found


def _figure(found: Orders, fronts: dict[int, list[Variant]], alone: dict[int, list[Variant]]) -> Figure:
    panels, tones = Panels(len(KV_HEADS), height=3.4, sharey=True), colours(list(ORDERS.values()))
    for axis, kv in zip(panels.axes[0], KV_HEADS, strict=True):
        for (order, words), marker in zip(ORDERS.items(), "osD", strict=True):
            variants = found[kv, order]
            panels.numbers += [number for _, _, *numbers in variants for number in numbers]
            x, y = [one[2].known for one in variants], [one[3].known for one in variants]
            axis.plot(x, y, marker, color=tones[words], markersize=4.5, label=labelled(words, "simulated"))
        for front, style in ((fronts[kv], "-"), (alone[kv], ":")):
            axis.plot([one[2].known for one in front], [one[3].known for one in front], style, color="black", lw=0.9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.set(title=f"{kv} KV heads", xlabel="peak memory of the attention, GB")
    panels.first.set_ylabel("step, ms")
    panels.legend_below(3, fontsize=8)
    return panels.figure("choosing-orders", f"Orders of Mesh's tiles, {AT['seqlen']} tokens on {AT['gpus']} GPUs")
