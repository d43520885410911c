"""Striped against Ring Attention, simulated: attention alone, an estimate of a layer, and whole training steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from sp_bench.analysis.figure import MARKERS, Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import (
    Number,
    computed,
    count,
    derived,
    least,
    median,
    most,
    of_record,
    step_ms,
    tally,
    valued,
)
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.ring.model import cluster_named
from sp_bench.analysis.studies.striped.limit import our_tiled, our_tms, paper_measured, paper_tms, shape
from sp_bench.analysis.studies.striped.model import DEVICES, LIMIT, RECOMPUTED, Cell, attention_limit, cells, models
from sp_bench.analysis.table import Cell as Entry
from sp_bench.records import Record

CLUSTER = "a100_hdr200"
GPUS = (2, 4, 8)
BLOCKS = (2048, 4096, 8192, 16384, 32768, 65536)
HEADS = 16
"""The heads of the 1B model, of 128 each."""


def pair(n: int, seqlen: int, **keys: object) -> tuple[Point, Point]:
    """The simulated points of Ring on the paper's contiguous layout, and of Striped."""
    shared = {"cluster": CLUSTER, "mode": "simulate", "gpus": n, "seqlen": seqlen, "causal": True, **keys}
    return point(method="ring", layout="contiguous", **shared), point(method="striped", **shared)


def ask_pairs(runs: Runs, pairs: Sequence[tuple[Point, Point]]) -> list[tuple[Record, Record]]:
    """The records of pairs of points, Ring and Striped."""
    records = runs.ask(one for both in pairs for one in both)
    return list(zip(records[::2], records[1::2], strict=True))


def attention(runs: Runs) -> Section:
    """The share of the limit 2 - 1/n that attention alone reaches, by block size."""
    grid = list(product(GPUS, BLOCKS))
    both = ask_pairs(runs, [pair(n, n * block, heads=HEADS) for n, block in grid])
    reached: dict[tuple[int, int], Number] = {}
    rows, of_kernels = [], []
    for (n, block), (ring, striped) in zip(grid, both, strict=True):
        limit, speedup = computed(attention_limit(n), LIMIT), step_ms(ring).over(step_ms(striped))
        reached[n, block] = speedup.over(limit)
        kernels = of_record(ring, "compute_ms").over(of_record(striped, "compute_ms"))
        of_kernels.append(kernels.over(speedup))
        ratios = [speedup, limit, reached[n, block].times(100), kernels]
        rows.append([n, n * block, block, step_ms(ring), step_ms(striped), *ratios])
    shares, steps = reached.values(), [(n, a, b) for n in GPUS for a, b in pairwise(BLOCKS)]
    speedups = [row[5] for row in rows]
    values = {"cluster": CLUSTER, "heads": HEADS, "slow": least(speedups), "fast": most(speedups)}
    values |= {"low": least(shares), "high": most(shares)}
    values |= {"steps": tally(len(steps), shares), "kernel_low": least(of_kernels), "kernel_high": most(of_kernels)}
    values |= {"figure": _reached(reached), "rows": rows}
    return section(
        "striped.attention",
        **values,
        growing=tally(sum(reached[n, a].known < reached[n, b].known for n, a, b in steps), shares),
    )


def _reached(reached: dict[tuple[int, int], Number]) -> Figure:
    panels = Panels(height=3.0)
    axis, palette = panels.first, colours([str(n) for n in GPUS])
    for n, marker, style in zip(GPUS, MARKERS, ("-", "--", ":"), strict=False):
        shares = {block: reached[n, block].times(100) for block in BLOCKS}
        name = f"{n} GPUs, limit {attention_limit(n):.3g}x"
        panels.line(shares, name, marker=marker, linestyle=style, color=palette[str(n)])
    axis.axhline(100, color="black", linewidth=1)
    log2_ticks(axis, BLOCKS, [f"{block // 1024}k" for block in BLOCKS])
    axis.set(xlabel="tokens of a block", ylabel="speedup, % of the limit 2 - 1/n")
    panels.legend()
    note = "Striped over Ring, forward and backward of attention alone; 100% is the limit by formula."
    return panels.figure("striped-attention", "How much of the limit is reached", note)


REST = source("striped.rest")


def rest_ms(cell: Cell, peak: float) -> Number:
    """Milliseconds of a layer's work beside attention, on each GPU, at `peak` FLOP/s."""
    flops = RECOMPUTED.rest * models()[cell.model].rest_flops * cell.block / cell.tensor_parallel
    return computed(1e3 * flops / peak, REST)


def layer_ms(record: Record, rest: Number) -> Number:
    """Milliseconds of a layer: the simulated forward twice, as the layer is computed again, its backward, the rest."""
    forward, backward = of_record(record, "forward_ms_median"), of_record(record, "backward_ms_median")
    return derived(lambda f, b, r: 2 * f + b + r, forward, backward, rest)


def estimates(runs: Runs, chosen: Sequence[Cell]) -> list[Number]:
    """The speedup of a layer for each cell on A100: attention simulated, the rest at the GPU's peak."""
    pairs = []
    for cell in chosen:
        model = models()[cell.model]
        heads = model.heads // cell.tensor_parallel
        pairs.append(pair(cell.n, cell.seqlen, heads=heads, head_dim=model.width // model.heads))
    peak = cluster_named(CLUSTER).device.peak_tflops["bfloat16"] * 1e12
    gains = []
    for cell, (ring, striped) in zip(chosen, ask_pairs(runs, pairs), strict=True):
        rest = rest_ms(cell, peak)
        gains.append(layer_ms(ring, rest).over(layer_ms(striped, rest)))
    return gains


def whole_model(runs: Runs) -> Section:
    """Every cell on A100: the paper's two speedups, and our estimate."""
    chosen = [cell for cell in cells() if cell.device == "a100"]
    ours, rows = dict(zip(chosen, estimates(runs, chosen), strict=True)), []
    for cell, estimate in ours.items():
        maximum, measured = paper_tms(cell), paper_measured(cell)
        rows.append([*shape(cell), maximum, measured, estimate, estimate.over(maximum), estimate.over(measured)])
    over = [row[-1] for row in rows]
    values = {"cells": count(over), "low": least(over), "high": most(over), "median": median(over)}
    values |= {"figure": _by_seqlen(ours), "rows": rows}
    return section(
        "striped.whole_model",
        **values,
        below=tally(sum(estimate.known <= our_tms(cell).known for cell, estimate in ours.items()), over),
    )


def _by_seqlen(ours: dict[Cell, Number]) -> Figure:
    panels = Panels(3, height=3.4, sharey=True)
    first, second = colours(("ours", "paper")).values()
    a100 = [cell for cell in cells() if cell.device == "a100" and cell.mesh == "2x4"]
    for axis, model in zip(panels.axes[0], models(), strict=True):
        row = [cell for cell in a100 if cell.model == model]
        for name, value, marker, style, colour in (
            ("maximum", paper_tms, "x", "none", "black"),
            ("maximum", our_tms, "", "-", "black"),
            ("with tiles", our_tiled, "", "--", "black"),
            ("our layer", ours.get, "s", ":", first),
            ("measured", paper_measured, "o", "none", second),
        ):
            points = {cell.seqlen: number for cell in row if (number := value(cell))}
            panels.line(points, name, axis=axis, marker=marker, linestyle=style, color=colour)
        log2_ticks(axis, [2**15, 2**17], ["32k", "128k"])
        axis.set(title=model, xlabel="tokens")
    panels.first.set_ylabel("speedup of Striped over Ring")
    panels.legend_below(3)
    return panels.figure(
        "striped-speedup",
        "Speedup in training, 8 A100 as 2 x 4 (table 3)",
        "The paper's maximum and measurements, the maximum by formula and with the paper's tiles, and our layer.",
    )


CLUSTERS = {"a100": CLUSTER, "tpuv4": "tpuv4"}
"""The cluster file of each of the paper's devices."""
MODEL = {"1B": "llama_1b", "3B": "llama_3b", "7B": "llama_7b"}
SHARDED = {"a100": ("7B",), "tpuv4": tuple(MODEL)}
"""Models whose parameters are split over the devices of the sequence too: not every cell would fit otherwise."""

LONG = 32768
"""Tokens of a block from which tiles matter little."""


def chosen() -> tuple[Cell, ...]:
    """All cells: those of each device together."""
    return tuple(sorted(cells(), key=lambda cell: list(CLUSTERS).index(cell.device)))


def by_device(found: Sequence[tuple[Cell, Number]]) -> list[list[Entry]]:
    """The errors of the cells of each device and model: a row each."""
    groups: dict[tuple[str, str], list[Number]] = {}
    for cell, ratio in found:
        groups.setdefault((DEVICES[cell.device], cell.model), []).append(ratio)
    errors = {key: [derived(lambda x: 100 * abs(x - 1), r) for r in ratios] for key, ratios in groups.items()}
    return [[*key, tally(len(r), r), median(errors[key]), least(r), most(r)] for key, r in groups.items()]


def step(cell: Cell) -> tuple[Point, Point]:
    """The simulated steps of Ring on contiguous tokens, and of Striped; whole layers are recomputed, as the paper's."""
    shared = {"model": MODEL[cell.model], "cluster": CLUSTERS[cell.device], "mode": "simulate"}
    shared |= {"gpus": cell.tensor_parallel * cell.n, "seqlen": cell.seqlen}
    shared |= {"train__recompute": "full", "train__tensor_parallel": cell.tensor_parallel}
    shared |= {"train__parameters": "sharded"} if cell.model in SHARDED[cell.device] else {}
    return point(method="ring", layout="contiguous", **shared), point(method="striped", **shared)


def speedups(runs: Runs, found: Sequence[Cell]) -> list[tuple[Number, Number, Number]]:
    """(Ring's step in ms, Striped's, the speedup) of each cell."""
    pairs = ask_pairs(runs, [step(cell) for cell in found])
    steps = [(step_ms(ring), step_ms(striped)) for ring, striped in pairs]
    return [(ring, striped, ring.over(striped)) for ring, striped in steps]


def training(runs: Runs) -> Section:
    """Each cell's speedup in training, the paper's beside the simulated one."""
    rows, over = [], []
    for cell, gains in zip(chosen(), speedups(runs, chosen()), strict=True):
        over.append(gains[-1].over(paper_measured(cell)))
        rows.append([*shape(cell), *gains, paper_tms(cell), paper_measured(cell), over[-1]])
    served = [(cell, ratio) for cell, ratio in zip(chosen(), over, strict=True) if ratio.value is not None]
    long = [ratio for cell, ratio in served if cell.block >= LONG]
    ratios, refused = valued(over), [ratio for ratio in over if ratio.value is None]
    values = {"clusters": " and ".join(CLUSTERS.values()), "low": least(ratios), "high": most(ratios)}
    values |= {"cells": tally(len(ratios), ratios), "median": median(ratios), "long": LONG, "long_low": least(long)}
    values |= {"long_high": most(long), "refused": tally(len(refused), [*ratios, *refused])}
    values |= {"devices": by_device(served), "rows": rows}
    return section("striped.training", **values)
