"""Costs of the blocks of a plan on each rank: kernel calls, copies of what they read, and folds of their results."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from weakref import proxy

import msgspec
import numpy as np

from sp_bench.cluster.device import DeviceCosts
from sp_bench.lower import Lowering
from sp_bench.lower.joined import copied_bytes
from sp_bench.plan.block_classes import block_classes
from sp_bench.plan.cast_rows import is_one_call, rows_read, works_of
from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.memo import cached
from sp_bench.plan.ops import Attend, AttendBackward, Block, Chunk, Fused, Gathered, Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DO, O, Tensor
from sp_bench.plan.union import Calls, Pieces, calls_of, classes


class BlockCosts:
    """The costs of the blocks of one plan on a device, for ranks that have it to themselves."""

    def __init__(self, plan: Plan, problem: Problem, device: DeviceCosts, lowering: Lowering) -> None:
        if device.implementation.repeats_keys and sum(isinstance(op, Block) for op in plan.ops) < 2:
            # A kernel that a rank calls once gets keys as they are (Implementation.repeats_keys).
            device = device.used_by(msgspec.structs.replace(device.implementation, repeats_keys=()))
        self._plan: Plan = proxy(plan)
        self._problem, self._device, self._lowering = problem, device, lowering
        self._flow = dataflow(plan)
        self.classes = block_classes(plan, problem)
        self.class_s = device.block_s(problem, plan.phase) + _held_s(problem, device)
        """Seconds of the kernel calls of a block, by class, with the fold of what keys that all ranks hold add:
        (classes,)."""
        self.joins = device.implementation.joins_blocks and isinstance(problem.blocks, PackBlocks)
        """Whether blocks of one query chunk that are ready together are one kernel call for variable lengths."""
        alone = (self.classes.first[index] for index, op in plan if isinstance(op, Attend | AttendBackward))
        self.alone = np.fromiter(alone, np.int64)
        """The rows of blocks that are operations of their own."""
        # A plan has thousands of operations, of few kinds.
        self._fold_s, self._with_folds_s = cached(self._find_fold_s), cached(self._find_with_folds_s)
        self._joined_s, self._caches_s = cached(self._find_joined_s), cached(self._find_caches_s)
        self._gathered_s, self._gathered_folds_s = cached(self._find_gathered_s), cached(self._find_gathered_folds_s)

    def kernels_s(self, index: int, op: Block, ranks: np.ndarray) -> np.ndarray:
        """Seconds of the kernel calls of operation `index`, with copies of what lies apart: (ranks,)."""
        if isinstance(op, Gathered):
            return self._gathered_s(op)[ranks]
        if isinstance(op, Fused) and self._problem.decodes:
            return self._caches_s(op)[ranks]
        if isinstance(op, Fused):
            in_place = ((index, False) in self._lowering.in_place, (index, True) in self._lowering.in_place)
            return self._by_union(op, ranks, lambda calls: self._calls_s(op, calls, in_place))
        return self.class_s[self.classes.of[self.classes.first[index], ranks]]

    def folds_s(self, index: int, op: Fused | Gathered, ranks: np.ndarray, merged: Container[Chunk] = ()) -> np.ndarray:
        """Seconds of folding its results into all chunks but those that are `merged` already: (ranks,)."""
        if isinstance(op, Gathered):
            return self._gathered_folds_s(index, op)[ranks]
        into = [chunk for chunk in op.writes if chunk not in merged]
        if self._problem.decodes:  # one result for all rows of each
            folds_s = sum(
                float(self._fold_s(c.tensor, self._flow.starts(index, c), c not in self._lowering.unsummed)[0])
                for c in into
            )
            return np.full(ranks.size, folds_s + self._apart_s(len(into)))
        fresh = {chunk for chunk in into if self._flow.starts(index, chunk)}
        return self._by_union(op, ranks, lambda calls: sum(self._folds_of(op, calls, c, c in fresh) for c in into))

    def _apart_s(self, chunks: int) -> float:
        """Seconds of cutting the statistics of a decode step's rows into those of chunks: a copy for chunks of one
        size, of which there are two at most, and none for a single head.
        """
        problem = self._problem
        if problem.kv_heads == 1 or chunks < 2:
            return 0.0
        rows, longer = divmod(problem.seqlen, problem.n)
        return self._device.launch_s * ((rows > 0) + (longer > 0))

    def with_folds_s(
        self, index: int, op: Attend | AttendBackward, merged: Container[Chunk], *, joined: bool = False
    ) -> np.ndarray:
        """Seconds of a block and of folding its results into all chunks but those that are `merged` already, by class
        of block: (classes,). A class without calls has no folds. Calls that are joined are not among them.

        `joined`: the block is one of several in a call for each piece of its queries, which gets all keys.
        """
        return self._with_folds_s(
            joined,
            *[
                (c.tensor, self._flow.starts(index, c), c not in self._lowering.unsummed)
                for c in op.writes
                if c not in merged
            ],
        )

    def kinds(self) -> np.ndarray:
        """A number for each class of blocks, the same for classes with the same costs: (classes,)."""
        parts = [self._problem.blocks.parts(keys=keys) for keys in (False, True)]
        if all(len({*each}) == 1 for each in parts):  # as of packs, which have a class for each pair of chunks
            return self.class_s
        costs = [(seconds, *(part if seconds else ())) for seconds, *part in zip(self.class_s, *parts, strict=True)]
        number = {cost: i for i, cost in enumerate(dict.fromkeys(costs))}
        return np.array([number[cost] for cost in costs])

    def joined_s(self, rows: Iterable[int], ranks: np.ndarray) -> np.ndarray:
        """Seconds of one kernel call each for the blocks in these rows of BlockClasses, all of one query chunk of a
        rank: (ranks,).
        """
        return self._joined_s(tuple(rows))[ranks]

    def joined_fold_s(self, index: int, op: Attend | AttendBackward) -> float:
        """Seconds of folding the result of a joined call into the chunk of its queries."""
        chunk = op.writes[0]
        starts, summed = self._flow.starts(index, chunk), chunk not in self._lowering.unsummed
        return float(self._fold_s(chunk.tensor, starts, summed)[0])  # a pack's chunks are whole

    def joinable(self) -> list[tuple[int, ...]]:
        """Rows of blocks of the whole plan that fold into the same chunks, if blocks are joined at all."""
        by_target: dict[Chunk, list[int]] = {}
        for index, op in self._plan if self.joins else ():
            if isinstance(op, Attend | AttendBackward):
                by_target.setdefault(op.writes[0], []).append(self.classes.first[index])
        return [*map(tuple, by_target.values())]

    def by_rank(self, index: int, op: Fused | Gathered) -> list[np.ndarray]:
        """Costs that may differ by rank, in seconds: [(n,), ...]. Those of other blocks follow from their classes."""
        everyone = np.arange(self._problem.n)
        return [self.kernels_s(index, op, everyone), self.folds_s(index, op, everyone)]

    def _find_caches_s(self, op: Fused) -> np.ndarray:
        """Seconds of the kernel call of a decode step's rows with each rank's keys, and of copying what was gathered of
        them beside the rank's own: (n,).
        """
        problem, everyone = self._problem, np.arange(self._problem.n)
        (keys,), owners = op.keys, np.stack([chunk.owner(everyone) for chunk in op.queries])
        chunk_bytes = 0 if problem.queries_everywhere else problem.chunk_bytes(op.queries[0].tensor, wire=False)
        copy_s = self._device.copy_s(len(op.queries) * chunk_bytes)
        mine = keys.owner(everyone)
        if len(op.queries) == problem.n:
            return self._device.caches_s(problem, everyone)[mine] + copy_s
        return np.array([self._device.caches_s(problem, owners[:, r])[mine[r]] for r in everyone]) + copy_s

    def _find_gathered_s(self, op: Gathered) -> np.ndarray:
        """Seconds of the calls of a Gathered block on each rank, with the copy of what came into its order: (n,)."""
        problem, phase = self._problem, self._plan.phase
        row_bytes = self._ordered_row_bytes(op)
        works, of = works_of(op, problem)
        slices = 1 if op.pairs == "queries" else len(op.queries)
        kernels_s = self._device.pieces_s(problem, phase, [work.sizes for work in works])
        keys_seen = np.array([work.kv_rows for work in works])
        several = np.array([not is_one_call(work) for work in works])
        kernels_s = slices * (kernels_s + self._device.makings_s(problem, phase, keys_seen, several))[of]
        rows, read = np.unique(rows_read(op, problem, np.arange(problem.n)), return_inverse=True)
        copies_s = np.array([self._device.copy_s(count * row_bytes) for count in rows.tolist()])[read]
        return np.where(kernels_s > 0, kernels_s + copies_s, 0.0)

    def _ordered_row_bytes(self, op: Gathered) -> int:
        """Bytes of a row that are copied into the order of positions, and of what is made of it back into the order in
        which it lies. The rank's own keys lie in order.
        """
        if not op.brought[0].index:
            return 0
        came = op.brought[0].tensor
        if op.pairs == "queries":  # backward, the O that has its row sums is made of dO
            tensors = [came, op.writes[0].tensor, *([] if op.forward else [DO.by_heads])]
        else:  # dKV, too
            tensors = [came] * (1 if op.forward else 2)
        return sum(self._problem.token_bytes(field, wire=False) for tensor in tensors for field in tensor.fields)

    def _find_gathered_folds_s(self, index: int, op: Gathered) -> np.ndarray:
        """Seconds of folding what its calls have of queries that see a key, and of the rank's own keys: (n,)."""
        problem, seconds = self._problem, []
        works, of = works_of(op, problem)
        folds = [(chunk, self._flow.starts(index, chunk)) for chunk in op.writes if not chunk.index]
        if op.pairs == "queries":  # those of all queries that came
            folds.append((op.writes[0], False))
        else:  # slices of heads have gradients of the same keys
            folds += [(chunk, False) for chunk in op.writes if chunk.tensor.of_keys][:1] * (len(op.queries) - 1)
        for work in works:
            total_s = 0.0
            for chunk, first in folds if work.sizes.pairs.size else []:
                rows = work.kv_rows if chunk.tensor.of_keys else work.q_rows
                share = rows / problem.shards_of(chunk.tensor).largest
                total_s += self._device.fold_s(problem, chunk.tensor, first=first, share=share, sliced=True)
            seconds.append(total_s)
        return np.array(seconds)[of]

    def _find_joined_s(self, rows: tuple[int, ...]) -> np.ndarray:
        """Ranks that split a chunk's heads have the same calls: (n,)."""
        if len(rows) == 1:
            return self.class_s[self.classes.of[rows[0]]]
        degree = self._problem.layout.head_parallel
        queries, keys = np.divmod(self.classes.of[[*rows], ::degree].astype(np.int64), self._problem.blocks.chunks)
        return np.repeat(self._device.joined_s(self._problem, self._plan.phase, queries[0], keys), degree)

    def _find_with_folds_s(self, joined: bool, *folds: tuple[Tensor, bool, bool]) -> np.ndarray:
        """Seconds of a block with folds of these (tensor, first, summed), by class: (classes,)."""
        folds_s = sum((self._fold_s(*fold) for fold in folds), np.zeros_like(self.class_s))
        more_s = self._repeated_more_s() if joined and not self.joins else 0.0
        return self.class_s * (not self.joins) + (self.class_s > 0) * (folds_s + more_s)

    def _repeated_more_s(self) -> np.ndarray | float:
        """Seconds, by class, that repeating the keys of a whole chunk and adding their gradients of each piece's call
        take on top of the keys that the block alone needs (DeviceCosts.repeats_s).
        """
        problem, phase = self._problem, self._plan.phase
        repeats_s = partial(self._device.repeats_s, problem, phase)
        whole_s = repeats_s(problem.keys.largest, calls=problem.layout.pieces)
        if not whole_s:
            return 0.0
        kinds = map(problem.blocks.regions_of, range(problem.blocks.classes))
        return np.array([whole_s - sum(repeats_s(len(region.kv)) for region in regions) for regions in kinds])

    def _find_fold_s(self, tensor: Tensor, first: bool, summed: bool) -> np.ndarray:
        """Seconds of the fold of a block's result into a chunk, by class of block: (classes,)."""
        parts = self._problem.blocks.parts(keys=tensor.of_keys)
        fold_s = partial(self._device.fold_s, self._problem, tensor, first=first, summed=summed)
        costs = {part: fold_s(share=part.share, sliced=part.sliced) for part in set(parts)}
        return np.array([costs[part] for part in parts])

    def _by_union(self, op: Fused, ranks: np.ndarray, cost_s) -> np.ndarray:
        """A cost of an operation's kernel calls, computed once for each combination of classes: (ranks,)."""
        columns = len(op.keys)
        kinds, kind = np.unique(
            np.array(classes(op, self._problem, ranks)).reshape(-1, ranks.size), axis=1, return_inverse=True
        )
        combinations = (tuple(map(int, each)) for each in kinds.T)
        rows = (tuple(each[i : i + columns] for i in range(0, len(each), columns)) for each in combinations)
        return np.array([cost_s(calls_of(self._problem, row)) for row in rows], float)[kind.ravel()]

    def _calls_s(self, op: Fused, calls: Calls, in_place: tuple[bool, bool]) -> float:
        device, problem, phase = self._device, self._problem, self._plan.phase
        kernels_s = device.regions_s(problem, phase, (call.region for call in calls))
        kernels_s += sum(device.makings_s(problem, phase, len(call.region.kv)) for call in calls)
        copied = (copied_bytes(call, self._problem, op, in_place=in_place) for call in calls)
        return kernels_s + sum(self._device.copy_s(size) for size in copied if size)

    def _folds_of(self, op: Fused, calls: Calls, chunk: Chunk, fresh: bool) -> float:
        """Seconds of folding what calls have of one chunk; the first result is only written, and copied if it is cut
        out of a larger one.
        """
        keys = chunk.tensor.of_keys
        read = next(block.kv if keys else block.q for block in op.blocks if chunk in block.writes)
        number = (op.keys if keys else op.queries).index(read)
        rows = self._problem.field_tokens(chunk.tensor.fields[0])
        summed, total_s = chunk not in self._lowering.unsummed, 0.0
        for call in calls:
            side: Pieces = call.kv if keys else call.q
            share = sum(len(piece.rows) for piece in side if piece.chunk == number) / rows
            if not share:
                continue
            fold_s = self._device.fold_s(
                self._problem, chunk.tensor, first=fresh, summed=summed, share=share, sliced=share < 1
            )
            if fresh and not fold_s and len(side) > 1 and not self._stays(chunk, side, rows):
                fold_s = self._device.copy_s(self._problem.chunk_bytes(chunk.tensor, wire=False, summed=summed))
            total_s += fold_s
            fresh = False
        return total_s

    def _stays(self, chunk: Chunk, side: Pieces, rows: int) -> bool:
        """Whether the parts of a call's result may stay in it: whole chunks, contiguous, that one reduction packs."""
        together = chunk in self._lowering.together and self._problem.batch == 1
        return together and all(len(piece.rows) == rows for piece in side)


def _held_s(problem: Problem, device: DeviceCosts) -> np.ndarray:
    """Seconds of a block's calls with keys that all ranks hold, and of their folds, by class: (classes,)."""
    if not problem.mask.held:
        return np.zeros(1)
    tensor = O.by_heads if problem.layout.head_parallel > 1 else O
    held = [problem.blocks.held_of(kind) for kind in range(problem.blocks.classes)]
    fold_s = device.fold_s(problem, tensor)
    return np.array([device.regions_s(problem, "forward", regions) + len(regions) * fold_s for regions in held])
