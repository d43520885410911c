"""Training steps of the paper's 1B model simulated on A100s without tensor parallelism: the cells of its table 5."""

from __future__ import annotations

from sp_bench.analysis.number import Number, least, median, most, of_record
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped_maximum import SHAPE, paper_measured, paper_tms, shape
from sp_bench.analysis.studies.striped_model import Cell, cells
from sp_bench.analysis.studies.striped_simulated import CLUSTER, ask_pairs
from sp_bench.analysis.table import Table, columns

MODEL = {"1B": "llama_1b"}
"""The models whose head_dim the kernel figures have; the paper's table 5 is of the 1B model alone."""


def chosen() -> list[Cell]:
    """The cells without tensor parallelism: all devices share the sequence."""
    return [cell for cell in cells() if cell.device == "a100" and cell.tensor_parallel == 1 and cell.model in MODEL]


def step(cell: Cell) -> tuple[Point, Point]:
    """The simulated steps of Ring on contiguous tokens, and of Striped; whole layers are recomputed, as the paper's."""
    shared = {"model": MODEL[cell.model], "cluster": CLUSTER, "mode": "simulate", "gpus": cell.n}
    shared |= {"seqlen": cell.seqlen, "train__recompute": "full"}
    return point(method="ring", layout="contiguous", **shared), point(method="striped", **shared)


def training(runs: Runs) -> Section:
    """Each cell's speedup in training, the paper's beside the simulated one."""
    found = dict(zip(chosen(), ask_pairs(runs, [step(cell) for cell in chosen()]), strict=True))
    table = []
    over: list[Number] = []
    for cell, (ring, striped) in found.items():
        steps = of_record(ring, "step_ms_median"), of_record(striped, "step_ms_median")
        speedup = steps[0].over(steps[1])
        over.append(speedup.over(paper_measured(cell)))
        table.append([*shape(cell), *steps, speedup, paper_tms(cell), paper_measured(cell), over[-1]])
    heads = columns(
        f"{SHAPE}; Ring, simulated | ms; Striped, simulated | ms; speedup, simulated || .3f; maximum, paper || .2f;"
        " measured, paper || .2f; simulated / measured || .3f"
    )
    return Section(
        "Training steps of the 1B model, simulated on A100",
        text(
            "Whole steps on cluster={cluster}: forward, backward with whole layers recomputed, loss, update. The"
            " simulated speedup is {low:.2f} to {high:.2f} times the one that the paper measured, {median:.2f} times in"
            " the median. Nothing is fitted to it. The paper's attention ran in TF32 without a fused kernel and skipped"
            " masked work by tiles of 2048 x 4096 only; ours has FlashAttention-2's rates, so that the balance matters"
            " already on short sequences. Its other meshes (table 2 among them) split heads by tensor parallelism too,"
            " which no training step here does.",
            cluster=CLUSTER,
            low=least(over),
            high=most(over),
            median=median(over),
        ),
        Table("striped-training", "Speedup in training steps, 1B on A100 (table 5)", heads, table, shown_rows=17),
    )
