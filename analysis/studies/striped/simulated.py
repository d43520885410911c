"""Striped against Ring Attention simulated on 8 A100: attention alone, and an estimate of the paper's whole models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sp_bench.analysis.figure import MARKERS, Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import Number, computed, count, derived, formula, least, median, most, of_record, tally
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.ring.model import cluster_named
from sp_bench.analysis.studies.striped.limit import SHAPE, our_tiled, our_tms, paper_measured, paper_tms, shape
from sp_bench.analysis.studies.striped.model import LIMIT, RECOMPUTED, Cell, attention_limit, cells, models
from sp_bench.analysis.table import Table, columns
from sp_bench.records import Record

CLUSTER = "a100_hdr200"
DEVICES = (2, 4, 8)
BLOCKS = (2048, 4096, 8192, 16384, 32768, 65536)
HEADS = 16
"""The heads of the 1B model, of 128 each."""


def pair(n: int, seqlen: int, **keys: object) -> tuple[Point, Point]:
    """The simulated points of Ring on the paper's contiguous layout, and of Striped."""
    shared = {"cluster": CLUSTER, "mode": "simulate", "gpus": n, "seqlen": seqlen, "causal": True, **keys}
    return point(method="ring", layout="contiguous", **shared), point(method="striped", **shared)


def ask_pairs(runs: Runs, pairs: Sequence[tuple[Point, Point]]) -> list[tuple[Record, Record]]:
    """The records of pairs of points, Ring and Striped."""
    found = runs.ask(one for both in pairs for one in both)
    return list(zip(found[::2], found[1::2], strict=True))


def attention(runs: Runs) -> Section:
    """The share of the limit 2 - 1/n that attention alone reaches, by block size."""
    grid = [(n, block) for n in DEVICES for block in BLOCKS]
    found = ask_pairs(runs, [pair(n, n * block, heads=HEADS) for n, block in grid])
    reached: dict[tuple[int, int], Number] = {}
    table, of_kernels = [], []
    for (n, block), (ring, striped) in zip(grid, found, strict=True):
        ours, theirs = of_record(striped, "step_ms_median"), of_record(ring, "step_ms_median")
        limit, speedup = computed(attention_limit(n), LIMIT), theirs.over(ours)
        reached[n, block] = speedup.over(limit)
        kernels = of_record(ring, "compute_ms").over(of_record(striped, "compute_ms"))
        of_kernels.append(kernels.over(speedup))
        table.append([n, n * block, block, theirs, ours, speedup, limit, reached[n, block].times(100), kernels])
    shares, steps = reached.values(), [(n, a, b) for n in DEVICES for a, b in pairwise(BLOCKS)]
    heads = columns(
        "GPUs; seqlen | tokens; block | tokens; Ring | ms; Striped | ms; speedup || .3f; limit || .3f;"
        " speedup | % of the limit | .1f; speedup of the kernels alone, busiest ranks || .3f"
    )
    return Section(
        "Attention alone, simulated on 8 A100",
        text(
            "Simulated on cluster={cluster}, forward and backward of one layer of the 1B model's shape ({heads} heads"
            " of 128, bfloat16). Striped is {slow:.2f} to {fast:.2f} times as fast as Ring, which is {low:.0%} to"
            " {high:.0%} of the limit. The share grows from one block size to the next in {growing:.0f} of {steps:.0f}"
            " steps. The kernels of the busiest ranks alone give {kernel_low:.1%} to {kernel_high:.1%} of the simulated"
            " speedup, so they explain what is missing to the limit. Published rates on masked blocks are below those"
            " on full blocks, most of all on small ones. The rates are FlashAttention-2's in bfloat16. The paper ran"
            " TF32 without a fused kernel, and gives no times of attention alone to compare with.",
            cluster=CLUSTER,
            heads=HEADS,
            slow=least(row[5] for row in table),
            fast=most(row[5] for row in table),
            low=least(shares),
            high=most(shares),
            growing=tally(sum(reached[n, a].known < reached[n, b].known for n, a, b in steps), shares),
            steps=tally(len(steps), shares),
            kernel_low=least(of_kernels),
            kernel_high=most(of_kernels),
        ),
        _reached(reached),
        Table("striped-attention", "Striped against Ring, attention alone, on A100", heads, table),
    )


def _reached(reached: dict[tuple[int, int], Number]) -> Figure:
    panels = Panels(height=3.0)
    axis, palette = panels.first, colours([str(n) for n in DEVICES])
    for n, marker, style in zip(DEVICES, MARKERS, ("-", "--", ":"), strict=False):
        shares = {block: reached[n, block].times(100) for block in BLOCKS}
        name = f"{n} GPUs, limit {attention_limit(n):.3g}x"
        panels.line(shares, name, marker=marker, linestyle=style, color=palette[str(n)])
    axis.axhline(100, color="black", linewidth=1)
    log2_ticks(axis, BLOCKS, [f"{block // 1024}k" for block in BLOCKS])
    axis.set(xlabel="tokens of a block", ylabel="speedup, % of the limit 2 - 1/n")
    panels.legend()
    note = "Striped over Ring, forward and backward of attention alone; 100% is the limit by formula."
    return panels.figure("striped-attention", "How much of the limit is reached", note)


REST = formula(
    "striped-rest",
    "4 passes of 2 (4 d^2 + 3 d f) FLOPs a token and layer over the dense bfloat16 peak of a GPU, tokens and weights"
    " shared out evenly: the least that it takes, so that the speedup is the most",
    "Brandon et al. 2023, table 1 and section 5",
)


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
    found = []
    for cell, (ring, striped) in zip(chosen, ask_pairs(runs, pairs), strict=True):
        rest = rest_ms(cell, peak)
        found.append(layer_ms(ring, rest).over(layer_ms(striped, rest)))
    return found


def whole_model(runs: Runs) -> Section:
    """Every cell on A100: the paper's two speedups, and our estimate."""
    chosen = [cell for cell in cells() if cell.device == "a100"]
    ours = dict(zip(chosen, estimates(runs, chosen), strict=True))
    table = []
    for cell, estimate in ours.items():
        maximum, measured = paper_tms(cell), paper_measured(cell)
        table.append([*shape(cell), maximum, measured, estimate, estimate.over(maximum), estimate.over(measured)])
    over = [estimate.over(paper_measured(cell)) for cell, estimate in ours.items()]
    heads = columns(
        f"{SHAPE}; maximum, paper || .2f; measured, paper || .2f; estimate, ours || .3f; estimate / maximum || .3f;"
        " estimate / measured || .3f"
    )
    return Section(
        "Whole models, estimated for 8 A100",
        text(
            "An estimate for a layer: attention takes the simulated time, and the other matrix products run at the"
            " GPU's peak. It is {low:.2f} to {high:.2f} times the speedup that the paper measured, {median:.2f} times"
            " in the median, and in {below:.0f} of {cells:.0f} cells at most the maximum by formula. It does not repeat"
            " the paper's runs, which had another kernel (TF32, in tiles of 2048 x 4096); it shows the speedup that a"
            " fused bfloat16 kernel would leave. Communication between tensor-parallel GPUs is left out.",
            cells=count(over),
            low=least(over),
            high=most(over),
            median=median(over),
            below=tally(sum(estimate.known <= our_tms(cell).known for cell, estimate in ours.items()), over),
        ),
        _by_seqlen(ours),
        Table(
            "striped-whole-model",
            "Speedup in training on A100, the paper's and ours",
            heads,
            table,
            shown_rows=14,
        ),
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
