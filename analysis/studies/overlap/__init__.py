"""The hidden share of the shorter part: steps over shaped links beside their blocks and transfers. Needs root."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from sp_bench.analysis.measured import interval, known
from sp_bench.analysis.runs import Runs
from sp_bench.calibrating.speed import cluster_at, speed_of
from sp_bench.errors import RequestError
from sp_bench.labs.shaped.description import OF_CORES
from sp_bench.machine import cores_here
from sp_bench.point import Request, resolve
from sp_bench.point.choose import choose
from sp_bench.records import Record
from sp_bench.simulate import simulate

COMMON = ("cluster=shaped", "heads=8", "head_dim=64", "dtype=float32", "causal=false")
BALANCED = ("warmup=0", "iters=3", "timeout_s=600")
LONGEST, LONG, SHORT = ("seqlen=32k", "kv_heads=2"), ("seqlen=16k", "kv_heads=2"), ("seqlen=8k", "kv_heads=8")
SEARCHED = ("method=mesh", "method.schedule=searched")
SLICED = (*SEARCHED, "method.slices=2")
LONG_POINTS = (
    ("8", 3.25e6, (*LONG, "method=ring")),
    ("8", 3.25e6, (*LONG, *SLICED, "method.tile=[2,4]")),
    ("16", 1.74e6, (*LONGEST, "method=ring")),
    ("16", 1.74e6, (*LONGEST, *SLICED, "method.tile=[4,4]")),
)
"""Ranks, the balanced link rate in bytes/s for cores as fast as in conf/cluster/shaped.yaml, and other overrides."""
OTHER_POINTS = (
    ("8", 3.25e6, (*LONG, *SEARCHED, "method.tile=[2,4]")),
    ("8", 25.9e6, (*SHORT, "method=ring")),
    ("8", 14.9e6, (*SHORT, *SEARCHED, "method.tile=[4,2]")),
    ("8", 14.9e6, (*SHORT, *SLICED, "method.tile=[4,2]")),
    ("16", 9.9e6, (*SHORT, *SEARCHED, "method.tile=[4,4]")),
    ("16", 9.9e6, (*SHORT, *SLICED, "method.tile=[4,4]")),
)
"""Points in which blocks wait for hops on any machine, or hops are short."""
FIRST, LAST = "seed=0", "seed=1"
"""The speed of the cores is measured twice, by the same step with other numbers."""
CHANGED = 0.1
"""Cores whose speed has changed by more make rows that can't be compared."""
FREE: dict[str, float] = dict.fromkeys((*OF_CORES, "crowd_latency_s", "turn_s", "ahead_bytes"), 0.0)
"""Figures of hosts whose messages use no cores, and which share links and cores evenly."""


@cache
def speed_at(runs: Runs, time: str) -> float:
    """The speed of the cores over the speed in the cluster's file, from the blocks of a short step at FIRST or LAST."""
    (record,) = runs.ok([(*COMMON, *SHORT, "warmup=1", "iters=2", "gpus=8", "method=ring", time)])
    return speed_of(_simulated_request(record), record)


def speed(runs: Runs) -> str:
    """The speed in words."""
    return f"{speed_at(runs, FIRST):.2f}"


def overlap(runs: Runs, points: Sequence[tuple[str, float, tuple[str, ...]]]) -> list[dict[str, str]]:
    """The step of each point over the longer of its two parts, on cores of the speed that they have now."""
    rates = [float(f"{speed_at(runs, FIRST) * rate:.3g}") for _, rate, _ in points]
    overrides = [
        (*COMMON, *BALANCED, f"gpus={gpus}", f"cluster.hosts.link_bytes_per_s={rate}", *keys)
        for (gpus, _, keys), rate in zip(points, rates, strict=True)
    ]
    rows = []
    for (gpus, *_), rate, record in zip(points, rates, runs.ok(overrides), strict=True):
        blocks, transfers = known(record.compute_only_ms_median), known(record.communication_only_ms_median)
        blocks_of = known(record.compute_only_forward_ms_median), known(record.compute_only_backward_ms_median)
        transfers_of = (
            known(record.communication_only_forward_ms_median),
            known(record.communication_only_backward_ms_median),
        )
        step, longer, cores = known(record.step_ms_median), max(blocks, transfers), cores_here()
        longer_of_each = sum(map(max, blocks_of, transfers_of))
        on_cores = known(record.compute_only_core_ms_mean) + known(record.communication_only_core_ms_mean)
        rows.append({
            "ranks": gpus,
            "tokens": f"{record.seqlen // 1024}k",
            "KV heads": str(record.kv_heads),
            "link": f"{rate * 8e-6:.3g} Mbit/s",
            "method": f"{record.method} {record.variant or ''}",
            "step, ms [95%]": interval(record),
            "blocks alone": "{:.0f} + {:.0f}".format(*blocks_of),
            "transfers alone": "{:.0f} + {:.0f}".format(*transfers_of),
            "shorter / longer": f"{min(blocks, transfers) / longer:.2f}",
            "**step / longer**": f"**{step / longer:.2f}**",
            "**step / longer of each phase**": f"**{step / longer_of_each:.2f}**",
            "cores' work for both": f"{on_cores / cores:.0f}",
            "step / longest of the three": f"{step / max(longer, on_cores / cores):.2f}",
            f"cores busy, of {cores}": f"{known(record.core_ms_mean) / step:.2f}",
            "simulated": f"{simulated_ms(record) / longer:.2f}",
            "simulated, plan alone": f"{simulated_ms(record, **FREE) / longer:.2f}",
        })  # fmt: skip
    return rows


long, other = partial(overlap, points=LONG_POINTS), partial(overlap, points=OTHER_POINTS)


def simulated_ms(record: Record, **hosts: float) -> float:
    """A measured step simulated in ms, with cores of the measured speed and these figures of hosts."""
    request = _simulated_request(record)
    choice, cluster = choose(request), cluster_at(request, speed_of(request, record), **hosts)
    return 1e3 * sum(simulate(plan, choice.problem, cluster).makespan_s for plan in choice.plans.values())


def last_speed(runs: Runs) -> str:
    """The speed at the end, the last of the page's slots, in words. Raises RequestError if it isn't that of before."""
    first, last = speed_at(runs, FIRST), speed_at(runs, LAST)
    if abs(last / first - 1) > CHANGED:
        rule = (
            f"cores were {first:.2f} times as fast as the cluster's file says at first, and {last:.2f} times at the end"
        )
        raise RequestError("study=overlap", rule, f"an idle machine, without the records in {runs.folder}, would work")
    return f"{last:.2f}"


def _simulated_request(record: Record) -> Request:
    return resolve({**(record.config or {}), "mode": "simulate"})
