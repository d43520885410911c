"""Steps of methods that cast rows: which stage's rows arrive while which blocks are computed.

A stage is the chunks, by how far their owners are, whose rows come together. The rank's own rows come first, which need
no transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from sp_bench.plan import (
    DOQ,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Gathered,
    Grid,
    GroupCast,
    GroupReduce,
    Op,
    RowSums,
    Steps,
)

Stages = Sequence[tuple[int, ...]]


def cast_rows(steps: Steps, q: Chunk, kv: Chunk, o: Chunk, stages: Stages) -> None:
    """Step s computes with the rows of stage s, the rank's own first, while those of stage s + 1 arrive."""
    each = [(0,), *stages]
    for s, members in enumerate(each):
        steps.next()
        if s < len(stages):
            steps.do(GroupCast("kv", kv, each[s + 1], q))
        steps.do(Gathered(tuple(Attend(q, kv.at(u), o) for u in members)))


def cast_rows_backward(steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk, stages: Stages) -> None:
    """As cast_rows; gradients of stage s go home while stage s + 1 is computed, and are added after it."""
    each, arrived = [(0,), *stages], list[Fold]()
    for s, members in enumerate(each):
        steps.next()
        if s < len(stages):
            steps.do(GroupCast("kv", kv, each[s + 1], odoq))
        steps.do(Gathered(tuple(AttendBackward(odoq, kv.at(u), dq, dkv.at(u)) for u in members)))
        if s:
            steps.do(*arrived[-1:], GroupReduce("dkv", dkv, members, odoq, s))
            arrived.append(Fold(dkv.arriving(s), dkv))
    if arrived:
        steps.next(arrived[-1])


def cast_slices(
    steps: Steps,
    q: Sequence[Chunk],
    kv: Sequence[Chunk],
    o: Sequence[Chunk],
    stages: Stages,
    bring: Callable[[int], list[Op]],
    take_back: Callable[[int], list[Op]],
) -> None:
    """As cast_rows, for slices of the heads: `bring` and `take_back` have what comes before a slice and after it.

    Of slices with the same keys, the rank's own and the last stage's blocks are computed one slice after another, while
    the next is brought and the one before goes back. Other stages are computed for all of them at once.
    """
    each, parts = [(0,), *stages], len(q) // len(kv)
    steps.next(*bring(0))
    for keys, s in product(range(len(kv)), range(len(each))):
        alike, one_by_one = range(keys * parts, (keys + 1) * parts), s in (0, len(stages))
        for some in [[i] for i in alike] if one_by_one else [[*alike]]:
            steps.next()
            if not s and some[0] + 1 < len(q):
                steps.do(*bring(some[0] + 1))
            if some[0] == alike[0] and s < len(stages):
                steps.do(GroupCast("kv", kv[keys], each[s + 1], q[some[0]]))
            steps.do(Gathered(tuple(Attend(q[i], kv[keys].at(u), o[i]) for i in some for u in each[s])))
            if s == len(stages):
                steps.do(*take_back(some[0]))


def cast_slices_backward(
    steps: Steps,
    odoq: Sequence[Chunk],
    kv: Sequence[Chunk],
    dq: Sequence[Chunk],
    dkv: Sequence[Chunk],
    stages: Stages,
    bring: Callable[[int], list[Op]],
    take_back: Callable[[int], list[Op]],
    take_back_keys: Callable[[int], list[Op]],
) -> None:
    """As cast_slices, but the rank's own blocks come last: gradients of the last stage's rows go home while they are
    computed (MagiAttention's option to hide the tail of the reduction). Where slices have the same keys, those of the
    very first slice come first, while rows arrive.
    """
    parts, due = len(odoq) // len(kv), list[Op]()

    def cast(keys: int, members: Stages) -> list[Op]:
        return [GroupCast("kv", kv[keys], of_stage, odoq[keys * parts]) for of_stage in members]

    for keys in range(len(kv)):
        slices = range(keys * parts, (keys + 1) * parts)
        early = slices[:1] if parts > 1 and not keys else slices[:0]
        runs = [*((0, [i]) for i in early), *((s, [*slices]) for s in range(1, len(stages) + 1))]
        runs += [(0, [i]) for i in slices[len(early) :]]
        for at, (stage, some) in enumerate(runs):
            steps.next()
            if not at:
                steps.do(*cast(keys, stages[:1]), *_each(bring, some))
            steps.do(*(cast(keys, stages[stage : stage + 1]) if stage else []))
            members = stages[stage - 1] if stage else (0,)
            pairs = ((i, kv[keys].at(u), dkv[keys].at(u)) for i in some for u in members)
            steps.do(Gathered(tuple(AttendBackward(odoq[i], x, dq[i], dx) for i, x, dx in pairs)))
            steps.do(*_each(bring, _not_in(runs[: at + 1], _slices(runs[at + 1 : at + 2]))))
            steps.do(*_each(take_back, _not_in(runs[at + 1 :], some)))
            if stage:
                steps.do(*due, GroupReduce("dkv", dkv[keys], members, odoq[keys * parts], stage))
                due = [Fold(dkv[keys].arriving(stage), dkv[keys])]
        steps.do(*due, *take_back_keys(keys))
        due = []


_Runs = Sequence[tuple[int, Sequence[int]]]
"""Blocks one after the other: (the stage of their rows of keys, from 1, or 0 for the rank's own; their slices)."""


def _slices(runs: _Runs) -> list[int]:
    return [i for _, some in runs for i in some]


def _not_in(runs: _Runs, some: Sequence[int]) -> list[int]:
    """The slices that none of the runs has."""
    had = _slices(runs)
    return [i for i in some if i not in had]


def _each(of_slice: Callable[[int], list[Op]], slices: Sequence[int]) -> list[Op]:
    return [op for i in slices for op in of_slice(i)]


def trade_rows(steps: Steps, q: Chunk, kv: Chunk, o: Chunk, stages: Stages) -> None:
    """As cast_rows, but of some pairs of chunks the queries go to the keys (plan.travel). Their blocks come first in a
    stage, so that the outputs go home while its other blocks are computed, and are merged a step later.
    """
    each, arrived = [(0,), *stages], list[Fold]()
    for s, members in enumerate(each):
        steps.next(*_traded(q, kv, each[s + 1 : s + 2]))
        if s:
            steps.do(
                Gathered(tuple(Attend(q.at(u), kv, o.at(u)) for u in members), "queries"),
                GroupReduce("o", o, members, kv, s, pairs="queries"),
            )
        steps.do(Gathered(tuple(Attend(q, kv.at(u), o) for u in members), "keys"), *arrived[-1:])
        if s:
            arrived.append(Fold(o.arriving(s), o))
    if arrived:
        steps.next(arrived[-1])


def trade_rows_backward(steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk, stages: Stages) -> None:
    """As trade_rows; doq travels, and the gradients of both kinds of rows go home."""
    each, arrived = [(0,), *stages], [list[Op]()]
    doq = odoq._replace(tensor=DOQ.by_heads if odoq.tensor.is_by_heads else DOQ)
    if stages:
        steps.next(RowSums((odoq,), doq))
    for s, members in enumerate(each):
        steps.next(*_traded(doq, kv, each[s + 1 : s + 2], odoq))
        if s:
            steps.do(
                Gathered(tuple(AttendBackward(doq.at(u), kv, dq.at(u), dkv) for u in members), "queries"),
                GroupReduce("dq", dq, members, kv, s, pairs="queries"),
            )
        steps.do(Gathered(tuple(AttendBackward(odoq, kv.at(u), dq, dkv.at(u)) for u in members), "keys"))
        if s:
            steps.do(*arrived[-1], GroupReduce("dkv", dkv, members, odoq, s, pairs="keys"))
            arrived.append([Fold(dq.arriving(s), dq), Fold(dkv.arriving(s), dkv)])
    if arrived[-1]:
        steps.next(*arrived[-1])


def _traded(travelling: Chunk, kv: Chunk, stages: Stages, queries: Chunk | None = None) -> list[GroupCast]:
    """The casts of both kinds of rows for some stages: what travels of queries, and the keys that `queries` see."""
    return [
        cast
        for members in stages
        for cast in (
            GroupCast("q", travelling, members, kv, pairs="queries"),
            GroupCast("kv", kv, members, queries or travelling, pairs="keys"),
        )
    ]


def relay_rows(steps: Steps, q: Chunk, kv: Chunk, o: Chunk, stages: Stages) -> None:
    """cast_rows in two levels: `stages` has other nodes by their distance, and the rank's own node comes before them.

    While step s computes, rows of step s + 1 are passed on inside the node, and those of step s + 2 cross.
    """
    relayed = _Relayed(kv, stages)
    for s, members in enumerate(relayed.members):
        steps.next(*relayed.casts(s, kv, q), Gathered(tuple(Attend(q, kv.at(u), o) for u in members)))


def relay_rows_backward(steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk, stages: Stages) -> None:
    """As relay_rows; gradients are added in the node, a step later cross, and a step later are added to the rank's."""
    relayed, due = _Relayed(kv, stages), dict[int, list[Op]]()
    for s, members in enumerate(relayed.members):
        steps.next()
        blocks = Gathered(tuple(AttendBackward(odoq, kv.at(u), dq, dkv.at(u)) for u in members))
        steps.do(*relayed.casts(s, kv, odoq), blocks, *due.pop(s, ()))
        for own in relayed.owns[s]:
            sums = dkv.at(own)
            steps.do(GroupReduce("dkv", sums, relayed.beside(own), odoq))
            due.setdefault(s + 1, []).append(Fold(sums.arriving(), sums))
        if across := relayed.across[s]:
            due[s + 1].append(GroupReduce("outer dkv", dkv, across, odoq, s))
            due.setdefault(s + 2, []).append(Fold(dkv.arriving(s), dkv))
    for s in sorted(due):
        steps.next(*due[s])


class _Relayed:
    """The members of each step, the rank's own first and then those of its node, and how their rows come."""

    def __init__(self, kv: Chunk, stages: Stages) -> None:
        assert isinstance(kv.home, Grid)
        self._size = size = kv.home.inner.size
        self.across = [(), (), *(tuple(size * away for away in stage) for stage in stages)]
        """By step, the chunks whose rows cross to this rank."""
        self.owns = [(), (0,), *self.across[2:]]
        """By step, the chunks of which it passes rows on to its neighbours."""
        self.members = [(0,), self.beside(0), *(self._with(across) for across in self.across[2:])]

    def beside(self, own: int) -> tuple[int, ...]:
        """The chunks whose rows come from neighbours, that these have as `own`."""
        return tuple(range(own + 1, own + self._size))

    def casts(self, s: int, kv: Chunk, queries: Chunk) -> list[GroupCast]:
        """The casts that begin with step s."""
        crossing, passed = (each[s + ahead : s + ahead + 1] for each, ahead in ((self.across, 2), (self.owns, 1)))
        between = [GroupCast("outer kv", kv, members, queries) for members in crossing]
        return between + [GroupCast("kv", kv.at(own), self.beside(own), queries) for owns in passed for own in owns]

    def _with(self, across: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(u + place for u in across for place in range(self._size))
