"""Demand: which transfers of a plan carry something that its receiver needs.

A plan is the same on all ranks, but under a pack of documents many blocks of it are empty. A received chunk is wanted
where a later block of the receiver sees it, or the receiver sends it on to a rank that wants it. A partial is wanted
where a block has been folded into it. What is not wanted is neither sent nor folded, except by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.plan.block_classes import BlockClasses, block_classes
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Block,
    Bundle,
    Chunk,
    Fold,
    GroupCast,
    GroupReduce,
    Pass,
    Plan,
    ReduceScatter,
    Transfer,
    keep,
)
from sp_bench.plan.problem import Problem

Demand = Mapping[int, np.ndarray]
"""{operation: on which ranks it has something to receive or to fold, (n,)}. Others have it on all ranks."""

ALL: Demand = MappingProxyType({})
_CACHE: WeakKeyDictionary[Plan, dict[Problem, Demand]] = WeakKeyDictionary()
_UNTOUCHED: WeakKeyDictionary[Plan, dict[bool, Mapping[Chunk, np.ndarray]]] = WeakKeyDictionary()


def demand(plan: Plan, problem: Problem) -> Demand:
    """On which ranks each Pass and Fold of a plan is wanted, cached; empty where the mask has all of them sent."""
    if problem.mask.sends_unseen:
        return ALL
    found = _CACHE.setdefault(plan, {})
    if problem not in found:
        visible = _visible(plan, problem)
        keep(found, problem, _of_partials(plan, visible) | _of_operands(plan, visible))
    return found[problem]


def untouched_partials(plan: Plan, problem: Problem, *, compute: bool = True) -> Mapping[Chunk, np.ndarray]:
    """The partials that ranks send although nothing has come to them, as neutral elements, and which ranks do: (n,).

    Their blocks see nothing under the mask, or are left out (without `compute`).
    """
    wanted, visible = demand(plan, problem), _visible(plan, problem)
    if wanted or visible.differs:
        return _untouched(plan, wanted, visible, np.ones(plan.n, bool), compute=compute)
    known = _UNTOUCHED.setdefault(plan, {})  # the same of every such problem
    if compute not in known:
        known[compute] = _untouched(plan, wanted, visible, np.True_, compute=compute)
    return known[compute]


def _untouched(
    plan: Plan, wanted: Demand, visible: Visible, everyone: np.ndarray | np.bool_, *, compute: bool
) -> Mapping[Chunk, np.ndarray]:
    """`everyone` is (n,), or True where ranks don't differ."""
    nobody, peers = ~everyone, _peers(plan.n, 1)
    touched, found = dict.fromkeys(plan.starts_with, everyone), dict[Chunk, np.ndarray | np.bool_]()
    for index, op in plan:
        if isinstance(op, Transfer):
            sends = wanted[index][peers(op)] if isinstance(op, Pass) and index in wanted else everyone
            for chunk in op.reads:
                if chunk.tensor.is_partial and not isinstance(op, GroupReduce):  # which sends rows that there are
                    found[chunk] = found.get(chunk, nobody) | (sends & ~touched.get(chunk, nobody))
                    touched[chunk] = touched.get(chunk, nobody) if chunk in plan.kept else nobody
            touched |= dict.fromkeys(op.writes, everyone)
        elif isinstance(op, Block):
            for block, sees in visible.of(index, op, everyone) if compute else ():
                for chunk in block.writes:
                    touched[chunk] = touched.get(chunk, nobody) | sees
        elif isinstance(op, Fold):
            folded = wanted.get(index, everyone) if compute else nobody
            touched[op.into] = touched.get(op.into, nobody) | folded
        else:
            touched |= dict.fromkeys(op.writes, everyone)
    return {chunk: np.broadcast_to(ranks, plan.n) for chunk, ranks in found.items() if ranks.any()}


@dataclass(frozen=True, eq=False)
class Visible:
    """Whether the blocks of operations have anything to compute on each rank."""

    classes: BlockClasses
    sees: np.ndarray
    """Whether anything is visible, by class of block: (classes,)."""

    @cached_property
    def differs(self) -> bool:
        """Whether any block has nothing to compute on any rank."""
        return not self.sees[self.classes.there].all()

    def of(
        self, index: int, op: Block, everyone: np.ndarray | np.bool_
    ) -> Iterator[tuple[Attend | AttendBackward, np.ndarray | np.bool_]]:
        """Each block of operation `index`, and which ranks have anything to compute of it: (n,), or `everyone`."""
        first = self.classes.first[index]
        for row, block in enumerate(op.blocks, first):
            yield block, self.sees[self.classes.of[row]] if self.differs else everyone


def _visible(plan: Plan, problem: Problem) -> Visible:
    return Visible(block_classes(plan, problem), np.asarray(problem.blocks.computes))


def _peers(n: int, way: int) -> Callable[[Pass], np.ndarray]:
    """The ranks that each of n sends to in a Pass (`way` 1) or receives from (-1). Passes have few shifts."""
    members = cache(lambda group, shift: group.member(np.arange(n), way * shift))
    return lambda op: members(op.group, op.shift)


def _of_operands(plan: Plan, visible: Visible) -> dict[int, np.ndarray]:
    """The ranks that want each received chunk of q, kv and the like, from the last operation back to the first."""
    peers, everyone, found = _peers(plan.n, 1), np.ones(plan.n, bool), dict[int, np.ndarray]()
    wanted: dict[Chunk, np.ndarray] = {}

    def want(chunk: Chunk, where: np.ndarray | np.bool_) -> None:
        wanted[chunk] = np.asarray(wanted.get(chunk, False) | where)

    for index, op in reversed([*plan]):
        if isinstance(op, Block):
            for block, sees in visible.of(index, op, everyone):
                want(block.q, sees)
                want(block.kv, sees)
        elif isinstance(op, Bundle):
            for part in op.parts:
                want(part, wanted.get(op.into, np.zeros(plan.n, bool)))
        elif isinstance(op, AllToAll | AllGather | GroupCast):  # what is there is sent
            want(op.reads[0], everyone)
        elif isinstance(op, Pass) and not op.tensor.is_partial:
            found[index] = wanted.pop(op.recv, np.zeros(plan.n, bool))
            want(op.send, found[index][peers(op)])
    return found


def _of_partials(plan: Plan, visible: Visible) -> dict[int, np.ndarray]:
    """The ranks that receive, and fold, a partial that something was folded into, in plan order."""
    peers, found = _peers(plan.n, -1), dict[int, np.ndarray]()
    none, everyone = np.zeros(plan.n, bool), np.ones(plan.n, bool)
    filled: dict[Chunk, np.ndarray] = {}
    for index, op in plan:
        if isinstance(op, Block):
            for block, sees in visible.of(index, op, everyone):
                for chunk in block.writes:
                    filled[chunk] = filled.get(chunk, none) | sees
        elif isinstance(op, Pass) and op.tensor.is_partial:
            filled[op.recv] = found[index] = filled.pop(op.send, none)[peers(op)]
        elif isinstance(op, ReduceScatter | GroupReduce):
            filled |= {op.own.arriving(): everyone}
        elif isinstance(op, Fold):
            found[index] = filled.pop(op.part, none)
            filled[op.into] = filled.get(op.into, none) | found[index]
    return found
