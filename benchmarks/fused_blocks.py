"""Fused blocks against one call: `python -m benchmarks.fused_blocks` writes docs/results/fused_blocks.md.

On one core: a process executes the blocks and folds of one rank of 8, without its transfers, with and without
method.fuse, and one call of the kernel on the whole sequence: all in turn, fp32, one head of 64. A share is the time of
the call over 8 times that of the rank, by medians of CPU time. With these masks and layouts all ranks have the same
work. Mesh has 2x4 tiles, by rows.

Over shaped links: whole steps, forward and backward, of 8 and 16 ranks (`cluster=shaped`) that share the cores of this
machine, causal on the zigzag layout, with and without method.fuse. Their iterations are in turn, after the correctness
gate. Needs root, and an idle machine; `--one-core` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.executor_profile import inputs, one_call_s
from benchmarks.reports import RESULTS, about, interval, known, ratio, run_ok
from sp_bench.analysis.verdict import of_medians
from sp_bench.calibrating.clock import Clock
from sp_bench.kernels import choose
from sp_bench.machine import cores_here
from sp_bench.markdown import of_rows
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block
from sp_bench.plan.problem import Problem
from sp_bench.run.attention import Engine
from sp_bench.run.executor import Action
from sp_bench.run.transport import AloneTransport

REPORT = RESULTS / "fused_blocks.md"
RANKS, REPETITIONS = 8, 15
TOKENS = (4096,)
"""Of a rank."""


def thread_seconds(call: Any, *arguments: Any) -> tuple[float, Any]:
    """The CPU seconds of a call, and its result."""
    started = time.thread_time()
    result = call(*arguments)
    return time.thread_time() - started, result


@dataclass(frozen=True, kw_only=True)
class Where:
    """What blocks are computed with, and how they are timed."""

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

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """q, k, v and dout: (1, tokens, heads, head_dim) each."""
        return inputs(tokens, self.heads, self.heads, self.head_dim, self.dtype, self.device)


ONE_CORE = Where(device="cpu", kernel="auto", dtype="float32", heads=1, head_dim=64, clock=thread_seconds)


class Setting(NamedTuple):
    """A method on a layout, with or without fused blocks."""

    method: str
    options: tuple[tuple[str, object], ...]
    layout: str
    fuse: bool


GATHER, TILE = (("stride", "heads"),), (("tile", (2, 4)), ("schedule", "rows"))
SETTINGS: tuple[tuple[Mask, tuple[Setting, ...]], ...] = (
    (
        CAUSAL,
        (
            Setting("all_gather", GATHER, "striped", False),
            *(Setting("all_gather", GATHER, "zigzag", fuse) for fuse in (False, True)),
            *(Setting("mesh", TILE, "zigzag", fuse) for fuse in (False, True)),
        ),
    ),
    (
        FULL,
        (
            *(Setting("all_gather", GATHER, "contiguous", fuse) for fuse in (False, True)),
            *(Setting("mesh", TILE, "contiguous", fuse) for fuse in (False, True)),
        ),
    ),
)
COMMON = ("cluster=shaped", "heads=1", "head_dim=64", "dtype=float32", "warmup=1", "iters=5", "logger=none")
MESH = ("method=mesh", "method.layout=zigzag")
SHAPED = (
    ("gpus=8", "seqlen=32k", "method=all_gather", "method.layout=zigzag", "method.stride=1"),
    ("gpus=8", "seqlen=32k", *MESH, "method.tile=[2,4]", "method.schedule=rows"),
    ("gpus=16", "seqlen=32k", "method=all_gather", "method.layout=zigzag", "method.stride=1"),
    ("gpus=16", "seqlen=32k", *MESH, "method.tile=[4,4]"),
)
"""The points over shaped links, each with and without fused blocks."""


class Rank:
    """Rank 0 of RANKS, executed alone."""

    def __init__(self, setting: Setting, mask: Mask, tokens: int, where: Where) -> None:
        options = {name: where.heads if value == "heads" else value for name, value in setting.options}
        method = build(setting.method, {"layout": setting.layout, "fuse": setting.fuse, **options})
        problem = method.dealt(where.problem(RANKS, RANKS * tokens, mask, setting.layout))
        plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
        self.blocks = [sum(isinstance(op, Block) for op in plan.ops) for plan in plans.values()]
        device = torch.device(where.device)
        self._engine = Engine(plans, problem, where.kernel, device, transport=AloneTransport())
        self._inputs, self._clock = where.inputs(tokens), where.clock

    def step(self) -> tuple[float, float]:
        """Seconds of the blocks and folds of a forward and of a backward."""
        q, k, v, dout = self._inputs
        forward_s, (_, saved) = self._clock(self._engine.forward, q, k, v, Action.COMPUTE)
        backward_s, _ = self._clock(self._engine.backward, dout, saved, Action.COMPUTE)
        return forward_s, backward_s


def one_call(mask: Mask, tokens: int, where: Where) -> tuple[float, float]:
    """Seconds of one call of the kernel on the whole sequence, forward and backward."""
    kernel = choose(where.kernel, where.device, where.dtype, where.head_dim)
    return one_call_s(kernel, where.inputs(RANKS * tokens), mask, where.clock)


def rows(tokens: int, mask: Mask, settings: Sequence[Setting], where: Where) -> list[dict[str, str]]:
    """A row for each setting: its operations, and the call's time over its own, with 95% intervals."""
    ranks = [Rank(setting, mask, tokens, where) for setting in settings]
    timed = [partial(one_call, mask, tokens, where), *(rank.step for rank in ranks)]
    for step in timed:
        step()
    times = np.array([[step() for step in timed] for _ in range(REPETITIONS)])
    found = []
    for number, (setting, rank) in enumerate(zip(settings, ranks, strict=True), 1):
        by_phase = [of_medians(RANKS * times[:, number, p], times[:, 0, p], in_turn=True) for p in range(2)]
        found.append(
            {
                "tokens of a rank": str(tokens),
                "mask": mask.name,
                "method": setting.method,
                "layout": setting.layout,
                "fuse": str(setting.fuse).lower(),
                "operations with blocks": " + ".join(map(str, rank.blocks)),
                **{f"{phase} [95%]": ratio(share, 3) for phase, share in zip(PHASES, by_phase, strict=True)},
            }
        )
        print(found[-1], flush=True)
    return found


def shares(where: Where) -> list[dict[str, str]]:
    """The rows of all settings."""
    return [row for tokens in TOKENS for mask, settings in SETTINGS for row in rows(tokens, mask, settings, where)]


def on_one_core(folder: Path) -> str:
    """The table of shares; `folder` keeps it, so that it is measured once."""
    kept = folder / "one_core.json"
    if not kept.exists():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = shares(ONE_CORE)
        torch.set_num_threads(threads)
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return of_rows(json.loads(kept.read_text()))


def over_links(folder: Path) -> str:
    """The table of whole steps, with and without fused blocks."""
    points = [[*COMMON, *point, f"method.fuse={fuse}"] for point in SHAPED for fuse in ("false", "true")]
    records = [record for gpus in ("gpus=8", "gpus=16") for record in run_ok([p for p in points if gpus in p], folder)]
    found = []
    for alone, fused in zip(records[::2], records[1::2], strict=True):
        found.append({
            "ranks": str(alone.gpus),
            "tokens of a rank": str(alone.seqlen // alone.gpus),
            "method": f"{fused.method} {fused.variant or ''}",
            "step, ms [95%]": interval(alone),
            "fused, ms [95%]": interval(fused),
            "times as fast": f"{known(alone.step_ms_median) / known(fused.step_ms_median):.3f}",
            "blocks alone, ms": f"{known(alone.compute_only_ms_median):.0f}",
            "fused blocks alone, ms": f"{known(fused.compute_only_ms_median):.0f}",
            "peak memory, fused / not": f"{known(fused.peak_mem_bytes_max) / known(alone.peak_mem_bytes_max):.2f}",
        })  # fmt: skip
    return of_rows(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("results", "fused_blocks"))
    parser.add_argument("--one-core", action="store_true")
    given = parser.parse_args()
    text = f"""# Fused blocks against one call

Made by `python -m benchmarks.fused_blocks`, torch {torch.__version__}, Python {platform.python_version()}, on
{cores_here()} cores ({platform.machine()}), each time {REPETITIONS} times.

{about(__doc__)}

## One core against one call

{on_one_core(given.records)}
"""
    if not given.one_core:
        text += f"\n## Steps over shaped links\n\n{over_links(given.records)}\n"
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
