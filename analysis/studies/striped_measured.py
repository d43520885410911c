"""Striped against Ring Attention measured with CPU ranks, and what ranks that share cores can show of it."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from sp_bench.analysis import verdict
from sp_bench.analysis.figure import STYLE, Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.frames import iterations, samples
from sp_bench.analysis.number import Number, formula, of_record
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped_model import shared_limit, tiles_computed
from sp_bench.analysis.table import Column, Table
from sp_bench.machine import cores_here
from sp_bench.records import Record

SIZES = ((2, 4096), (4, 4096), (4, 8192))
"""Ranks and tokens. With 2 ranks on 2 cores each has one to itself; with 4 they share them."""
ITERATIONS = 10
KERNEL_STEP = 512
"""Tokens: torch's kernel for CPUs computes causal blocks in steps of so many keys (docs/results/executor.md)."""
SHARED = formula(
    "striped-shared-cores",
    "the larger of the busiest rank's work and all the work over the cores, Ring's over Striped's; Ring: n masked and"
    " n (n - 1) / 2 full blocks, Striped: n^2 masked ones, which cost half of a full one",
    "Brandon et al. 2023, section 3, for ranks that share cores",
)
STEPPED = formula(
    "striped-shared-cores-steps",
    f"as striped-shared-cores, but a masked block costs the share of its tiles of {KERNEL_STEP} x {KERNEL_STEP} that"
    " have an unmasked element",
    "docs/results/executor.md: torch's kernel for CPUs",
)


def ask(runs: Runs) -> list[tuple[Record, Record]]:
    """(ring, striped) for each size, timed in turn."""
    points = []
    for ranks, seqlen in SIZES:
        keys = {"cluster": "local", "mode": "measure", "gpus": ranks, "seqlen": seqlen, "heads": 4, "head_dim": 64}
        keys |= {"dtype": "float32", "phase": "forward", "iters": ITERATIONS, "warmup": 1, "parts": False}
        points += [point(method="ring", layout="contiguous", **keys), point(method="striped", **keys)]
    found = runs.ask(points)
    return list(zip(found[::2], found[1::2], strict=True))


def speedup(ring: Record, striped: Record, runs: Runs) -> tuple[Number, Number, Number]:
    """Ring's median step over Striped's, and its 95% interval; none where a point was not measured."""
    both = of_record(ring, "step_ms_median"), of_record(striped, "step_ms_median")
    if any(number.value is None for number in both):
        missing = both[0].over(both[1])
        return missing, missing, missing
    files = ((record, runs.folder / f"{record.run_id}.json") for record in (striped, ring))
    steps = (iterations(samples(record, file))["step"].to_numpy() for record, file in files)
    ratio = verdict.of_medians(*steps, in_turn=True)
    sourced = both[0].over(both[1])
    bounds = (Number(value, sourced.kind, sourced.sources, ratio.why) for value in (ratio.low, ratio.high))
    return sourced, *bounds  # type: ignore[return-value]


def measured(runs: Runs) -> Section:
    """The speedup on this machine's cores beside what such a machine can show."""
    cores = cores_here()
    table, shown = [], []
    notes: dict[str, None] = {}
    for (ranks, seqlen), (ring, striped) in zip(SIZES, ask(runs), strict=True):
        notes |= dict.fromkeys(note for record in (ring, striped) for note in record.notes or ())
        block = seqlen // ranks
        share = tiles_computed(block, KERNEL_STEP, KERNEL_STEP)
        limits = (
            Number(shared_limit(ranks, ranks), "computed", (SHARED,)),
            Number(shared_limit(ranks, cores), "computed", (SHARED,)),
            Number(shared_limit(ranks, cores, share), "computed", (STEPPED,)),
        )
        numbers = speedup(ring, striped, runs)
        shown.append((f"{ranks} ranks,\n{seqlen // 1024}k tokens", numbers, limits))
        times = (of_record(record, "step_ms_median") for record in (ring, striped))
        table.append([ranks, cores, seqlen, block, *times, *numbers, *limits, numbers[0].over(limits[2])])
    ratios = [row[-1] for row in table if row[-1].value is not None]
    columns = (
        *(Column("ranks"), Column("cores"), Column("seqlen", "tokens"), Column("block", "tokens")),
        *(Column("Ring", "ms", ".0f"), Column("Striped", "ms", ".0f")),
        *(Column("speedup", "", ".2f"), Column("95%, low", "", ".2f"), Column("95%, high", "", ".2f")),
        *(Column("limit, a core each", "", ".3g"), Column("limit, these cores", "", ".3g")),
        *(Column("with the kernel's steps", "", ".2f"), Column("measured over that", "", ".2f")),
    )
    told = f" Of these records: {'; '.join(notes)}." if notes else " No record says that its ranks share cores."
    found = (
        text(
            "Measured on this machine, forward, Ring and Striped in turn. The speedup is {least:.2f} to"
            " {most:.2f} times what the cores and the kernel's steps leave of the limit. Where ranks share cores, a"
            " rank of Ring that has nothing to do leaves its core to the others, so that the imbalance costs little or"
            " nothing; what Striped can still lose is the kernel's, which computes more than half of a masked block,"
            " and Striped has only masked ones. What as many devices would make of it such a machine can't show."
            f"{told} A few iterations on cores that"
            " others may use: the interval says how far they agree, not whether another day would.",
            least=min(ratios, key=lambda number: number.known),
            most=max(ratios, key=lambda number: number.known),
        )
        if ratios
        else text("No point could be measured: {why}", why=table[0][6])
    )
    title = "Striped against Ring on this machine's cores"
    return Section(
        "Attention alone, measured with CPU ranks",
        [found, _figure(shown), Table("striped-measured", title, columns, table)],
    )


Shown = tuple[str, tuple[Number, Number, Number], tuple[Number, Number, Number]]


def _figure(shown: list[Shown]) -> Figure:
    canvas, axes = new_figure(height=3.4)
    axis = axes[0][0]
    numbers = [number for _, measured, limits in shown for number in (*measured, *limits)]
    with mpl.rc_context(STYLE):
        for x, (_, (value, low, high), _) in enumerate(shown):
            if value.value is not None:
                whiskers = None
                if low.value is not None and high.value is not None:
                    whiskers = [[max(value.value - low.value, 0)], [max(high.value - value.value, 0)]]
                axis.errorbar(x, value.value, whiskers, fmt="o", color="black", capsize=5)
        axis.plot([], [], "o", color="black", label=labelled("speedup, 95% interval", "measured"))
        labels = ("limit, a core for each rank", "limit on these cores", "the same with the kernel's steps")
        palette = colours(labels)
        for i, (label, marker) in enumerate(zip(labels, "^sD", strict=True)):
            values = [limits[i].known for *_, limits in shown]
            axis.plot(
                np.arange(len(shown)) + 0.12 * (i + 1),
                values,
                marker,
                markersize=7,
                color=palette[label],
                fillstyle="none",
                label=labelled(label, "computed"),
            )
        axis.axhline(1, color="grey", linewidth=1)
        axis.set_xticks(range(len(shown)), [label for label, *_ in shown])
        axis.set_xlim(-0.4, len(shown) - 0.3)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("speedup of Striped over Ring")
        canvas.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return Figure(
        "striped-measured",
        f"Striped over Ring, measured on {cores_here()} cores",
        canvas,
        sources(numbers),
        f"Forward, {ITERATIONS} iterations of each, in turn.",
    )
