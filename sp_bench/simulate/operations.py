"""Costs of a plan's operations on each rank's device: blocks, folds and row sums, by segment, and casts of results.

The kernel calls of blocks and the folds of their results are those of simulate.blocks; transfers, and folds of what
they bring, those of simulate.transfer_costs. Links are not among it (simulate.message_flows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, proxy

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.lower import Lowering, lower
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import Attend, AttendBackward, Block, Chunk, Fold, Fused, Gathered, Plan, RowSums
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import segments
from sp_bench.simulate.blocks import BlockCosts
from sp_bench.simulate.symmetry import Permutation
from sp_bench.simulate.transfer_costs import TransferCosts

FEW_KEPT = 4
"""A plan keeps its costs for so many layouts and devices: those of a point."""
AT_ONCE = 2**16
"""Blocks times ranks whose seconds are looked up at once."""


@dataclass
class _Summed:
    """A segment's blocks, by row of BlockClasses and what they cost by class, and what the rest of it takes."""

    rows: list[int] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    """Whether each block is a kernel call of its own."""
    rest_s: np.ndarray | float = 0.0
    calls: np.ndarray | float = 0.0
    """Kernel calls of the rest."""


class OperationCosts:
    """Seconds of the operations of one plan, for ranks that have their devices to themselves."""

    def __init__(self, plan: Plan, problem: Problem, device: DeviceCosts, lowering: Lowering) -> None:
        # They are kept as long as the plan is in use (operation_costs), and must not be what uses it.
        self._plan: Plan = proxy(plan)
        self._problem, self._device, self._lowering = problem, device, lowering
        self.segments = segments(plan, lowering.waits)
        """Those of the plan, by the index of their first operation."""
        self._alike = dict[tuple[int, ...], _Summed]()
        """The sums of segments that take all ranks the same operations, by these."""
        self._blocks = BlockCosts(plan, problem, device, lowering)
        self._classes = self._blocks.classes
        self.transfers = TransferCosts(plan, problem, device, lowering)
        """The costs of the plan's transfers and of folds of what they bring."""

    def that_leave_blocks(self, moves: Sequence[Permutation], *, apart: float = 0.0) -> Sequence[Permutation]:
        """The moves under which the kernel calls and folds of each block stay the same, or the seconds of its calls
        differ by this share at most.
        """
        for block_s in self._by_block(apart) if moves else ():
            unlike = block_s[block_s.min(axis=1) < (1 - apart) * block_s.max(axis=1)]
            moves = [move for move in moves if np.array_equal(unlike[:, move], unlike)]
            if not moves:
                break
        return moves

    def _by_block(self, apart: float) -> Iterator[np.ndarray]:
        """Costs of blocks that may differ by rank, by more than this share, many at once: (blocks, n)."""
        by_class = self._classes.by_number(self._blocks.class_s if apart else self._blocks.kinds())
        times = by_class[self._classes.there]
        if times.size and times.min() < (1 - apart) * times.max():
            yield from self._classes.slabs(by_class, self._blocks.alone)
        yield from (self._blocks.joined_s(rows, np.arange(self._problem.n))[None] for rows in self._blocks.joinable())
        for index, op in self._plan:
            if isinstance(op, Fused | Gathered):
                yield np.stack(self._blocks.by_rank(index, op))

    def work_s(self, segments: Sequence[Sequence[int]], ranks: np.ndarray) -> Iterator[np.ndarray]:
        """Seconds of each segment's blocks and folds, one after the other, on each of some ranks: (ranks,) of each
        segment, some segments at once.

        A plan has thousands of blocks, of few kinds: what a kind takes is looked up for many blocks at once.
        """
        summed = [self._summed_once(tuple(segment), ranks) for segment in segments]
        many = max(1, AT_ONCE // max(ranks.size, 1))
        start = 0
        while start < len(summed):
            end, blocks = start, 0
            while end < len(summed) and (end == start or blocks + len(summed[end].rows) <= many):
                blocks += len(summed[end].rows)
                end += 1
            yield self._of_segments(summed[start:end], ranks)
            start = end

    def _of_segments(self, segments: Sequence[_Summed], ranks: np.ndarray) -> np.ndarray:
        """(segments, ranks) seconds."""
        seconds, calls = np.empty((len(segments), ranks.size)), np.empty((len(segments), ranks.size))
        for row, segment in enumerate(segments):
            seconds[row], calls[row] = segment.rest_s, segment.calls
        sizes = np.array([len(segment.rows) for segment in segments])
        if sizes.any():
            of = self._classes.on(ranks)[[row for segment in segments for row in segment.rows]]
            block_s = _looked_up([table for segment in segments for table in segment.tables], of)
            filled, first = sizes > 0, np.concatenate([[0], np.cumsum(sizes)[:-1]])
            seconds[filled] += np.add.reduceat(block_s, first[filled], axis=0)
            if self._device.implementation.host_s_per_block:
                counts = np.array([count for segment in segments for count in segment.counts])
                calls[filled] += np.add.reduceat((block_s > 0) * counts[:, None], first[filled], axis=0)
        return np.maximum(seconds, calls * self._device.implementation.host_s_per_block)

    def _summed_once(self, segment: tuple[int, ...], ranks: np.ndarray) -> _Summed:
        """`_summed`, which is kept where it is the same of any ranks."""
        summed = self._alike.get(segment)
        if summed is None:
            summed = self._summed(segment, ranks)
            if not isinstance(summed.rest_s, np.ndarray) and not isinstance(summed.calls, np.ndarray):
                self._alike[segment] = summed
        return summed

    def _summed(self, segment: Sequence[int], ranks: np.ndarray) -> _Summed:
        summed, merged = _Summed(), set[Chunk]()
        joined: dict[Chunk, tuple[list[int], float]] = {}
        """By chunk of results, the rows of the blocks that are one call for it, and the seconds of its fold."""
        ops = (self._plan.ops[index] for index in segment)
        blocks_of = Counter(op.writes[0] for op in ops if isinstance(op, Attend | AttendBackward))
        joins = self._device.implementation.joins_blocks
        for index in segment:
            op = self._plan.ops[index]
            if isinstance(op, Attend | AttendBackward):
                row, into = self._classes.first[index], op.writes[0]
                if self._blocks.joins:
                    if into not in joined:
                        joined[into] = [], self._blocks.joined_fold_s(index, op)
                    joined[into][0].append(row)
                    merged.add(into)
                summed.rows.append(row)
                of_several = joins and blocks_of[into] > 1
                summed.tables.append(self._blocks.with_folds_s(index, op, merged, joined=of_several))
                summed.counts.append(into not in merged)
            elif isinstance(op, Block):
                kernels_s = self._blocks.kernels_s(index, op, ranks)
                summed.rest_s = summed.rest_s + kernels_s
                summed.rest_s = summed.rest_s + (kernels_s > 0) * self._blocks.folds_s(index, op, ranks, merged)
                summed.calls = summed.calls + (kernels_s > 0) * (op.writes[0] not in merged)
            elif isinstance(op, Fold):
                summed.rest_s = summed.rest_s + self.transfers.fold_s(index, op, ranks)
            elif isinstance(op, RowSums):
                summed.rest_s = summed.rest_s + self._row_sums_s(op)
            if isinstance(op, Block) and joins:
                merged |= {*op.writes}
        for rows, fold_s in joined.values():
            kernels_s = self._blocks.joined_s(rows, ranks)
            summed.rest_s = summed.rest_s + kernels_s + (kernels_s > 0) * fold_s
            summed.calls = summed.calls + (kernels_s > 0)
        return summed

    def results_s(self) -> float:
        """Seconds of casting the results to the compute dtype, and of taking the true heads out of padded ones."""
        partials = [chunk for chunk in self._plan.ends_with if chunk.tensor.is_partial]
        results = [(chunk.tensor, chunk not in self._lowering.unsummed) for chunk in partials]
        casts_s = sum(self._device.cast_s(self._problem, tensor, wire=False, summed=s) for tensor, s in results)
        return casts_s + self.transfers.padding_s(self._plan.outputs, filled=False)

    def _row_sums_s(self, op: RowSums) -> float:
        """O or its row sums are computed in one pass over O and dO, as fast as memory."""
        (part,) = op.parts
        fields = {field.name: field for chunk in (part, op.into) for field in chunk.tensor.fields}
        return self._device.copy_s(self._problem.field_bytes(fields["out"], wire=False))


_CACHE: WeakKeyDictionary[Plan, dict[tuple[int, int], tuple[DeviceCosts, Lowering, OperationCosts]]] = (
    WeakKeyDictionary()
)


def operation_costs(plan: Plan, problem: Problem, device: DeviceCosts, lowering: Lowering) -> OperationCosts:
    """The OperationCosts of a plan, cached: bounds and simulations of a variant ask for the same ones."""
    known, key = _CACHE.setdefault(plan, {}), (id(device), id(lowering))
    if key not in known:
        keep(known, key, (device, lowering, OperationCosts(plan, problem, device, lowering)), FEW_KEPT)
    return known[key][2]


def work_s(plan: Plan, problem: Problem, cluster: Cluster, ranks: np.ndarray) -> np.ndarray:
    """Seconds that each of some ranks computes in one phase, alone on its core or device, as they are simulated:
    (ranks,).
    """
    lowering = lower(plan, problem, cluster.transport)
    costs = operation_costs(plan, problem, cluster.device, lowering)
    indices = [segment.ops for segment in costs.segments.values()]
    total_s = sum((seconds.sum(axis=0) for seconds in costs.work_s(indices, ranks)), np.zeros(ranks.size))
    return (total_s + costs.results_s()) * cluster.stragglers.slow_ranks(plan.n)[ranks]


def _looked_up(tables: Sequence[np.ndarray], of: np.ndarray) -> np.ndarray:
    """Each row's values by its table, of which few are unlike: tables (classes,), classes (rows, ranks) -> (rows,
    ranks).
    """
    unlike = {id(table): table for table in tables}
    if len(unlike) == 1:
        return tables[0][of]
    values = np.empty(of.shape)
    numbers = np.array([id(table) for table in tables])
    for number, table in unlike.items():
        rows = np.flatnonzero(numbers == number)
        values[rows] = table[of[rows]]
    return values
