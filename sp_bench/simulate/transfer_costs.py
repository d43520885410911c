"""Costs of a plan's transfers on each rank's device: casts, packing and copies of what is sent, unpacking and merging
of what arrives, and its folds. Links and latencies are not among it (simulate.message_flows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import proxy

import numpy as np

from sp_bench.cluster.device import DeviceCosts
from sp_bench.lower import Lowering
from sp_bench.plan import cast_rows
from sp_bench.plan.demand import Demand, demand
from sp_bench.plan.groups import Exchange
from sp_bench.plan.memo import cached
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Chunk,
    Fold,
    GroupReduce,
    Pass,
    Plan,
    ReduceScatter,
    RowCollective,
    Transfer,
    TreeReduce,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor
from sp_bench.plan.transfers import messages, share_sent


class TransferCosts:
    """Seconds that the transfers of one plan take of devices, for ranks that have their devices to themselves."""

    def __init__(self, plan: Plan, problem: Problem, device: DeviceCosts, lowering: Lowering) -> None:
        self._plan: Plan = proxy(plan)
        self._problem, self._device, self._lowering = problem, device, lowering
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

    def staged_s(self, index: int, op: Transfer, ranks: np.ndarray) -> np.ndarray | float:
        """Seconds of casting or packing what is sent, or of copying it where a rank sends to itself."""
        if isinstance(op, AllToAll):
            padding_s = self.padding_s(self._plan.inputs, filled=True) if index == self._first_transfer else 0.0
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

    def fold_s(self, index: int, op: Fold, ranks: np.ndarray) -> np.ndarray | float:
        """Seconds of folding what has arrived on each of some ranks: (ranks,), or one number for all."""
        wants = self.wanted[index].there[ranks] if index in self.wanted else 1.0
        if index not in self._brought:
            return self._arrived_fold_s(op.into.tensor, 1.0) * wants
        each = _in_proportion if _in_runs(self.wanted, self._brought[index][0]) else _of_each
        shares = self._share_brought(index, ranks)
        return each(shares, lambda share: self._arrived_fold_s(op.into.tensor, share)) * wants

    def padding_s(self, chunks: Sequence[Chunk], *, filled: bool) -> float:
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

    def _find_arrived_fold_s(self, tensor: Tensor, share: float) -> float:
        return self._device.fold_s(self._problem, tensor, arriving=True, share=share, sliced=share < 1)

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


def _of_each(shares: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
    """`seconds` of each rank's share, of which few are unlike: (q,)."""
    unlike, which = np.unique(shares, return_inverse=True)
    return np.array([seconds(float(share)) for share in unlike])[which]


def _in_proportion(shares: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
    """`seconds` of each rank's share of rows, of which many are unlike: a launch, and bytes in proportion. (q,)."""
    whole, half = seconds(1.0), seconds(0.5)
    return np.where(shares > 0, whole - 2 * (1 - shares) * (whole - half), 0.0)
