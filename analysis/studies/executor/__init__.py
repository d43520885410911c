"""The cost of executing a plan: the interpreter's share of a step, and blocks against one call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from sp_bench.analysis.measured import ratio
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.verdict import Ratio, of_medians
from sp_bench.calibrating.clock import Clock, cpu_seconds
from sp_bench.kernels import BlockKernel, choose
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.transport import AloneTransport

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


class Rank:
    """Rank 0 of RANKS, executed alone."""

    def __init__(self, method: str, options: dict[str, object], seqlen: int, mask: Mask, kv_heads: int = HEADS) -> None:
        chosen = build(method, options)
        whole = Problem(
            n=RANKS, seqlen=seqlen, heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, mask=mask, dtype="float32",
            layout=mask.layout(chosen.layout),
        )  # fmt: skip
        self.problem = chosen.dealt(whole)
        plans = {phase: chosen.plan(self.problem, phase, COMPUTE_BOUND) for phase in PHASES}
        self.engine = Engine(plans, self.problem, "auto", torch.device("cpu"), transport=AloneTransport())
        self.inputs = inputs(seqlen // RANKS, HEADS, kv_heads)

    def step(self, action: Action = Action.EVERYTHING) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        q, k, v, dout = self.inputs
        started = time.perf_counter()
        _, saved = self.engine.forward(q, k, v, action)
        between = time.perf_counter()
        self.engine.backward(dout, saved, action)
        return between - started, time.perf_counter() - between


class Overhead(NamedTuple):
    """One step: its seconds in total and in its parts, and its number of operations."""

    total_s: float
    kernels_s: float
    folds_s: float
    waits_s: float
    operations: int

    @property
    def interpreter_s(self) -> float:
        """The rest of the step, which is the interpreter's."""
        return self.total_s - self.kernels_s - self.folds_s - self.waits_s


def overhead(rank: Rank) -> Overhead:
    """The step with the median total, after one that isn't counted."""
    operations = sum(len(plan.ops) for plan in rank.engine.plans.values())
    found = []
    for _ in range(1 + REPETITIONS):
        total_s = sum(rank.step())
        spent = [rank.engine.spent(phase) for phase in PHASES]
        parts = (sum(getattr(s, name) for s in spent) for name in ("kernels_s", "folds_s", "waits_s"))
        kernels_s, folds_s, waits_s = parts
        found.append(Overhead(total_s, kernels_s, folds_s, waits_s, operations))
    return sorted(found[1:])[REPETITIONS // 2]


def allocations(rank: Rank) -> tuple[int, float]:
    """The number of allocations in one step's blocks and folds, and their sum in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rank.step(Action.COMPUTE)
    sizes = [event.nbytes() for event in _memory_events(profiled) if event.nbytes() > 0]
    return len(sizes), sum(sizes) / 1e6


def _memory_events(profiled: profile) -> list[Any]:
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    return [event for event in results.events() if event.name() == "[memory]"]


def inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int = HEAD_DIM, dtype: str = "float32", device: str = "cpu"
) -> list[torch.Tensor]:
    """q, k, v and dout: (1, tokens, heads, head_dim) each, k and v with kv_heads."""
    shapes = [(1, tokens, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, device=device).to(getattr(torch, dtype)) for shape in shapes]


def one_call_s(kernel: BlockKernel, tensors: Sequence[torch.Tensor], mask: Mask, clock: Clock) -> tuple[float, float]:
    """Seconds of one call of the kernel on all of `tensors` (as `inputs` gives them), forward and backward."""
    (q, k, v, dout), kind = tensors, RegionKind(mask.name)
    forward_s, (out, lse) = clock(kernel.forward, q, k, v, kind)
    backward_s, _ = clock(kernel.backward, dout, q, k, v, out, lse, kind)
    return forward_s, backward_s


def monolithic_s(seqlen: int, mask: Mask, heads: int, kv_heads: int) -> tuple[float, float]:
    """Seconds of one call of the kernel on the whole sequence, forward and backward."""
    kernel = choose("auto", "cpu", "float32", HEAD_DIM)
    return one_call_s(kernel, inputs(seqlen, heads, kv_heads), mask, cpu_seconds)


def efficiency(seqlen: int, mask: Mask, kv_heads: int) -> list[Ratio]:
    """The time of one call on the whole sequence over the time of all ranks' blocks and folds (RANKS times one rank's).

    Returns the ratios of the forward's kernels alone, of the forward, and of the backward.
    """
    rank = Rank("ring", {}, seqlen, mask, kv_heads)
    rank.step()
    whole, blocks = [], []
    for _ in range(REPETITIONS):
        forward, backward = monolithic_s(seqlen, mask, HEADS, kv_heads)
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
    for method, options in METHODS:
        rank = Rank(method, options, OVERHEAD_TOKENS * RANKS, FULL)
        found, (count, megabytes) = overhead(rank), allocations(rank)
        parts = {"kernels": found.kernels_s, "folds": found.folds_s, "waiting for lanes": found.waits_s}
        parts |= {"interpreter": found.interpreter_s}
        row = {"method": method, "operations": str(found.operations), "step": f"{1e3 * found.total_s:.1f} ms"}
        row |= {name: f"{seconds / found.total_s:.2%}" for name, seconds in parts.items()}
        row |= {"interpreter, each operation": f"{1e6 * found.interpreter_s / found.operations:.0f} us"}
        rows.append(row | {"allocations": f"{count} ({megabytes:.0f} MB)"})
        print(rows[-1], flush=True)
    return rows


def blocks(_: Runs) -> list[dict[str, str]]:
    """The efficiency of blocks: a row for each sequence length, mask and number of KV heads."""
    torch.set_num_threads(1)
    rows = []
    for seqlen, (mask, kv_heads) in itertools.product(EFFICIENCY_SEQLENS, EFFICIENCY_OF):
        found = [ratio(each, digits=3) for each in efficiency(seqlen, mask, kv_heads)]
        row = {"tokens": str(seqlen), "tokens of a block": str(seqlen // RANKS), "KV heads": str(kv_heads)}
        row |= {"mask": mask.name, "layout": mask.balanced[0]}
        parts = ("forward, kernels alone [95%]", "forward [95%]", "backward [95%]")
        rows.append(row | dict(zip(parts, found, strict=True)))
        print(rows[-1], flush=True)
    return rows
