"""Other orders of a Mesh-Attention tile than algorithms 2 and 3: ours, not the paper's. The volume is the same.

`schedule=searched` is another order of the same transfers and blocks, found by a search (mesh_search.py). With it the
tile can be computed in `slices`, once per slice of the heads, so that the first and last transfers of a slice hide
behind another slice's blocks.

`schedule=rows` or `columns` computes the tile row by row, or column by column, with one side held and the other
streaming by (mesh_lean.py). It needs less memory and hides less.

With `fuse`, blocks of the paper's schedules come in runs (mesh_runs.py).

The bound on the time of any order is that of mesh_bounds.py. Refuses slices that don't divide kv_heads, and more than
one slice with another schedule than `searched`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Self

from sp_bench.methods.mesh import blocks_of, travelling
from sp_bench.methods.mesh_bounds import least_s, time_of
from sp_bench.methods.mesh_lean import ORDERS, lean_order
from sp_bench.methods.mesh_places import PlacedMesh
from sp_bench.methods.mesh_runs import ColumnRuns, RowRuns
from sp_bench.methods.mesh_schedule import SCHEDULES, Tile
from sp_bench.methods.mesh_search import search, steps_of
from sp_bench.methods.mesh_times import Block, Hop, Move, Tensors, TileTimes
from sp_bench.plan import (
    Chunk,
    CostProfile,
    Plan,
    Problem,
    RequestError,
    ScheduleTime,
    Steps,
    Tensor,
    divisors,
    impossible,
)

SLICES = (1, 2, 4, 8)
"""The numbers of head slices that auto stands for."""


@dataclass(frozen=True, kw_only=True)
class OrderedMesh(PlacedMesh):
    """Mesh-Attention with a choice of schedules."""

    schedule: Literal["paper", "searched", "rows", "columns", "auto"] = "paper"
    """paper: algorithms 2 and 3; searched: the order that mesh_search.py finds; auto stands for both. rows, columns:
    the orders of mesh_lean.py."""
    slices: Literal["auto"] | int = 1
    """How many equal slices of the heads; the tile is computed once per slice. More than 1 needs a searched schedule.
    auto stands for those of 1, 2, 4 and 8 that divide kv_heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices not in (1, "auto") and not self._takes_slices:
            rule = f"schedule={self.schedule} goes through the tile once, with all heads"
            raise RequestError(f"method.slices={self.slices}", rule, "with method.schedule=searched it would work")

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where the tile or `slices` doesn't fit."""
        if isinstance(self.slices, int) and problem.kv_heads % self.slices:
            rule = f"must divide kv_heads={problem.kv_heads}"
            raise impossible(f"method.slices={self.slices}", rule, divisors(problem.kv_heads))
        super().refuse(problem)

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """Each tile and placement, with each schedule and number of slices."""
        return tuple(
            replace(mesh, schedule=schedule, slices=slices)
            for mesh in super().candidates(problem)
            for schedule, slices in self._schedules(problem)
        )

    def leaner(self) -> tuple[OrderedMesh, ...]:
        """The orders of mesh_lean.py, which take all heads at once."""
        return tuple(replace(self, schedule=order, slices=1) for order in ORDERS)

    def head_slices(self, problem: Problem) -> int:
        """The number of head slices: the option `slices`."""
        assert not isinstance(self.slices, str), "a caller picks one of the candidates first"
        return self.slices

    def variant(self, n: int) -> str:
        """The tile and its schedule, if not the paper's, in words."""
        order = {"searched": " searched", "rows": " by rows", "columns": " by columns"}.get(self.schedule, "")
        return super().variant(n) + order + (f" in {self.slices} slices" if self.slices != 1 else "")

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """As many of each slice."""
        sent = super().chunks_sent(problem, phase)
        return {tensor: problem.head_slices * count for tensor, count in sent.items()}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of the option's schedule."""
        return _with_all_slices(super().forward(problem, costs), problem)

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of the option's schedule."""
        return _with_all_slices(super().backward(problem, costs), problem)

    def schedule_time(self, problem: Problem, phase: str, costs: CostProfile) -> ScheduleTime | None:
        """The time of the tile's steps, and the least time of any order of them (mesh_bounds.py).

        None with unknown costs, and with a lane for each tensor.
        """
        if self.lanes != "one" or math.isinf(costs.block_s(phase)):
            return None
        problem = self.assigned(problem)
        split = problem.layout.head_parallel > 1
        chunks = self._chunks(problem, *(tensor.by_heads if split else tensor for tensor in travelling(phase)))
        times, moves = self._moves(problem, costs.of_a_slice(problem), phase, chunks)
        return ScheduleTime(time_of(times, moves), least_s(times))

    def _attend(
        self, steps: Steps, problem: Problem, costs: CostProfile, phase: str, chunks: tuple[Chunk, ...]
    ) -> None:
        if self.schedule == "paper":
            super()._attend(steps, problem, costs, phase, chunks)
            return
        _, moves = self._moves(problem, costs, phase, chunks)
        slices = in_slices(problem, chunks)
        own = {Hop(i, x.tensor.by_tokens): x for i, of_slice in enumerate(slices) for x in of_slice}
        blocks = [*map(blocks_of, slices)]
        self._add(steps, moves, own, lambda i, u, v: blocks[i](u, v))

    def _moves(
        self, problem: Problem, costs: CostProfile, phase: str, chunks: tuple[Chunk, ...]
    ) -> tuple[TileTimes, list[Move]]:
        """The tile's costs, and the steps of the schedule that the option names."""
        hop_s, block_s = self._relative_times(problem, costs, phase, chunks)
        q, kv, o, *dkv = hop_s
        tensors = Tensors(q, kv, o, dkv[0] if dkv else None)
        times = TileTimes(*self.tile_shape(problem.n), tensors, block_s, hop_s, problem.head_slices)
        if self.schedule in ORDERS:
            return times, list(lean_order(self.schedule, times.a, times.b, tensors))
        c = self._hiding(problem, costs, phase, *chunks)
        greedy = SCHEDULES[phase](times.a, times.b, c, self._tile_kind(phase))
        if self.schedule == "searched":
            return times, list(steps_of(*search(times, [step.transfer for step in greedy if step.transfer])))
        return times, [
            (Hop(0, step.transfer) if step.transfer else None, tuple(Block(0, u, v) for u, v in step.blocks))
            for step in greedy
        ]

    def _relative_times(
        self, problem: Problem, costs: CostProfile, phase: str, chunks: tuple[Chunk, ...]
    ) -> tuple[dict[Tensor, float], float]:
        """(time of a hop by tensor, time of a block); only their ratios matter."""
        if math.isinf(costs.block_s(phase)):
            return {x.tensor.by_tokens: 0.0 for x in chunks}, 1.0
        sizes = {x: problem.chunk_bytes(self._sent(x.tensor), wire=True) for x in chunks}
        hops = {x.tensor.by_tokens: costs.transfer_s(size, self._ring(x)) for x, size in sizes.items()}
        return hops, costs.block_s(phase)

    def _schedules(self, problem: Problem) -> list[tuple[str, int]]:
        """The (schedule, slices) pairs that the options stand for."""
        schedules = ("paper", "searched") if self.schedule == "auto" else (self.schedule,)
        possible = self._possible_slices(problem)
        return [(schedule, s) for schedule in schedules for s in possible if s == 1 or schedule == "searched"]

    def _possible_slices(self, problem: Problem) -> list[int]:
        """The numbers of slices that the option stands for."""
        return [s for s in SLICES if problem.kv_heads % s == 0] if self.slices == "auto" else [int(self.slices)]

    @property
    def _takes_slices(self) -> bool:
        """Whether the tile can be computed in several slices of the heads."""
        return self.schedule not in ("paper", *ORDERS)

    def _tile_kind(self, phase: str) -> type[Tile]:
        if not self.fuse:
            return super()._tile_kind(phase)
        return RowRuns if phase == "forward" else ColumnRuns


def in_slices(problem: Problem, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """The chunks of each slice of the heads."""
    return [[x.slice(i) for x in chunks] for i in range(problem.head_slices)]


def _with_all_slices(plan: Plan, problem: Problem) -> Plan:
    """The plan with inputs and outputs in all slices of the heads."""
    if problem.head_slices == 1:
        return plan
    inputs, outputs = (
        tuple(each for chunk in chunks for each in chunk.slices(problem.head_slices))
        for chunks in (plan.inputs, plan.outputs)
    )
    return replace(plan, inputs=inputs, outputs=outputs)
