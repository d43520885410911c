"""Fused blocks against one call, on one core and over shaped links. one_core=true leaves out links, which need root."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sp_bench.analysis.alone import Rank, inputs, one_call_s
from sp_bench.analysis.measured import interval, known, ratio
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.verdict import of_medians
from sp_bench.calibrating.clock import Clock
from sp_bench.kernels import choose
from sp_bench.methods import build
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block
from sp_bench.plan.problem import Problem
from sp_bench.run.executor import Action

OPTIONS = {"one_core": "false"}
RANKS, REPETITIONS = 8, 15
TOKENS = (4096,)
"""Tokens of a rank."""


def thread_seconds(call: Any, *arguments: Any) -> tuple[float, Any]:
    """The CPU seconds of a call, and its result."""
    started = time.thread_time()
    result = call(*arguments)
    return time.thread_time() - started, result


@dataclass(frozen=True, kw_only=True)
class Where:
    """The device, kernel and shape that blocks are computed with, and the clock that times them."""

    device: str
    kernel: str
    dtype: str
    heads: int
    head_dim: int
    clock: Clock

    def problem(self, n: int, seqlen: int, mask: Mask, layout: str) -> Problem:
        """Attention of one sequence on n ranks."""
        return Problem(
            n=n, seqlen=seqlen, heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim, mask=mask,
            dtype=self.dtype, layout=LAYOUTS[layout],
        )  # fmt: skip


ONE_CORE = Where(device="cpu", kernel="auto", dtype="float32", heads=1, head_dim=64, clock=thread_seconds)


class Setting(NamedTuple):
    """A method on a layout, with or without fused blocks."""

    method: str
    options: tuple[tuple[str, object], ...]
    layout: str
    fuse: bool


GATHER, TILE = (("stride", "heads"),), (("tile", (2, 4)), ("schedule", "rows"))
BOTH = (("all_gather", GATHER), ("mesh", TILE))
SETTINGS: tuple[tuple[Mask, tuple[Setting, ...]], ...] = (
    (
        CAUSAL,
        (
            Setting("all_gather", GATHER, "striped", False),
            *(Setting(*method, "zigzag", fuse) for method in BOTH for fuse in (False, True)),
        ),
    ),
    (FULL, tuple(Setting(*method, "contiguous", fuse) for method in BOTH for fuse in (False, True))),
)
COMMON = ("cluster=shaped", "heads=1", "head_dim=64", "dtype=float32", "warmup=1", "iters=5")
GATHERED = ("method=all_gather", "method.layout=zigzag", "method.stride=1")
MESH = ("method=mesh", "method.layout=zigzag")
SHAPED = (
    ("gpus=8", "seqlen=32k", *GATHERED),
    ("gpus=8", "seqlen=32k", *MESH, "method.tile=[2,4]", "method.schedule=rows"),
    ("gpus=16", "seqlen=32k", *GATHERED),
    ("gpus=16", "seqlen=32k", *MESH, "method.tile=[4,4]"),
)
"""The points over shaped links, each with and without fused blocks."""


def rank_of(setting: Setting, mask: Mask, tokens: int, where: Where) -> Rank:
    """Rank 0 of RANKS with that many tokens each."""
    options = {name: where.heads if value == "heads" else value for name, value in setting.options}
    method = build(setting.method, {"layout": setting.layout, "fuse": setting.fuse, **options})
    problem = where.problem(RANKS, RANKS * tokens, mask, setting.layout)
    return Rank(method, problem, where.kernel, where.device, where.clock)


def one_call(mask: Mask, tokens: int, where: Where) -> tuple[float, float]:
    """Seconds of one call of the kernel on the whole sequence, forward and backward."""
    kernel = choose(where.kernel, where.device, where.dtype, where.head_dim)
    whole = where.problem(RANKS, RANKS * tokens, mask, "contiguous")
    return one_call_s(kernel, inputs(whole, whole.seqlen, where.device), mask, where.clock)


def rows(tokens: int, mask: Mask, settings: Sequence[Setting], where: Where) -> list[dict[str, str]]:
    """A row for each setting: its operations, and the call's time over its own, with 95% intervals."""
    ranks = [rank_of(setting, mask, tokens, where) for setting in settings]
    timed = [partial(one_call, mask, tokens, where), *(partial(rank.step, Action.COMPUTE) for rank in ranks)]
    for step in timed:
        step()
    times = np.array([[step() for step in timed] for _ in range(REPETITIONS)])
    table = []
    for number, (setting, rank) in enumerate(zip(settings, ranks, strict=True), 1):
        by_phase = [of_medians(RANKS * times[:, number, p], times[:, 0, p], in_turn=True) for p in range(2)]
        counts = [sum(isinstance(op, Block) for op in plan.ops) for plan in rank.plans.values()]
        row = {"tokens of a rank": str(tokens), "mask": mask.name, "method": setting.method, "layout": setting.layout}
        row |= {"fuse": str(setting.fuse).lower(), "operations with blocks": " + ".join(map(str, counts))}
        row |= {f"{phase} [95%]": ratio(share, 3) for phase, share in zip(PHASES, by_phase, strict=True)}
        table.append(row)
        print(row, flush=True)
    return table


def shares(where: Where) -> list[dict[str, str]]:
    """The rows of all settings."""
    return [row for tokens in TOKENS for mask, settings in SETTINGS for row in rows(tokens, mask, settings, where)]


def one_core(runs: Runs) -> list[dict[str, str]]:
    """The shares on one core."""

    def measure() -> list[dict[str, str]]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return shares(ONE_CORE)
        finally:
            torch.set_num_threads(threads)

    return runs.kept("one_core", measure)


def links(runs: Runs) -> list[dict[str, str]] | str:
    """Whole steps, with and without fused blocks."""
    if runs.options["one_core"] == "true":
        return "Not measured."
    points = [(*COMMON, *point, f"method.fuse={fuse}") for point in SHAPED for fuse in ("false", "true")]
    records = [record for gpus in ("gpus=8", "gpus=16") for record in runs.ok([p for p in points if gpus in p])]
    return [
        {
            "ranks": str(alone.gpus),
            "tokens of a rank": str(alone.seqlen // alone.gpus),
            "method": f"{fused.method} {fused.variant or ''}",
            "step, ms [95%]": interval(alone),
            "fused, ms [95%]": interval(fused),
            "times as fast": f"{known(alone.step_ms_median) / known(fused.step_ms_median):.3f}",
            "blocks alone, ms": f"{known(alone.compute_only_ms_median):.0f}",
            "fused blocks alone, ms": f"{known(fused.compute_only_ms_median):.0f}",
            "peak memory, fused / not": f"{known(fused.peak_mem_bytes_max) / known(alone.peak_mem_bytes_max):.2f}",
        }
        for alone, fused in zip(records[::2], records[1::2], strict=True)
    ]
