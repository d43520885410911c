"""Fuse blocks: consecutive blocks that wait for nothing more become one operation, with fewer and larger kernel calls.

It is a rewriting of plans that knows no method. Candidates are the blocks of a *segment* (plan.schedule), the blocks
between two waits, of which only the last is waited for. So a fused block begins when its first block did and is waited
for when its last block was: no transfer starts later than it did, and all overlap is kept.

Of a segment, blocks that share their query chunk, or their key chunk, are fused, whichever leaves fewer operations;
where it is the same, forward by query chunks, as each has an output to fold into, and backward by key chunks, which
have two gradients. Groups of the same chunks on the other side are one rectangle. The chunks of a side with several
must lie in neighbouring receive buffers, which one allocation holds side by side (lower.joined): a kernel then reads
them as one tensor, and nothing is copied. A rank's own chunks are where the caller put them, and stay apart.

Plans stay as they are where fewer calls can't be had: where the mask cuts a block of two different chunks along a
diagonal (striped layout), under packs of documents, where all ranks hold keys beside the assigned ones, and where
chunks differ in size or have several batch entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.ops import Attend, AttendBackward, Chunk, Fused, Op, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.schedule import schedule, segments

Single = Attend | AttendBackward


class Slot(NamedTuple):
    """The place of a received chunk: chunks of one `row` of buffers lie side by side, by number."""

    row: tuple[object, ...]
    number: int
    gathered: bool = False
    """Whether it is one of a gather's chunks, which lie in the order of their owners."""


def fuse(plan: Plan, problem: Problem) -> Plan:
    """The plan with its blocks fused, for an assigned problem; the same plan if there are none to fuse."""
    if not fusible(problem):
        return plan
    groups: list[tuple[int, ...]] = []
    slots = Slots(plan)
    for segment in segments(plan, schedule(plan).waits).values():
        for is_block, run in groupby(segment.ops, lambda index: isinstance(plan.ops[index], Single)):
            groups += _groups(plan, slots, list(run)) if is_block else []
    return _replaced(plan, groups) if groups else plan


def fusible(problem: Problem) -> bool:
    """Whether blocks of different chunks are FULL rectangles, and chunks can lie side by side as one tensor."""
    layout, blocks, degree = problem.layout, problem.blocks, problem.layout.head_parallel
    chunks = problem.n // degree
    mask = problem.mask
    if problem.batch > 1 or not mask.sends_unseen or mask.in_pieces or mask.held or chunks == 1:
        return False
    if any(tokens % (chunks * layout.pieces) for side in (problem.queries, problem.keys) for tokens in side.stretches):
        return False
    both = (blocks.regions_of(blocks.of(*pair)) for pair in ((0, degree), (degree, 0)))
    return all(region.kind is RegionKind.FULL for regions in both for region in regions)


def one_block(blocks: Sequence[Single], problem: Problem) -> list[Op]:
    """Blocks that start together as one operation, or one by one where the mask doesn't allow it.

    Each of their query chunks must have a block with each of their key chunks. A decode step's are one kernel call for
    variable lengths, whatever its chunks.
    """
    if len(blocks) > 1 and (problem.decodes or fusible(problem)):
        return [Fused(tuple(blocks))]  # pyright: ignore[reportArgumentType, reportReturnType]  # all of one phase
    return [*blocks]


class Slots:
    """The places of the chunks that the blocks of a plan read."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._flow = plan, dataflow(plan)
        self._buffers = schedule(plan).receive_buffers
        rows: dict[tuple[object, ...], list[int]] = {}
        for buffer in dict.fromkeys(self._buffers.values()):
            rows.setdefault(buffer[1:], []).append(buffer.number)
        self._numbers = {number: place for row in rows.values() for place, number in enumerate(sorted(row))}

    def of(self, index: int, chunk: Chunk) -> Slot | None:
        """The slot of a chunk that operation `index` reads; None if it is in no receive buffer."""
        value = next(value for value in self._flow.reads[index] if value.chunk == chunk)
        maker = self._flow.first_use[value]
        op = self._plan.ops[maker]
        if not isinstance(op, Transfer) or chunk not in op.writes or maker not in self._buffers:
            return None
        buffer = self._buffers[maker]
        if buffer.chunks > 1:
            return Slot((buffer,), chunk.index, gathered=True)
        return Slot(buffer[1:], self._numbers[buffer.number])


def _groups(plan: Plan, slots: Slots, run: Sequence[int]) -> list[tuple[int, ...]]:
    """The blocks of a run to be fused: groups of at least two."""
    by_query = _joined(plan, slots, run, attrgetter("q"), attrgetter("kv"))
    by_key = _joined(plan, slots, run, attrgetter("kv"), attrgetter("q"))
    ways = (by_query, by_key) if plan.phase == "forward" else (by_key, by_query)
    return max(ways, key=lambda groups: sum(len(group) - 1 for group in groups))


def _joined(
    plan: Plan, slots: Slots, run: Sequence[int], shared: Callable[[Single], Chunk], other: Callable[[Single], Chunk]
) -> list[tuple[int, ...]]:
    """Groups of blocks with the same `shared` chunk, whose `other` chunks lie in neighbouring slots.

    Groups of the same other chunks are one, a rectangle, where their shared chunks lie in neighbouring slots, too.
    """
    blocks = {index: op for index in run if isinstance(op := plan.ops[index], Single)}
    rows: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for index, op in blocks.items():
        if slot := slots.of(index, other(op)):
            rows.setdefault((shared(op), other(op).heads, slot.row), []).append((slot.number, index))
    lines = {group[0]: group for row in rows.values() for group in _neighbours(row) if len(group) > 1}
    groups: list[tuple[int, ...]] = []
    beside: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for first, line in lines.items():
        chunk, others = shared(blocks[first]), tuple(other(blocks[index]) for index in line)
        if slot := slots.of(first, chunk):
            beside.setdefault((others, chunk.heads, slot.row), []).append((slot.number, first))
        else:
            groups.append(line)
    for row in beside.values():
        groups += [tuple(index for first in firsts for index in lines[first]) for firsts in _neighbours(row)]
    return groups


def _neighbours(row: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The indices of (slot number, index) pairs, in groups of consecutive numbers."""
    ordered = sorted(row)
    runs = groupby(enumerate(ordered), lambda numbered: numbered[1][0] - numbered[0])
    return [tuple(index for _, (_, index) in run) for _, run in runs]


def _replaced(plan: Plan, groups: Iterable[tuple[int, ...]]) -> Plan:
    """The plan with each group as one operation, in the place of the group's last one."""
    fused: dict[int, Op] = {}
    dropped: set[int] = set()
    for group in groups:
        last = max(group)
        fused[last] = Fused(tuple(plan.ops[index] for index in group))  # pyright: ignore[reportArgumentType]
        dropped |= {*group} - {last}
    kept = [index for index in range(len(plan.ops)) if index not in dropped]
    ops = tuple(fused.get(index, plan.ops[index]) for index in kept)
    return replace(plan, ops=ops, steps=tuple(plan.steps[index] for index in kept))
