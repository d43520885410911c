"""Prove a plan, for all ranks at once, without running it.

The plan is executed on facts in place of tensors. For each chunk on each rank: which global chunk it is, and for a
partial, the set of blocks that have been folded into it. Proven are:

    each send meets its receive, of the same tensor           (with backward-only waits: no deadlock, see dataflow)
    nothing is read before it has arrived
    a chunk is what the index map says it is                   (Mesh paper, table 1)
    each unmasked Q-KV block is computed exactly once
    each partial is folded exactly once, and each output and gradient ends complete at its owner

Sets are exact, one bit for each (rank, chunk) pair; n = 4096 takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sp_bench.plan import (
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Grid,
    Group,
    Join,
    Op,
    Pass,
    Plan,
    PlanError,
    Problem,
    dataflow,
    is_partial,
)

Ranks = np.ndarray


@dataclass
class _Facts:
    """What every rank holds, as of the operation under way."""

    problem: Problem
    ranks: Ranks
    content: dict[Chunk, Ranks] = field(default_factory=dict)
    """The global chunk that a chunk is on each rank: (n,)."""
    last: dict[Chunk, str] = field(default_factory=dict)
    """The operation that was the last to add to a partial."""
    blocks: dict[Chunk, np.ndarray] = field(default_factory=dict)
    """The counterpart chunks folded into a partial on each rank: (n, n / 64), one bit each."""
    visible: np.ndarray = field(init=False)
    """Whether a block has anything to compute, for q chunk below, equal to, above kv chunk: (3,)."""

    def __post_init__(self) -> None:
        self.visible = np.array([bool(regions) for regions in self.problem.layout.cases(self.problem.causal)])

    def sees(self, q: Ranks, kv: Ranks) -> np.ndarray:
        return self.visible[np.sign(q - kv) + 1]

    def partial(self, chunk: Chunk) -> np.ndarray:
        """The blocks of a partial, which begins without any."""
        if chunk not in self.blocks:
            self.content[chunk] = chunk.owner(self.ranks)
            self.blocks[chunk] = np.zeros((self.problem.n, -(-self.problem.n // 64)), np.uint64)
        return self.blocks[chunk]

    def bit(self, counterpart: Ranks) -> tuple[Ranks, np.ndarray]:
        return counterpart // 64, np.uint64(1) << (counterpart % 64).astype(np.uint64)


def check(plan: Plan, problem: Problem) -> None:
    """Prove the plan for every rank. Raises PlanError, with the operation named, for the first thing wrong with it."""
    if plan.n != problem.n:
        raise PlanError(f"the plan is for {plan.n} ranks and the problem has {problem.n}")
    _interface(plan)
    dataflow(plan)
    facts = _Facts(problem, np.arange(problem.n))
    for chunk in plan.inputs:
        facts.content[chunk] = facts.ranks
        _placed(facts, chunk, "the plan's input")
    for index, op in plan:
        where = f"operation {index}, {op}"
        _tiles(problem.n, op, where)
        _RULES[type(op)](facts, op, where)
    _complete(facts, plan)


INTERFACES = {"forward": (("q", "kv"), ("o",)), "backward": (("odoq", "kv"), ("dq", "dkv"))}
"""What each phase starts from and ends with: a rank's own chunks."""


def _interface(plan: Plan) -> None:
    inputs, outputs = INTERFACES[plan.phase]
    for name, given, tensors in (("inputs", plan.inputs, inputs), ("outputs", plan.outputs, outputs)):
        if [(chunk.tensor, chunk.index, chunk.arrival) for chunk in given] != [(tensor, 0, 0) for tensor in tensors]:
            wanted = ", ".join(f"{tensor}#0" for tensor in tensors)
            raise PlanError(f"the plan's {name} are {', '.join(map(str, given))}: {plan.phase} has {wanted}")


def _tiles(n: int, op: Op, where: str) -> None:
    """The groups that an operation names must tile the ranks."""
    groups: list[Group] = [op.group] if isinstance(op, Pass) else []
    for chunk in (*op.reads, *op.writes):
        groups += [chunk.home.inner, chunk.home.outer] if isinstance(chunk.home, Grid) else [chunk.home]
    for group in groups:
        if n % group.span:
            raise PlanError(f"{where}: {group} doesn't tile {n} ranks")


def _tensors(where: str, chunks: Sequence[Chunk], wanted: Sequence[str]) -> None:
    for chunk, tensor in zip(chunks, wanted, strict=True):
        if chunk.tensor != tensor or chunk.is_arriving:
            raise PlanError(f"{where}: {chunk} stands where a held chunk of {tensor} should")


def _placed(facts: _Facts, chunk: Chunk, where: str) -> None:
    """A chunk must be what the index map says."""
    said, found = chunk.owner(facts.ranks), facts.content[chunk]
    if (rank := _first(said != found)) is not None:
        raise PlanError(f"{where}: on rank {rank}, {chunk} is global chunk {found[rank]} and should be {said[rank]}")


def _pass(facts: _Facts, op: Pass, where: str) -> None:
    if op.send is None or op.recv is None:
        what = f"send of {op.send} meets no receive" if op.send else f"receive of {op.recv} meets no send"
        raise PlanError(f"{where}: the {what}, on rank 0 and all others")
    if op.shift % op.group.size == 0:
        raise PlanError(f"{where}: a rank can't send to itself")
    if op.send.tensor != op.recv.tensor:
        raise PlanError(f"{where}: sends {op.send.tensor} where the peer receives {op.recv.tensor}")
    partial = is_partial(op.send.tensor)
    if partial != op.recv.is_arriving:
        raise PlanError(f"{where}: {op.recv} is {'not ' if partial else ''}a buffer for arriving partials")
    if op.recv in facts.blocks and facts.blocks[op.recv].any():
        raise PlanError(f"{where}: {op.recv} is received over one that was not folded yet")
    source = op.source(facts.ranks)
    facts.content[op.recv] = facts.content[op.send][source]
    _placed(facts, op.recv, where)
    if partial:
        facts.blocks[op.recv] = facts.blocks.pop(op.send)[source]
        facts.last[op.recv] = where


def _count_block(facts: _Facts, into: Chunk, counterpart: Ranks, visible: np.ndarray, where: str) -> None:
    """One block, (chunk `into`, `counterpart`), is folded into a partial."""
    blocks = facts.partial(into)
    word, bit = facts.bit(counterpart)
    old = blocks[facts.ranks, word]
    if (rank := _first(visible & ((old & bit) != 0))) is not None:
        raise PlanError(f"{where}: on rank {rank}, block ({into}, chunk {counterpart[rank]}) is computed twice")
    blocks[facts.ranks, word] = np.where(visible, old | bit, old)
    facts.last[into] = where


def _attend(facts: _Facts, op: Attend, where: str) -> None:
    _tensors(where, (op.q, op.kv, op.o), ("q", "kv", "o"))
    q, kv = facts.content[op.q], facts.content[op.kv]
    _serves(facts, op.o, q, where)
    _count_block(facts, op.o, kv, facts.sees(q, kv), where)


def _attend_backward(facts: _Facts, op: AttendBackward, where: str) -> None:
    _tensors(where, (op.odoq, op.kv, op.dq, op.dkv), ("odoq", "kv", "dq", "dkv"))
    q, kv = facts.content[op.odoq], facts.content[op.kv]
    visible = facts.sees(q, kv)
    _serves(facts, op.dq, q, where)
    _serves(facts, op.dkv, kv, where)
    _count_block(facts, op.dq, kv, visible, where)
    _count_block(facts, op.dkv, q, visible, where)


def _serves(facts: _Facts, partial: Chunk, chunk: Ranks, where: str) -> None:
    """The accumulator must belong to the chunk that the block is computed for."""
    said = partial.owner(facts.ranks)
    if (rank := _first(said != chunk)) is not None:
        raise PlanError(
            f"{where}: on rank {rank}, {partial} belongs to chunk {said[rank]}, the block to chunk {chunk[rank]}"
        )


def _fold(facts: _Facts, op: Fold, where: str) -> None:
    if not op.part.is_arriving or op.part.tensor != op.into.tensor or op.into.is_arriving:
        raise PlanError(f"{where}: folds {op.part} into {op.into}")
    _serves(facts, op.into, facts.content[op.part], where)
    part = facts.blocks.pop(op.part)
    into = facts.partial(op.into)
    if (rank := _first((into & part).any(axis=1))) is not None:
        raise PlanError(f"{where}: on rank {rank}, a block of {op.part} is in {op.into} already")
    into |= part
    facts.last[op.into] = where


def _join(facts: _Facts, op: Join, where: str) -> None:
    """Order only."""


_RULES: dict[type[Op], Callable] = {
    Pass: _pass,
    Attend: _attend,
    AttendBackward: _attend_backward,
    Fold: _fold,
    Join: _join,
}


def _complete(facts: _Facts, plan: Plan) -> None:
    """Every output has all its blocks, and no partial is left over."""
    n = facts.problem.n
    for chunk in plan.outputs:
        blocks = facts.blocks.pop(chunk)
        for counterpart in range(n):
            mine, other = (facts.ranks, np.full(n, counterpart))
            needed = facts.sees(other, mine) if chunk.tensor == "dkv" else facts.sees(mine, other)
            word, bit = facts.bit(other)
            if (rank := _first(needed & ((blocks[facts.ranks, word] & bit) == 0))) is not None:
                raise PlanError(f"the end of the plan: {chunk} of rank {rank} lacks its block with chunk {counterpart}")
    for chunk, blocks in facts.blocks.items():
        if (rank := _first(blocks.any(axis=1))) is not None:
            raise PlanError(f"{facts.last[chunk]}: on rank {rank}, {chunk} is never sent on or folded after it")


def _first(wrong: np.ndarray | np.bool) -> int | None:
    """The lowest rank for which something is wrong."""
    return int(wrong.argmax()) if wrong.any() else None
