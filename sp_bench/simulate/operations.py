"""What the operations of a plan cost on each rank's device: blocks, folds, row sums, casts and copies of transfers.

Links are not among it (simulate.graph). The kernel calls of blocks and the folds of their results are those of
simulate.blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import cache, partial

import numpy as np

from sp_bench.cluster.device import DeviceCosts
from sp_bench.lower import Lowering
from sp_bench.plan import casts
from sp_bench.plan.demand import demand
from sp_bench.plan.groups import Exchange
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Block,
    Chunk,
    Fold,
    GroupReduce,
    Op,
    Pass,
    Plan,
    ReduceScatter,
    RowCollective,
    RowSums,
    Transfer,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor
from sp_bench.plan.transfers import messages, share_sent
from sp_bench.simulate.blocks import BlockCosts


class OperationCosts:
    """Seconds of the operations of one plan, for ranks that have their devices to themselves."""

    def __init__(self, plan: Plan, problem: Problem, device: DeviceCosts, lowering: Lowering) -> None:
        self._plan, self._problem, self._device, self._lowering = plan, problem, device, lowering
        self._blocks = BlockCosts(plan, problem, device, lowering)
        self._cast_s = cache(self._find_cast_s)  # a plan has thousands of operations, of few kinds
        self._brought = _brought(plan)
        self.wanted = demand(plan, problem)
        """By operation, on which ranks it has something to receive or to fold (plan.demand)."""

    def by_rank(self, index: int, op: Op) -> list[np.ndarray]:
        """What an operation costs that may differ by rank: [(n,), ...]."""
        if isinstance(op, Block):
            return self._blocks.by_rank(index, op)
        everyone = np.arange(self._problem.n)
        if isinstance(op, Transfer):
            wanted = self.wanted.get(index)
            sizes = [sum(sizes.values()) for sizes in messages(op, self._problem, everyone, wanted)]
            costs = (*sizes, self.staged_s(index, op, everyone), wanted)
            return [cost for cost in costs if isinstance(cost, np.ndarray)]
        shares = [self._share_brought(index, everyone)] if index in self._brought else []
        return [*shares, self.wanted[index]] if index in self.wanted else shares

    def work_s(self, indices: Iterable[int], ranks: np.ndarray) -> np.ndarray:
        """What blocks and folds that run one after the other take on each of some ranks: (ranks,)."""
        implementation, seconds = self._device.implementation, np.zeros(ranks.size)
        merged: set[Chunk] = set()
        calls = np.zeros(ranks.size)
        for index in indices:
            op = self._plan.ops[index]
            taken_s = self._work_of(index, op, ranks, merged)
            seconds += taken_s
            if isinstance(op, Block):
                calls += (np.asarray(taken_s) > 0) * (op.writes[0] not in merged)
                merged |= {*op.writes} if implementation.joins_blocks else set()
        return np.maximum(seconds, calls * implementation.host_s_per_block)

    def results_s(self) -> float:
        """What casting the results to the compute dtype takes."""
        partials = [chunk for chunk in self._plan.ends_with if chunk.tensor.is_partial]
        results = [(chunk.tensor, chunk not in self._lowering.unsummed) for chunk in partials]
        return sum(self._device.cast_s(self._problem, tensor, wire=False, summed=s) for tensor, s in results)

    def staged_s(self, index: int, op: Transfer, ranks: np.ndarray) -> np.ndarray | float:
        """Seconds of casting or packing what is sent, or of copying it where a rank sends to itself."""
        if isinstance(op, AllToAll):
            return self._device.copy_s(self._lowering.packed_bytes(op)[0])
        if isinstance(op, AllGather):
            return 0.0
        if isinstance(op, RowCollective):  # rows are gathered, and cast where they have to be
            row_bytes = sum(self._problem.token_bytes(field, wire=True) for field in op.tensor.fields)
            rows = np.asarray(casts.sent(op, self._problem, ranks))
            return _of_each(rows, lambda count: self._device.copy_s(count * row_bytes))
        if isinstance(op, ReduceScatter):
            by_field = messages(op, self._problem, 0)[0] if op.group.size > 1 else {}
            return (op.group.size - 1) * self._device.copy_s(sum(by_field.values()))
        if op.against:
            return self._cut_s(index, op, ranks)
        cast_s = self._cast_s(op.tensor, op.send not in self._lowering.unsummed)
        if not isinstance(op.group, Exchange):
            return cast_s
        whole = sum(self._problem.field_bytes(field, wire=True) for field in op.tensor.fields)
        return cast_s + (op.target(ranks) == ranks) * self._device.copy_s(whole)

    def arrived_s(self, op: AllToAll | ReduceScatter | RowCollective, arrivals: int) -> float:
        """Seconds of unpacking what an all-to-all brought, or of merging the arrivals of a reduce-scatter."""
        if isinstance(op, RowCollective):
            return 0.0
        if isinstance(op, AllToAll):
            return self._device.copy_s(self._lowering.packed_bytes(op)[1])
        return arrivals * self._device.fold_s(self._problem, op.tensor, arriving=True)

    def moves(self, index: int, op: Transfer, ranks: np.ndarray) -> tuple[np.ndarray | bool, np.ndarray | bool]:
        """Whether each of some ranks sends in a transfer, and whether it receives: (ranks,) each, or True for all."""
        if index not in self.wanted:
            return True, True
        assert isinstance(op, Pass)
        return self.wanted[index][op.target(ranks)], self.wanted[index][ranks]

    def _work_of(self, index: int, op: Op, ranks: np.ndarray, merged: Container[Chunk]) -> np.ndarray | float:
        """What a fold costs, or a block with its folds, but for those into chunks that are `merged` already."""
        if isinstance(op, Fold):
            fold_s = partial(self._device.fold_s, self._problem, op.into.tensor, arriving=True)
            wants = self.wanted[index][ranks] if index in self.wanted else 1.0
            if index not in self._brought:
                return fold_s() * wants
            shares = self._share_brought(index, ranks)
            return _of_each(shares, lambda share: fold_s(share=share, sliced=share < 1)) * wants
        if isinstance(op, RowSums):
            return self._row_sums_s(op)
        if not isinstance(op, Block):
            return 0.0
        kernels_s = self._blocks.kernels_s(index, op, ranks)
        return kernels_s + (kernels_s > 0) * self._blocks.folds_s(index, op, ranks, merged)

    def _row_sums_s(self, op: RowSums) -> float:
        """O or its row sums are computed in one pass over O and dO, as fast as memory."""
        (part,) = op.parts
        fields = {field.name: field for chunk in (part, op.into) for field in chunk.tensor.fields}
        return self._device.copy_s(self._problem.field_bytes(fields["out"], wire=False))

    def _share_brought(self, index: int, ranks: np.ndarray) -> np.ndarray:
        """The share of its operand's rows that have come to each of some ranks: 1 where no transfer brought it."""
        if index not in self._brought:
            return np.ones(ranks.size)
        hop = self._brought[index]
        if isinstance(hop, GroupReduce):  # rows of several members, of which some may be the same
            return np.asarray(casts.received(hop, self._problem, ranks)) / self._problem.block_tokens
        return np.asarray(share_sent(hop, self._problem, hop.source(ranks)))

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


def _brought(plan: Plan) -> dict[int, Pass | GroupReduce]:
    """By fold or transfer, the transfer that brought its operand, where that may have sent only some rows of it."""
    brings, found = dict[Chunk, Pass | GroupReduce](), dict[int, Pass | GroupReduce]()
    for index, op in plan:
        operand = op.part if isinstance(op, Fold) else op.send if isinstance(op, Pass) else None
        if operand and (hop := brings.get(operand)) and (isinstance(hop, GroupReduce) or hop.against):
            found[index] = hop
        if isinstance(op, Pass):
            brings[op.recv] = op
        elif isinstance(op, GroupReduce):
            brings[op.writes[0]] = op
    return found


def _of_each(shares: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
    """`seconds` of each rank's share, of which few are unlike: (q,)."""
    unlike, which = np.unique(shares, return_inverse=True)
    return np.array([seconds(float(share)) for share in unlike])[which]
