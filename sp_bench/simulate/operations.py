"""Costs of a plan's operations on each rank's device: blocks, folds, row sums, casts and copies of transfers.

Links are not among it (simulate.graph). The kernel calls of blocks and the folds of their results are those of
simulate.blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, proxy

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.lower import Lowering, lower
from sp_bench.plan import cast_rows
from sp_bench.plan.demand import Demand, demand
from sp_bench.plan.groups import Exchange
from sp_bench.plan.memo import cached, keep
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Block,
    Chunk,
    Fold,
    Fused,
    Gathered,
    GroupReduce,
    Op,
    Pass,
    Plan,
    ReduceScatter,
    RowCollective,
    RowSums,
    Transfer,
    TreeReduce,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import segments
from sp_bench.plan.tensors import Tensor
from sp_bench.plan.transfers import messages, share_sent
from sp_bench.simulate.blocks import BlockCosts
from sp_bench.simulate.symmetry import Permutation

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
        # A plan has thousands of operations, of few kinds.
        self._cast_s, self._arrived_fold_s = cached(self._find_cast_s), cached(self._find_arrived_fold_s)
        self.wanted = demand(plan, problem)
        """By operation, on which ranks it has something to receive or to fold, and which rows (plan.demand)."""
        self._brought = _brought(plan, self.wanted)
        self._first_transfer = next((index for index, _ in plan.transfers), None)

    def varying(self) -> Iterator[np.ndarray]:
        """Costs that may differ by rank, but for those of blocks, in seconds: (n,) each."""
        everyone = np.arange(self._problem.n)
        for index, op in self._plan:
            if isinstance(op, Transfer):
                if not self.is_alike(index, op):
                    wanted = self.wanted.get(index)
                    sizes = [sum(sizes.values()) for sizes in messages(op, self._problem, everyone, wanted)]
                    costs = (*sizes, self.staged_s(index, op, everyone), wanted and wanted.there)
                    yield from (cost for cost in costs if isinstance(cost, np.ndarray))
            else:
                if index in self._brought:
                    yield self._share_brought(index, everyone)
                if index in self.wanted:
                    yield self.wanted[index].there

    def is_alike(self, index: int, op: Transfer) -> bool:
        """Whether a transfer is a Pass of whole chunks, as large and as costly on every rank."""
        if not isinstance(op, Pass) or op.against or isinstance(op.group, Exchange):
            return False
        return self._problem.is_even and index not in self.wanted

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
            else:
                summed.rest_s = summed.rest_s + self._elsewhere_s(index, op, ranks)
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
        return casts_s + self._padding_s(self._plan.outputs, filled=False)

    def staged_s(self, index: int, op: Transfer, ranks: np.ndarray) -> np.ndarray | float:
        """Seconds of casting or packing what is sent, or of copying it where a rank sends to itself."""
        if isinstance(op, AllToAll):
            padding_s = self._padding_s(self._plan.inputs, filled=True) if index == self._first_transfer else 0.0
            return padding_s + self._device.copy_s(self._lowering.packed_bytes(op)[0])
        if isinstance(op, AllGather):
            return 0.0
        if isinstance(op, RowCollective):  # rows are gathered, and cast where they have to be
            row_bytes = sum(self._problem.token_bytes(field, wire=True) for field in op.tensor.fields)
            rows = np.asarray(cast_rows.sent(op, self._problem, ranks))
            return _of_each(rows, lambda count: self._device.copy_s(count * row_bytes))
        if isinstance(op, TreeReduce):
            sent = sum(sum(sizes.values()) for sizes in messages(op, self._problem, 0))
            return self._device.copy_s(sent) + op.tensor.has_statistics * self._device.launch_s
        if isinstance(op, ReduceScatter):
            by_field = messages(op, self._problem, 0)[0] if op.group.size > 1 else {}
            others, sent = op.group.size - 1, sum(by_field.values())
            if not self._device.implementation.merges_at_once:
                return others * self._device.copy_s(sent)
            return self._device.copy_s(others * sent) + op.tensor.has_statistics * self._device.launch_s
        if op.against:
            return self._cut_s(index, op, ranks)
        summed = op.send not in self._lowering.unsummed
        cast_s = self._cast_s(op.tensor, summed)
        if cast_s and (shares := self._share_of_run(index, op.target(ranks, self._problem.n))) is not None:
            cast_s = _in_proportion(shares, lambda share: self._cast_s(op.tensor, summed, share))
        if not isinstance(op.group, Exchange):
            return cast_s
        whole = sum(self._problem.field_bytes(field, wire=True) for field in op.tensor.fields)
        return cast_s + (op.target(ranks, self._problem.n) == ranks) * self._device.copy_s(whole)

    def arrived_s(self, op: AllToAll | ReduceScatter | RowCollective, arrivals: int) -> float:
        """Seconds of unpacking what an all-to-all brought, or of merging the arrivals of a reduce-scatter."""
        if isinstance(op, RowCollective):
            return 0.0
        if isinstance(op, AllToAll):
            return self._device.copy_s(self._lowering.packed_bytes(op)[1])
        if self._device.implementation.merges_at_once:
            return self._device.merge_s(self._problem, op.tensor, arrivals)
        return arrivals * self._device.fold_s(self._problem, op.tensor, arriving=True)

    def merged_s(self, op: TreeReduce, number: int) -> float:
        """Seconds of merging what a round has brought with what the rank has of the same owners, in one kernel, and of
        casting what the next round sends.
        """
        rounds, tensor = op.rounds, op.tensor
        fold_s = self._device.fold_s(self._problem, tensor, arriving=True, share=rounds[number].owners)
        return fold_s + (
            self._device.cast_s(self._problem, tensor, wire=True, share=rounds[number + 1].owners)
            if number + 1 < len(rounds)
            else 0.0
        )

    def moves(self, index: int, op: Transfer, ranks: np.ndarray) -> tuple[np.ndarray | bool, np.ndarray | bool]:
        """Whether each of some ranks sends in a transfer, and whether it receives: (ranks,) each, or True for all."""
        if index not in self.wanted:
            return True, True
        assert isinstance(op, Pass)
        there = self.wanted[index].there
        return there[op.target(ranks, self._problem.n)], there[ranks]

    def _elsewhere_s(self, index: int, op: Op, ranks: np.ndarray) -> np.ndarray | float:
        """Seconds of an operation that is no block: a fold of what has arrived, or row sums."""
        if isinstance(op, Fold):
            wants = self.wanted[index].there[ranks] if index in self.wanted else 1.0
            if index not in self._brought:
                return self._arrived_fold_s(op.into.tensor, 1.0) * wants
            each = _in_proportion if _in_runs(self.wanted, self._brought[index][0]) else _of_each
            shares = self._share_brought(index, ranks)
            return each(shares, lambda share: self._arrived_fold_s(op.into.tensor, share)) * wants
        return self._row_sums_s(op) if isinstance(op, RowSums) else 0.0

    def _find_arrived_fold_s(self, tensor: Tensor, share: float) -> float:
        return self._device.fold_s(self._problem, tensor, arriving=True, share=share, sliced=share < 1)

    def _padding_s(self, chunks: Sequence[Chunk], *, filled: bool) -> float:
        """Seconds of copying the true heads of a rank's tokens to padded ones, which are `filled` with zeros before, or
        out of them: once for each field of a tensor, whatever slices its heads are in.
        """
        problem, seconds = self._problem, 0.0
        for tensor in dict.fromkeys(chunk.tensor for chunk in chunks) if problem.padded else ():
            for each in tensor.fields:
                all_bytes = problem.slices_of(tensor) * problem.field_bytes(each, wire=False, summed=False)
                seconds += self._device.copy_s(float(problem.true_share(tensor)) * all_bytes)
                seconds += self._device.copy_s(all_bytes / 2) * filled  # a fill only writes
        return seconds

    def _row_sums_s(self, op: RowSums) -> float:
        """O or its row sums are computed in one pass over O and dO, as fast as memory."""
        (part,) = op.parts
        fields = {field.name: field for chunk in (part, op.into) for field in chunk.tensor.fields}
        return self._device.copy_s(self._problem.field_bytes(fields["out"], wire=False))

    def _share_brought(self, index: int, ranks: np.ndarray) -> np.ndarray:
        """The share of its operand's rows that have come to each of some ranks: 1 where no transfer brought it."""
        if index not in self._brought:
            return np.ones(ranks.size)
        number, hop = self._brought[index]
        if (shares := self._share_of_run(number, ranks)) is not None:
            return shares
        if isinstance(hop, GroupReduce):  # rows of several members, of which some may be the same
            largest = self._problem.shards_of(hop.tensor).largest
            return np.asarray(cast_rows.received(hop, self._problem, ranks)) / largest
        return np.asarray(share_sent(hop, self._problem, hop.source(ranks, self._problem.n)))

    def _share_of_run(self, index: int, ranks: np.ndarray) -> np.ndarray | None:
        """The share of a chunk's rows that each of some ranks receives in a Pass of a run of them; None of others."""
        op, wanted = self._plan.ops[index], self.wanted.get(index)
        if wanted is None or wanted.rows is None or not isinstance(op, Pass):
            return None
        tokens = self._problem.field_tokens(op.tensor.fields[0], op.recv.owner(ranks, self._problem.n))
        return wanted.rows.counts(ranks) / np.maximum(tokens, 1)

    def _find_cast_s(self, tensor: Tensor, summed: bool, share: float = 1.0) -> float:
        return self._device.cast_s(self._problem, tensor, wire=True, summed=summed, share=share)

    def _cut_s(self, index: int, op: Pass, ranks: np.ndarray) -> np.ndarray:
        """Seconds of casting the rows that each rank sends, or of copying them together where it has more."""
        assert not isinstance(op.group, Exchange), "partners exchange whole chunks"
        summed, whole = op.send not in self._lowering.unsummed, self._problem.chunk_bytes(op.tensor, wire=True)
        sent, held = np.asarray(share_sent(op, self._problem, ranks)), self._share_brought(index, ranks)
        cast_s = _of_each(sent, lambda share: self._cast_s(op.tensor, summed, share))
        copy_s = _of_each(sent, lambda share: self._device.copy_s(share * whole))
        return np.where(cast_s > 0, cast_s, np.where(sent < held, copy_s, 0.0))


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


def _brought(plan: Plan, wanted: Demand) -> dict[int, tuple[int, Pass | GroupReduce]]:
    """By fold or transfer, the transfer that brought its operand, where that may have sent only some rows of it."""
    brings, brought_by = dict[Chunk, tuple[int, Pass | GroupReduce]](), dict[int, tuple[int, Pass | GroupReduce]]()
    if not any(_sends_rows(index, op, wanted) for index, op in plan.transfers):
        return brought_by
    for index, op in plan:
        operand = op.part if isinstance(op, Fold) else op.send if isinstance(op, Pass) else None
        if operand and operand in brings:
            number, hop = brings[operand]
            if isinstance(hop, GroupReduce) or hop.against or (isinstance(op, Fold) and _in_runs(wanted, number)):
                brought_by[index] = number, hop
        if isinstance(op, Pass):
            brings[op.recv] = index, op
        elif isinstance(op, GroupReduce):
            brings[op.writes[0]] = index, op
    return brought_by


def _sends_rows(index: int, op: Transfer, wanted: Demand) -> bool:
    """Whether a transfer may send only some rows of what it sends."""
    return isinstance(op, GroupReduce) or (isinstance(op, Pass) and bool(op.against)) or _in_runs(wanted, index)


def _in_runs(wanted: Demand, index: int) -> bool:
    """Whether an operation is a Pass of runs of rows (plan.row_runs)."""
    return index in wanted and wanted[index].rows is not None


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


def _of_each(shares: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
    """`seconds` of each rank's share, of which few are unlike: (q,)."""
    unlike, which = np.unique(shares, return_inverse=True)
    return np.array([seconds(float(share)) for share in unlike])[which]


def _in_proportion(shares: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
    """`seconds` of each rank's share of rows, of which many are unlike: a launch, and bytes in proportion. (q,)."""
    whole, half = seconds(1.0), seconds(0.5)
    return np.where(shares > 0, whole - 2 * (1 - shares) * (whole - half), 0.0)
