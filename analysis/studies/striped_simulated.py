"""Striped against Ring Attention simulated on 8 A100: attention alone, and what that makes of the paper's models."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np

from sp_bench.analysis.figure import MARKERS, STYLE, Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, derived, formula, of_record
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.ring_model import cluster_named
from sp_bench.analysis.studies.striped_maximum import SHAPE, our_tiled, our_tms, paper_measured, paper_tms, shape
from sp_bench.analysis.studies.striped_model import LIMIT, RECOMPUTED, Cell, attention_limit, cells, models
from sp_bench.analysis.table import Column, Table
from sp_bench.records import Record

CLUSTER = "a100_hdr200"
DEVICES = (2, 4, 8)
BLOCKS = (2048, 4096, 8192, 16384, 32768, 65536)
HEADS = 16
"""The 1B model's, of 128."""


def pair(n: int, seqlen: int, **keys: object) -> tuple[Point, Point]:
    """Ring on the paper's contiguous layout, and Striped, simulated."""
    shared = {"cluster": CLUSTER, "mode": "simulate", "gpus": n, "seqlen": seqlen, "causal": True, **keys}
    return point(method="ring", layout="contiguous", **shared), point(method="striped", **shared)


def ask_pairs(runs: Runs, pairs: Sequence[tuple[Point, Point]]) -> list[tuple[Record, Record]]:
    """The records of (ring, striped) points."""
    found = runs.ask(one for both in pairs for one in both)
    return list(zip(found[::2], found[1::2], strict=True))


def attention(runs: Runs) -> Section:
    """How much of the limit 2 - 1/n attention alone reaches, by the tokens of a block."""
    grid = [(n, block) for n in DEVICES for block in BLOCKS]
    found = ask_pairs(runs, [pair(n, n * block, heads=HEADS) for n, block in grid])
    reached: dict[tuple[int, int], Number] = {}
    table, of_kernels = [], []
    for (n, block), (ring, striped) in zip(grid, found, strict=True):
        ours, theirs = of_record(striped, "step_ms_median"), of_record(ring, "step_ms_median")
        limit, speedup = Number(attention_limit(n), "computed", (LIMIT,)), theirs.over(ours)
        reached[n, block] = speedup.over(limit)
        kernels = of_record(ring, "compute_ms").over(of_record(striped, "compute_ms"))
        of_kernels.append(speedup.over(kernels))
        table.append([n, n * block, block, theirs, ours, speedup, limit, reached[n, block].times(100), kernels])
    most, least = (pick(reached.values(), key=lambda number: number.known) for pick in (max, min))
    growing = sum(
        reached[n, a].known < reached[n, b].known for n in DEVICES for a, b in zip(BLOCKS, BLOCKS[1:], strict=False)
    )
    columns = (
        *(Column("GPUs"), Column("seqlen", "tokens"), Column("block", "tokens")),
        *(Column("Ring", "ms"), Column("Striped", "ms"), Column("speedup", "", ".3f")),
        *(Column("limit", "", ".3f"), Column("reached", "% of the limit", ".1f")),
        Column("busiest ranks' kernels alone", "speedup", ".3f"),
    )
    return Section(
        "Attention alone, simulated on 8 A100",
        [
            text(
                "Simulated on cluster=" + CLUSTER + ", forward and backward of one layer of the 1B model's shape"
                f" ({HEADS} heads of 128, bfloat16): Striped is {{slow:.2f}} to {{fast:.2f}} times as fast as Ring,"
                " which is {least:.0%} to {most:.0%} of the limit. The share grows from one block size to the next in"
                " {growing:.0f} of {steps:.0f} steps. The kernels of the busiest ranks alone give {kernel_low:.1%} to"
                " {kernel_high:.1%} of the simulated speedup, so that what is missing to the limit is theirs: rates on"
                " masked blocks are below those on full ones, as published, most of all on small blocks. The rates are"
                " FlashAttention-2's in bfloat16. The paper ran TF32 without a fused kernel and gives no times of"
                " attention alone to hold this against.",
                slow=min((row[5] for row in table), key=lambda number: number.known),
                fast=max((row[5] for row in table), key=lambda number: number.known),
                least=least,
                most=most,
                growing=derived(lambda *_: growing, *reached.values()),
                steps=derived(lambda *_: len(DEVICES) * (len(BLOCKS) - 1), *reached.values()),
                kernel_low=derived(lambda *values: 1 / max(values), *of_kernels),
                kernel_high=derived(lambda *values: 1 / min(values), *of_kernels),
            ),
            _reached(reached),
            Table("striped-attention", "Striped against Ring, attention alone, on A100", columns, table),
        ],
    )


def _reached(reached: dict[tuple[int, int], Number]) -> Figure:
    canvas, axes = new_figure(height=3.0)
    axis, styles, palette = axes[0][0], ("-", "--", ":"), colours([str(n) for n in DEVICES])
    with mpl.rc_context(STYLE):
        for n, marker, style in zip(DEVICES, MARKERS, styles, strict=False):
            shares = [100 * reached[n, block].known for block in BLOCKS]
            label = labelled(f"{n} GPUs, limit {attention_limit(n):.3g}x", "simulated")
            axis.plot(BLOCKS, shares, marker=marker, linestyle=style, label=label, color=palette[str(n)])
        axis.axhline(100, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(BLOCKS, [f"{block // 1024}k" for block in BLOCKS])
        axis.minorticks_off()
        axis.set_xlabel("tokens of a block")
        axis.set_ylabel("speedup, % of the limit 2 - 1/n")
        axis.legend()
    note = "Striped over Ring, forward and backward of attention alone; 100% is the limit by formula."
    return Figure("striped-attention", "How much of the limit is reached", canvas, sources([*reached.values()]), note)


REST = formula(
    "striped-rest",
    "4 passes of 2 (4 d^2 + 3 d f) FLOPs a token and layer over the dense bfloat16 peak of a GPU, tokens and weights"
    " shared out evenly: the least that it takes, so that the speedup is the most",
    "Brandon et al. 2023, table 1 and section 5",
)


def rest_ms(cell: Cell, peak: float) -> Number:
    """What a layer takes beside attention, on each GPU, at `peak` FLOP/s."""
    flops = RECOMPUTED.rest * models()[cell.model].rest_flops * cell.block / cell.tensor_parallel
    return Number(1e3 * flops / peak, "computed", (REST,))


def layer_ms(record: Record, rest: Number) -> Number:
    """A layer with attention as simulated: forward twice, since the layer is computed again, and backward."""
    forward, backward = of_record(record, "forward_ms_median"), of_record(record, "backward_ms_median")
    return derived(lambda f, b, r: 2 * f + b + r, forward, backward, rest)


def estimates(runs: Runs, chosen: Sequence[Cell]) -> list[Number]:
    """The speedup of a layer for cells on A100, with attention as simulated and the rest at the peak."""
    pairs = []
    for cell in chosen:
        model = models()[cell.model]
        heads = model.heads // cell.tensor_parallel
        pairs.append(pair(cell.n, cell.seqlen, heads=heads, head_dim=model.width // model.heads))
    peak = cluster_named(CLUSTER).device.peak_tflops["bfloat16"] * 1e12
    found = []
    for cell, (ring, striped) in zip(chosen, ask_pairs(runs, pairs), strict=True):
        rest = rest_ms(cell, peak)
        found.append(layer_ms(ring, rest).over(layer_ms(striped, rest)))
    return found


def whole_model(runs: Runs) -> Section:
    """Every cell on A100: the paper's two speedups, and ours with attention as simulated."""
    chosen = [cell for cell in cells() if cell.device == "a100"]
    ours = estimates(runs, chosen)
    table = []
    for cell, estimate in zip(chosen, ours, strict=True):
        maximum, measured = paper_tms(cell), paper_measured(cell)
        table.append(
            [*shape(cell), maximum, measured, estimate, estimate.over(maximum), estimate.over(measured)],
        )
    known = [(cell, estimate) for cell, estimate in zip(chosen, ours, strict=True) if estimate.value is not None]
    over = [estimate.over(paper_measured(cell)) for cell, estimate in known]
    below = [estimate.known <= our_tms(cell).known for cell, estimate in known]
    low, high = (pick(over, key=lambda number: number.known) for pick in (min, max))
    refused = {cell.model: estimate.why for cell, estimate in zip(chosen, ours, strict=True) if estimate.value is None}
    without = "".join(f" (not the {model} model's: {why})" for model, why in refused.items())
    return Section(
        "Whole models, estimated for 8 A100",
        [
            text(
                "Simulated attention, computed rest: a layer whose attention takes what was simulated and whose other"
                f" matrix products run at the GPU's peak. {{known:.0f}} of {{cells:.0f}} cells can be had{without}. The"
                " estimate is {low:.2f} to {high:.2f} times the speedup that the paper measured, {median:.2f} in the"
                " median, and in {below:.0f} cells at most the maximum by formula. It is no reproduction of the paper's"
                " runs, which had another kernel (TF32, in tiles of 2048 x 4096): it says what a fused kernel in"
                " bfloat16 would leave of the speedup. Communication between tensor-parallel GPUs is left out.",
                known=derived(lambda *_: len(known), *over),
                cells=derived(lambda *_: len(chosen), *map(paper_tms, chosen)),
                low=low,
                high=high,
                median=derived(lambda *values: float(np.median(values)), *over),
                below=derived(lambda *_: sum(below), *over),
            ),
            _by_seqlen(chosen, ours),
            Table(
                "striped-whole-model",
                "Speedup in training on A100, the paper's and ours",
                (
                    *SHAPE,
                    *(Column("maximum, paper", "", ".2f"), Column("measured, paper", "", ".2f")),
                    *(Column("estimate, ours", "", ".3f"), Column("ours over maximum", "", ".3f")),
                    Column("ours over measured", "", ".3f"),
                ),
                table,
                shown_rows=14,
            ),
        ],
    )


def _by_seqlen(chosen: Sequence[Cell], ours: Sequence[Number]) -> Figure:
    canvas, axes = new_figure(3, height=3.4, sharey=True)
    drawn: list[Number] = []
    palette = colours(("our layer (simulated)", "measured (paper)"))
    with mpl.rc_context(STYLE):
        for axis, model in zip(axes[0], models(), strict=True):
            row = [(c, e) for c, e in zip(chosen, ours, strict=True) if c.model == model and c.mesh == "2x4"]
            lines = (
                ("maximum (paper)", [paper_tms(c) for c, _ in row], "x", "none"),
                ("maximum (computed)", [our_tms(c) for c, _ in row], "", "-"),
                ("with tiles (computed)", [our_tiled(c) for c, _ in row], "", "--"),
                ("our layer (simulated)", [e for _, e in row if e.value is not None], "s", ":"),
                ("measured (paper)", [paper_measured(c) for c, _ in row], "o", "none"),
            )
            for label, numbers, marker, style in lines:
                seqlens = [c.seqlen for c, _ in row][: len(numbers)]
                axis.plot(
                    seqlens,
                    [n.known for n in numbers],
                    marker=marker,
                    linestyle=style,
                    label=label,
                    color=palette.get(label, "black"),
                )
                drawn += numbers
            axis.set_title(model)
            axis.set_xscale("log", base=2)
            axis.set_xticks([2**15, 2**17], ["32k", "128k"])
            axis.minorticks_off()
            axis.set_xlabel("tokens")
        axes[0][0].set_ylabel("speedup of Striped over Ring")
        handles, labels = axes[0][0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=3)
    return Figure(
        "striped-speedup",
        "Speedup in training, 8 A100 as 2 x 4 (table 3)",
        canvas,
        sources(drawn),
        "The paper's maximum and measurements, the maximum by formula, what its tiles allow, and our layer.",
    )
