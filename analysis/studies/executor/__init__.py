"""The cost of executing a plan: the interpreter's share of a step, and blocks against one call."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from sp_bench.analysis.alone import Rank, inputs, one_call_s
from sp_bench.analysis.measured import ratio
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.verdict import Ratio, of_medians
from sp_bench.calibrating.clock import cpu_seconds
from sp_bench.kernels import choose
from sp_bench.methods import build
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.run.executor import Action

HEADS, HEAD_DIM, RANKS, REPETITIONS = 8, 64, 8, 9
OVERHEAD_TOKENS = 1024
"""Tokens of a block in the measurement of the interpreter."""
EFFICIENCY_SEQLENS = (4096, 8192)
EFFICIENCY_OF = ((FULL, HEADS), (FULL, HEADS // 4), (CAUSAL, HEADS))
"""The mask and the number of KV heads of each measurement."""
METHODS: tuple[tuple[str, dict[str, object]], ...] = (
    ("ring", {}),
    ("mesh", {"tile": (2, 4)}),
    ("tokenring", {}),
    ("ulysses", {}),
    ("startrail", {"team": 2}),
)


def attention(seqlen: int, mask: Mask, layout: str = "auto", kv_heads: int = HEADS) -> Problem:
    """The attention of RANKS ranks."""
    return Problem(
        n=RANKS, seqlen=seqlen, heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, mask=mask, dtype="float32",
        layout=mask.layout(layout),
    )  # fmt: skip


class Overhead(NamedTuple):
    """One step: its seconds in total, in kernels, folds and waits for lanes."""

    total_s: float
    kernels_s: float
    folds_s: float
    waits_s: float

    @property
    def interpreter_s(self) -> float:
        """The rest of the step, which is the interpreter's."""
        return self.total_s - self.kernels_s - self.folds_s - self.waits_s


def overhead(rank: Rank) -> Overhead:
    """The step with the median total, after one that isn't counted."""
    overheads = []
    for _ in range(1 + REPETITIONS):
        total_s = sum(rank.step())
        spent = [rank.engine.spent(phase) for phase in PHASES]
        overheads.append(Overhead(total_s, *(sum(getattr(s, name) for s in spent) for name in Overhead._fields[1:])))
    return sorted(overheads[1:])[REPETITIONS // 2]


def allocations(rank: Rank) -> tuple[int, float]:
    """The number of allocations in one step's blocks and folds, and their sum in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rank.step(Action.COMPUTE)
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events: list[Any] = list(profiled.profiler.kineto_results.events())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return len(sizes), sum(sizes) / 1e6


def efficiency(seqlen: int, mask: Mask, kv_heads: int) -> list[Ratio]:
    """The time of one call on the whole sequence over the time of all ranks' blocks and folds (RANKS times one rank's).

    Returns the ratios of the forward's kernels alone, of the forward, and of the backward.
    """
    ring = build("ring", {})
    problem = attention(seqlen, mask, ring.layout, kv_heads)
    rank, kernel = Rank(ring, problem), choose("auto", "cpu", "float32", HEAD_DIM)
    rank.step()
    whole, blocks = [], []
    for _ in range(REPETITIONS):
        forward, backward = one_call_s(kernel, inputs(problem, seqlen), mask, cpu_seconds)
        whole.append((forward, forward, backward))
        blocks.append(np.sum([_kernels_and_step(rank) for _ in range(RANKS)], axis=0))
    return [of_medians(*(np.array(x)[:, part] for x in (blocks, whole)), in_turn=True) for part in range(3)]


def _kernels_and_step(rank: Rank) -> tuple[float, float, float]:
    forward, backward = rank.step(Action.COMPUTE)
    return rank.engine.spent("forward").kernels_s, forward, backward


def interpreter(_: Runs) -> list[dict[str, str]]:
    """The interpreter's overhead: a row for each method, with blocks of OVERHEAD_TOKENS."""
    torch.set_num_threads(1)
    rows = []
    for name, options in METHODS:
        method = build(name, options)
        rank = Rank(method, attention(OVERHEAD_TOKENS * RANKS, FULL, method.layout))
        operations = sum(len(plan.ops) for plan in rank.plans.values())
        spent, (count, megabytes) = overhead(rank), allocations(rank)
        parts = {"kernels": spent.kernels_s, "folds": spent.folds_s, "waiting for lanes": spent.waits_s}
        parts |= {"interpreter": spent.interpreter_s}
        row = {"method": name, "operations": str(operations), "step": f"{1e3 * spent.total_s:.1f} ms"}
        row |= {name: f"{seconds / spent.total_s:.2%}" for name, seconds in parts.items()}
        row |= {"interpreter, each operation": f"{1e6 * spent.interpreter_s / operations:.0f} us"}
        rows.append(row | {"allocations": f"{count} ({megabytes:.0f} MB)"})
        print(rows[-1], flush=True)
    return rows


def blocks(_: Runs) -> list[dict[str, str]]:
    """The efficiency of blocks: a row for each sequence length, mask and number of KV heads."""
    torch.set_num_threads(1)
    parts, rows = ("forward, kernels alone [95%]", "forward [95%]", "backward [95%]"), []
    for seqlen, (mask, kv_heads) in product(EFFICIENCY_SEQLENS, EFFICIENCY_OF):
        ratios = [ratio(each, digits=3) for each in efficiency(seqlen, mask, kv_heads)]
        row = {"tokens": str(seqlen), "tokens of a block": str(seqlen // RANKS), "KV heads": str(kv_heads)}
        row |= {"mask": mask.name, "layout": mask.balanced[0]}
        rows.append(row | dict(zip(parts, ratios, strict=True)))
        print(rows[-1], flush=True)
    return rows
