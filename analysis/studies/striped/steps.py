"""Training steps of the paper's models simulated on A100s and TPU v4s, in every mesh of its tables."""

from __future__ import annotations

from collections.abc import Sequence

from sp_bench.analysis.number import Number, derived, least, median, most, of_record, tally
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped.limit import SHAPE, paper_measured, paper_tms, shape
from sp_bench.analysis.studies.striped.model import DEVICES, Cell, cells
from sp_bench.analysis.studies.striped.simulated import CLUSTER, ask_pairs
from sp_bench.analysis.table import Cell as Entry
from sp_bench.analysis.table import Table, columns

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


def by_device(found: Sequence[tuple[Cell, Number]]) -> Table:
    """The errors of the cells of each device and model."""
    groups: dict[tuple[str, str], list[Number]] = {}
    for cell, ratio in found:
        groups.setdefault((cell.device, cell.model), []).append(ratio)
    table: list[Sequence[Entry]] = [
        [
            DEVICES[device],
            model,
            tally(len(ratios), ratios),
            median(map(_percent_off, ratios)),
            least(ratios),
            most(ratios),
        ]
        for (device, model), ratios in groups.items()
    ]
    heads = columns(
        "device; model; cells || .0f; median error | % | .1f; least simulated / measured || .2f;"
        " largest simulated / measured || .2f"
    )
    return Table("striped-training-devices", "Errors of the simulated speedup, by device and model", heads, table)


def _percent_off(ratio: Number) -> Number:
    return derived(lambda x: 100 * abs(x - 1), ratio)


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
    steps = [(of_record(ring, "step_ms_median"), of_record(striped, "step_ms_median")) for ring, striped in pairs]
    return [(ring, striped, ring.over(striped)) for ring, striped in steps]


def training(runs: Runs) -> Section:
    """Each cell's speedup in training, the paper's beside the simulated one."""
    table = []
    over: list[Number] = []
    for cell, found in zip(chosen(), speedups(runs, chosen()), strict=True):
        over.append(found[-1].over(paper_measured(cell)))
        table.append([*shape(cell), *found, paper_tms(cell), paper_measured(cell), over[-1]])
    served = [(cell, ratio) for cell, ratio in zip(chosen(), over, strict=True) if ratio.value is not None]
    long = [ratio for cell, ratio in served if cell.block >= LONG]
    refused, over = [ratio for ratio in over if ratio.value is None], [ratio for _, ratio in served]
    heads = columns(
        f"{SHAPE}; Ring, simulated | ms; Striped, simulated | ms; speedup, simulated || .3f; maximum, paper || .2f;"
        " measured, paper || .2f; simulated / measured || .3f"
    )
    return Section(
        "Training steps, simulated",
        text(
            "Whole steps on cluster={clusters}: forward, backward with whole layers recomputed, loss, update, and the"
            " sums over tensor-parallel devices where the mesh has them. The simulated speedup is {low:.2f} to"
            " {high:.2f} times the one that the paper measured in {cells:.0f} cells, {median:.2f} times in the median;"
            " in blocks of {long} tokens and more it is {long_low:.2f} to {long_high:.2f} times. Nothing is fitted to"
            " it. The paper's attention was no fused kernel, ran in TF32 on A100, and skipped masked work by tiles of"
            " 2048 x 4096; ours has FlashAttention-2's rates, on TPU v4 scaled by the peaks, so that the balance"
            " matters already on short sequences. Parameters of the 7B model on A100, and of all on TPU v4, are split"
            " over the sequence's devices too, without which fewer cells would fit. {refused:.0f} cells don't fit even"
            " so and have no number: each device of a tensor-parallel group keeps the whole input of every layer.",
            clusters=" and ".join(CLUSTERS.values()),
            low=least(over),
            high=most(over),
            cells=tally(len(over), over),
            refused=tally(len(refused), [*over, *refused]),
            median=median(over),
            long=LONG,
            long_low=least(long),
            long_high=most(long),
        ),
        by_device(served),
        Table(
            "striped-training", "Speedup in training steps (tables 2, 3, 5 and appendix A)", heads, table, shown_rows=17
        ),
    )
