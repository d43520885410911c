"""Case study I of TokenRing: a diffusion transformer, its attention and its whole step."""

from __future__ import annotations

from sp_bench.analysis.number import Number, computed, least, most, of_record, record_source
from sp_bench.analysis.plans import choice_of
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.plan.ops import Transfer
from sp_bench.plan.tensors import O, Q
from sp_bench.records import Record

METHODS = ("ring", "tokenring")
PLACES = (
    ("a10_pcie", 4, 6000),
    ("a10_pcie", 4, 24000),
    ("a10_pcie", 4, 96000),
    ("h100_ndr400", 4, 24000),
    ("h100_ndr400", 8, 24000),
)
"""Clusters, GPUs and tokens. The first is the paper's testbed, with its number of GPUs."""


def sends_both(record: Record) -> Number:
    """The share of steps of a forward that send Q and a partial output."""
    plan = choice_of(record).plans["forward"]
    sent = {(step, op.tensor) for op, step in zip(plan.ops, plan.steps, strict=True) if isinstance(op, Transfer)}
    steps = range(max(plan.steps) + 1)
    share = sum((step, Q) in sent and (step, O) in sent for step in steps) / len(steps)
    return computed(share, record_source(record))


def asked(cluster: str, gpus: int, seqlen: int, method: str, workload: str) -> Point:
    """The step of DiT-XL, or the forward of its attention alone."""
    keys = {"model": "dit_xl", "cluster": cluster, "gpus": gpus, "seqlen": seqlen, "method": method}
    phase = {"phase": "forward"} if workload == "attention" else {}
    return point(workload=workload, layout="contiguous", mode="simulate", **keys, **phase)


def dit(runs: Runs) -> Section:
    """DiT-XL by Ring and by TokenRing."""
    kinds = ("attention", "dit")
    found = runs.by_key({(*p, m, k): asked(*p, m, k) for p in PLACES for m in METHODS for k in kinds})
    table: list[list[Cell]] = []
    gains: dict[str, list[Number]] = {"attention": [], "forward": [], "step": []}
    for place in PLACES:
        times = []
        for name, kind, field in (
            ("attention", "attention", "forward_ms_median"),
            ("forward", "dit", "forward_ms_median"),
            ("step", "dit", "step_ms_median"),
        ):
            ring, token = (of_record(found[*place, method, kind], field) for method in METHODS)
            gains[name].append(ring.over(token))
            times += [ring, token, gains[name][-1]]
        table.append([*place, *times])
    heads = "; ".join(
        f"{name}, Ring | ms; {name}, TokenRing | ms; {name}, Ring / TokenRing || .3f"
        for name in ("attention of a layer", "forward", "step")
    )
    both = sends_both(found[*PLACES[0], "tokenring", "attention"])
    return Section(
        "Case study I: a diffusion transformer",
        text(
            "The paper puts TokenRing into xDiT on four GPUs and prints no time of it. Ours is DiT-XL (28 layers, 16"
            " heads of 72), full attention, simulated: the attention of one layer, the forward of the model, which is"
            " what xDiT computes, and a training step. Counted from the plan, TokenRing sends both Q and an output in"
            " {both:.0%} of its steps on four GPUs: one of five, the last of which is the paper's additional phase. The"
            " paper calls the benefit there modest. Ring's time over TokenRing's is {low:.2f} to {high:.2f} for the"
            " attention, {low_forward:.2f} to {high_forward:.2f} for the forward, {low_step:.2f} to {high_step:.2f} for"
            " the step.",
            both=both,
            low=least(gains["attention"]),
            high=most(gains["attention"]),
            low_forward=least(gains["forward"]),
            high_forward=most(gains["forward"]),
            low_step=least(gains["step"]),
            high_step=most(gains["step"]),
        ),
        Table("tokenring-dit", "DiT-XL by Ring and TokenRing", columns(f"cluster; GPUs; tokens; {heads}"), table),
    )
