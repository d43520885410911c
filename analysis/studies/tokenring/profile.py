"""Figure 6 of TokenRing: the times of steps on four A10. One of them sets our link rate."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sp_bench.analysis.figure import Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, computed, least, most, of_record, record_source, total
from sp_bench.analysis.paper_tables import of_paper, rows
from sp_bench.analysis.plans import step_ends_ms
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.table import Cell
from sp_bench.records import Record

TESTBED = {"cluster": "a10_pcie", "gpus": 4, "seqlen": 24000, "phase": "forward", "layout": "zigzag"}
"""The setup of figure 6; heads and head_dim are the defaults of conf/config.yaml."""
HOP = source("tokenring.hop")
FULL = source("tokenring.full-block")
RATE = source("tokenring.rate")


def figure6(runs: Runs) -> Section:
    """The times of steps on four A10 with PCIe, Ring against TokenRing."""
    asked = ({"method": "ring"}, {"method": "tokenring"}, {"method": "tokenring", "trim": False})
    ring, trimmed, whole = runs.ask(point(**keys, **TESTBED) for keys in asked)
    paper = _paper_steps()
    ours = {"ring": _steps(ring), "tokenring": _steps(trimmed), "tokenring, whole Q": _steps(whole)}
    lines: list[list[Cell]] = []
    for name, steps in ours.items():
        method = name.partition(",")[0]
        fitted = "link rate set from it" if method == "ring" else "no"
        for step, number in enumerate(steps):
            printed = paper[method].get(step)
            compared = [printed, number, number.over(printed), fitted] if printed else ["not given", number, "-", "-"]
            lines.append([name, step, *compared])
    ratios = [ours["tokenring"][step].over(printed) for step, printed in paper["tokenring"].items()]
    low, high = least(ratios), most(ratios)
    all_of_token, all_of_ring = (of_record(record, "forward_ms_median") for record in (trimmed, ring))
    share = all_of_token.over(all_of_ring)
    modest = "is not one of the whole pass. The paper itself calls the benefit on 4 GPUs modest"
    values = {"printed": paper["ring"][0], "rows": lines, "figure": _steps_figure(paper, ours)}
    values |= {"word": "slower than" if low.known > 1 else "faster than" if high.known < 1 else "around", "low": low}
    values |= {"high": high, "rest": total(_steps(trimmed)[len(paper["tokenring"]) :]), "whole": all_of_token}
    values |= {"share": share, "ring": all_of_ring}
    return section(
        "tokenring.figure6",
        **values,
        verdict=modest if share.known > 0.95 else "is one of the whole pass too",
        **_fit(ring),
        **_mask(trimmed, paper["tokenring"][0]),
    )


def _paper_steps() -> dict[str, dict[int, Number]]:
    """The printed milliseconds by method and step. Ring's one number stands for its three steps with transfers."""
    by_method: dict[str, dict[int, Number]] = {"ring": {}, "tokenring": {}}
    for row in rows("token_ring_figure6"):
        method = row["method"].replace("_", "")
        steps = range(int(row["gpus"]) - 1) if row["step"] == "every step" else (int(row["step"]),)
        number = of_paper(float(row["time_ms"]), "token_ring_figure6", f"{row['method']}, {row['step']}")
        by_method[method] |= dict.fromkeys(steps, number)
    return by_method


def _steps(record: Record) -> list[Number]:
    """The milliseconds of each step: from the end of the step before to its own end, both on all ranks."""
    ends = step_ends_ms(record)
    return [Number(end - start, "simulated", (record_source(record),)) for start, end in pairwise((0.0, *ends))]


def _fit(ring: Record) -> dict[str, Any]:
    """The time of a hop at the cluster's uplink rate, and the source of that rate."""
    cluster = (ring.config or {})["cluster"]
    kv = 4.0 * ring.seqlen / ring.gpus * ring.heads * ring.head_dim
    hop = computed(kv / cluster["intra"]["uplink_bytes_per_s"] * 1e3, HOP)
    return {"source": cluster["sources"]["uplink_bytes_per_s"], "hop": hop}


def _mask(record: Record, printed: Number) -> dict[str, Any]:
    """Whether a printed step was long enough for a full block."""
    tokens, peak = record.seqlen / record.gpus, (record.config or {})["cluster"]["device"]["peak_tflops"]["bfloat16"]
    flops = 4 * tokens**2 * record.heads * record.head_dim
    shortest = computed(flops / peak / 1e9, FULL)
    mask = "was causal" if shortest.known > printed.known else "may have been full"
    rate = computed(flops / 2 / printed.known / 1e9, RATE, *printed.sources)
    return {"shortest": shortest, "step0": printed, "mask": mask, "rate": rate}


def _steps_figure(paper: dict[str, dict[int, Number]], ours: dict[str, list[Number]]) -> Figure:
    canvas, axes = new_figure(height=3.0)
    axis, colour = axes[0, 0], colours(["ring", "tokenring"])
    shown = [("ring", "paper"), ("ring", "simulated"), ("tokenring", "paper"), ("tokenring", "simulated")]
    used: list[Number] = []
    for place, (method, kind) in enumerate(shown):
        numbers = dict(enumerate(ours[method])) if kind == "simulated" else paper[method]
        used += numbers.values()
        axis.bar(
            [step + (place - 1.5) * 0.2 for step in numbers],
            [number.known for number in numbers.values()],
            width=0.2,
            color=colour[method],
            edgecolor="black",
            hatch="//" if kind == "paper" else None,
            alpha=0.55 if kind == "paper" else 1.0,
            label=labelled(method, kind),
        )
    axis.set(xlabel="step", ylabel="time, ms", xticks=range(max(map(len, ours.values()))))
    axis.grid(visible=False, axis="x")
    axis.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 1.22))
    return Figure(
        "tokenring-figure6-steps",
        "Times of steps on 4 x A10, 24,000 tokens",
        canvas,
        sources(used),
        "The paper gives no time for a step without a hatched bar. Ring's first three set the link rate.",
    )
