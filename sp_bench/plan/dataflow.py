"""The dataflow of a plan: which values each operation reads and writes, and how long each value lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sp_bench.plan.ops import BLOCKS, Bundle, Chunk, Fold, Plan, PlanError, RowSums, Transfer


class Value(NamedTuple):
    """One version of a chunk. Receiving it again, or adding to it after it was sent on, starts a new version.

    In a plan's dataflow equal values are one object, and so are the chunks of equal ones: their ids can stand for them.
    """

    chunk: Chunk
    version: int


Values = tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Dataflow:
    """The values of a plan and their lifetimes, the same on every rank. Lifetimes are indices of operations."""

    reads: Values
    """The values that each operation reads, including those inside a bundle."""
    writes: Values
    """The values that each operation writes."""
    first_use: dict[Value, int]
    """The operation that makes each value; 0 for a value that the plan starts with."""
    last_use: dict[Value, int]
    """The operation that uses each value last; one past the end for a value that the plan starts or ends with."""

    def starts(self, index: int, chunk: Chunk) -> bool:
        """Whether operation `index` makes a new value of `chunk` (it may add to one instead)."""
        for value in self.writes[index]:  # noqa: SIM110  # asked for each of thousands of blocks
            if value.chunk == chunk and self.first_use[value] == index:
                return True
        return False


_CACHE: WeakKeyDictionary[Plan, Dataflow] = WeakKeyDictionary()


def dataflow(plan: Plan) -> Dataflow:
    """The dataflow of a plan, cached.

    Raises PlanError for an operation that reads a chunk that is not there, or receives over an input of the plan.
    """
    if plan not in _CACHE:
        reads, writes, newest = _values(plan)
        _CACHE[plan] = Dataflow(reads, writes, *_lifetimes(plan, reads, writes, newest))
    return _CACHE[plan]


def _values(plan: Plan) -> tuple[Values, Values, dict[Chunk, Value]]:
    """The values that each operation reads and writes, and the last one of each chunk."""
    newest = {chunk: Value(chunk, 0) for chunk in plan.starts_with}
    given, held = frozenset(newest), set(newest)
    bundled: dict[Value, tuple[Value, ...]] = {}
    reads, writes = [], []
    for index, op in plan:
        if isinstance(op, Transfer) and op.lane == BLOCKS:
            raise PlanError(f"operation {index}, {op}: {BLOCKS} is no lane")
        reading = op.reads
        for chunk in reading:
            if chunk not in held:
                gone = "that was sent on or folded already" if chunk in newest else "before anything has put it there"
                raise PlanError(f"operation {index}, {op}: reads {chunk} {gone}")
        read = tuple([newest[chunk] for chunk in reading])
        reads.append((*read, *(part for value in read for part in bundled.get(value, ()))) if bundled else read)
        if isinstance(op, Fold | Transfer):  # a partial is folded or sent on once
            held -= {chunk for chunk in reading if chunk.tensor.is_partial and chunk not in plan.kept}
        writing = op.writes
        for chunk in writing:
            if chunk in given:
                raise PlanError(f"operation {index}, {op}: receives over {chunk}, which the rank has already")
            if isinstance(op, Transfer) or chunk not in held:
                last = newest.get(chunk)
                newest[chunk] = Value(last.chunk, last.version + 1) if last else Value(chunk, 0)
                held.add(chunk)
        writes.append(tuple([newest[chunk] for chunk in writing]))
        if isinstance(op, Bundle):
            bundled[writes[-1][0]] = reads[-1]
    for chunk in plan.ends_with:
        if chunk not in held:
            raise PlanError(f"the end of the plan: its output {chunk} was never computed, or sent on")
    return tuple(reads), tuple(writes), newest


def _lifetimes(
    plan: Plan, reads: Values, writes: Values, newest: dict[Chunk, Value]
) -> tuple[dict[Value, int], dict[Value, int]]:
    """(first use, last use) of each value; inputs live from the start, outputs to the end."""
    end = len(plan.ops)
    first_values = [Value(chunk, 0) for chunk in plan.starts_with]
    first = dict.fromkeys(first_values, 0)
    last: dict[Value, int] = {}
    for index in range(end):
        for value in (*reads[index], *writes[index]):
            first.setdefault(value, index)
            last[value] = index
    last |= dict.fromkeys(first_values, end) | {newest[chunk]: end for chunk in plan.ends_with}
    return first, last


def row_sums_released(plan: Plan) -> dict[int, list[Chunk]]:
    """By operation, the chunks made by RowSums that are held no longer after it.

    One that is sent is held to the end of the plan, as no block says when it has gone.
    """
    flow, released = dataflow(plan), dict[int, list[Chunk]]()
    for index, op in plan:
        if isinstance(op, RowSums):
            last = flow.last_use[flow.writes[index][0]]
            if not isinstance(plan.ops[last], Transfer):
                released.setdefault(last, []).append(op.into)
    return released
