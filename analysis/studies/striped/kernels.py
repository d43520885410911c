"""Striped against Ring Attention measured with CPU ranks, and the speedup that ranks which share cores can show."""

from __future__ import annotations

import matplotlib as mpl

from sp_bench.analysis import verdict
from sp_bench.analysis.figure import STYLE, Figure, Panels, colours, labelled
from sp_bench.analysis.frames import iterations, samples
from sp_bench.analysis.number import Number, computed, ends, step_ms, valued
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.striped.model import shared_limit, tiles_computed
from sp_bench.machine import cores_here
from sp_bench.records import Record

SIZES = ((2, 4096), (4, 4096), (4, 8192))
"""Ranks and tokens. On 2 cores, 2 ranks have a core each, and 4 ranks share them."""
ITERATIONS = 10
KERNEL_STEP = 512
"""Tokens: torch's kernel for CPUs computes causal blocks in steps of so many keys (docs/results/executor.md)."""
SHARED = source("striped.shared-cores")
STEPPED = source("striped.shared-cores-steps")
LIMITS = ("limit, a core for each rank", "limit on these cores", "limit with the kernel's steps")


def ask(runs: Runs) -> list[tuple[Record, Record]]:
    """The records of Ring and Striped for each size, timed in turn."""
    points = []
    for ranks, seqlen in SIZES:
        keys = {"cluster": "local", "mode": "measure", "gpus": ranks, "seqlen": seqlen, "heads": 4, "head_dim": 64}
        keys |= {"dtype": "float32", "phase": "forward", "iters": ITERATIONS, "warmup": 1, "parts": False}
        points += [point(method="ring", layout="contiguous", **keys), point(method="striped", **keys)]
    records = runs.ask(points)
    return list(zip(records[::2], records[1::2], strict=True))


def speedup(ring: Record, striped: Record, runs: Runs) -> tuple[Number, Number, Number]:
    """Ring's median step over Striped's, and its 95% interval; none of them where a point was not measured."""
    value = step_ms(ring).over(step_ms(striped))
    if value.value is None:
        return value, value, value
    files = ((record, runs.folder / f"{record.run_id}.json") for record in (striped, ring))
    steps = (iterations(samples(record, file))["step"].to_numpy() for record, file in files)
    ratio = verdict.of_medians(*steps, in_turn=True)
    low, high = (Number(end, value.kind, value.sources, ratio.why) for end in (ratio.low, ratio.high))
    return value, low, high


def measured(runs: Runs) -> Section:
    """The measured speedup on this machine's cores, beside the limits of such a machine."""
    cores, table = cores_here(), []
    notes: dict[str, None] = {}
    for (ranks, seqlen), (ring, striped) in zip(SIZES, ask(runs), strict=True):
        notes |= dict.fromkeys(note for record in (ring, striped) for note in record.notes or ())
        block = seqlen // ranks
        stepped = shared_limit(ranks, cores, tiles_computed(block, KERNEL_STEP, KERNEL_STEP))
        limits = [computed(shared_limit(ranks, n), SHARED) for n in (ranks, cores)] + [computed(stepped, STEPPED)]
        numbers = speedup(ring, striped, runs)
        times = step_ms(ring), step_ms(striped)
        table.append([ranks, cores, seqlen, block, *times, *numbers, *limits, numbers[0].over(limits[2])])
    parts = {"figure": _figure(table), "rows": table}
    if not (ratios := valued(row[-1] for row in table)):
        return section("striped.unmeasured", why=table[0][6], **parts)
    told = f"Notes of these records: {'; '.join(notes)}." if notes else "No record says that its ranks share cores."
    return section("striped.measured", **ends(ratios), told=told, **parts)


def _figure(table: list[list]) -> Figure:
    panels = Panels(height=3.4)
    axis = panels.first
    for x, (value, low, high) in enumerate(row[6:9] for row in table):
        if value.value is not None:
            ends = None
            if low.value is not None and high.value is not None:
                ends = [[max(value.value - low.value, 0)], [max(high.value - value.value, 0)]]
            with mpl.rc_context(STYLE):
                axis.errorbar(x, value.value, ends, fmt="o", color="black", capsize=5)
    axis.plot([], [], "o", color="black", label=labelled("speedup, 95% interval", "measured"))
    for i, (name, colour) in enumerate(colours(LIMITS).items()):
        style = {"color": colour, "marker": "^sD"[i], "markersize": 7, "fillstyle": "none", "linestyle": "none"}
        panels.line({x + 0.12 * (i + 1): row[9 + i] for x, row in enumerate(table)}, name, **style)
    axis.axhline(1, color="grey", linewidth=1)
    axis.set_xticks(range(len(table)), [f"{row[0]} ranks,\n{row[2] // 1024}k tokens" for row in table])
    axis.set(xlim=(-0.4, len(table) - 0.3), ylabel="speedup of Striped over Ring")
    axis.set_ylim(bottom=0)
    panels.legend_below(2, fontsize=8)
    panels.numbers += [number for row in table for number in row[6:9]]
    title = f"Striped over Ring, measured on {cores_here()} cores"
    return panels.figure("striped-measured", title, f"Forward, {ITERATIONS} iterations of each, in turn.")
