"""Prove a plan for all ranks at once, without running it.

The check executes the plan on facts instead of tensors. For each chunk on each rank it tracks whose tokens the chunk
holds and which of their rows, and for a partial, the set of blocks folded into it. It proves:

    each send meets its receive, of the same tensor           (with backward-only waits: no deadlock: plan.schedule)
    nothing is read before it has arrived
    a chunk is what the index map says it is                   (Mesh paper, table 1; see Chunk)
    each unmasked Q-KV block is computed exactly once
    a transfer leaves out no row that a block reads
    each partial is folded exactly once, and each output and gradient ends complete at its owner, for all its heads

Sets are exact, one bit per (rank, chunk) pair; n = 4096 takes seconds. A chunk by heads (q_h) has the owner's heads and
the tokens of all ranks that share the owner's layout chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np

from sp_bench.check import blocks, transfers
from sp_bench.check.facts import Facts, Where, check_place, first_rank
from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.demand import demand
from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.ops import Chunk, Op, Pass, Plan, PlanError, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, OUT, O, Q


def check_all(plans: Mapping[str, Plan], problem: Problem) -> None:
    """Prove the plan of a forward, or those of a forward and its backward. Raises PlanError at the first error."""
    for plan in plans.values():
        check(plan, problem)
    starts = {chunk.tensor for plan in plans.values() if plan.phase == "backward" for chunk in plan.inputs}
    ends = {chunk.tensor for plan in plans.values() if plan.phase == "forward" for chunk in plan.outputs}
    if len(plans) > 1 and ODOQ in starts and O not in ends:
        raise PlanError("the backward takes odoq, whose lse the forward doesn't leave: it ends with no o")
    if len({plan.kept for plan in plans.values()}) > 1:
        kept = " and ".join(f"{', '.join(map(str, plan.kept)) or 'nothing'} ({name})" for name, plan in plans.items())
        raise PlanError(f"what the forward keeps is not what the backward takes: {kept}")


def check(plan: Plan, problem: Problem) -> None:
    """Prove one plan for every rank. Raises PlanError at the first error; its message names the operation."""
    if plan.n != problem.n:
        raise PlanError(f"the plan is for {plan.n} ranks and the problem has {problem.n}")
    _interface(plan, problem)
    dataflow(plan)
    leaves_out = problem.blocks.skips_queries and any(isinstance(op, Pass) and op.against for op in plan.ops)
    facts = Facts(problem, np.arange(problem.n), kept=plan.kept, leaves_out=leaves_out)
    wanted = demand(plan, problem)
    for chunk in plan.starts_with:
        facts.content[chunk] = facts.owner(chunk) if chunk.index and problem.queries_everywhere else facts.ranks
        check_place(facts, chunk, "the plan's input")
    tiling = set[Group | Grid | Exchange]()
    for index, op in plan:
        where = Where(index, op)
        _tiles(problem.n, op, where, tiling)
        if isinstance(op, Pass):
            _RULES[Pass](facts, op, where, wanted.get(index))
        else:
            _RULES[type(op)](facts, op, where)
    _complete(facts, plan)


INTERFACES = {"forward": ((Q, KV), (O, OUT)), "backward": ((ODOQ, DO, Q, KV), (DQ, DKV))}
"""The inputs and outputs that each phase may have: a rank's own chunks, in all head slices."""


COMPLETE = {"forward": ((O,), (OUT,)), "backward": ((DQ, DKV),)}
"""The sets of outputs that each phase may end with."""


def _interface(plan: Plan, problem: Problem) -> None:
    inputs, outputs = INTERFACES[plan.phase]
    everywhere = problem.n if problem.queries_everywhere else 1
    for name, given, tensors in (("inputs", plan.inputs, inputs), ("outputs", plan.outputs, outputs)):
        copies = {t: everywhere if name == "inputs" and t is Q else 1 for t in tensors}
        wanted = {
            Chunk(t, u, Group(1, 1), heads=i)
            for t in tensors
            for u in range(copies[t])
            for i in range(problem.slices_of(t))
        }
        chunks = [chunk._replace(home=Group(1, 1)) for chunk in given]
        by_tensor = tuple(dict.fromkeys(chunk.tensor for chunk in given))
        count = sum(problem.slices_of(t) * copies.get(t, 1) for t in by_tensor)
        whole = len(chunks) == len(set(chunks)) == count and wanted.issuperset(chunks)
        if not whole or (name == "outputs" and by_tensor not in COMPLETE[plan.phase]):
            slices = f", each in {problem.head_slices} slices" if problem.head_slices > 1 else ""
            slices += f" ({problem.key_slices} of keys)" if problem.query_parts > 1 else ""
            raise PlanError(
                f"the plan's {name} are {', '.join(map(str, given))}: {plan.phase} has "
                f"{', '.join(f'{tensor}#0' for tensor in tensors)}{slices}"
            )
    for chunk in plan.kept:
        if chunk.index or chunk.arrival:
            raise PlanError(f"the plan keeps {chunk}: only a rank's own chunks are kept")
        if [*plan.inputs, *plan.outputs, *plan.kept].count(chunk) > 1:
            raise PlanError(f"the plan keeps {chunk} twice, or what is an input or output anyway")


def _tiles(n: int, op: Op, where: Where | str, known: set[Group | Grid | Exchange]) -> None:
    """The groups of an operation must tile the ranks, but for those that are `known` to, which it adds to."""
    named: list[Group | Grid | Exchange] = [op.group] if isinstance(op, Transfer) else []
    named += [chunk.home for chunk in (*op.reads, *op.writes)]
    groups: list[Group | Exchange] = []
    for home in named:
        if home not in known:
            known.add(home)
            groups += [home.inner, home.outer, *filter(None, [home.exchange])] if isinstance(home, Grid) else [home]
    for group in groups:
        if n % group.span:
            raise PlanError(f"{where}: {group} doesn't tile {n} ranks")
        if isinstance(group, Group) and gcd(group.way, group.size) != 1:
            raise PlanError(f"{where}: {group} doesn't go round all its ranks")
        if isinstance(group, Exchange) and (group.low.size != group.high.size or group.high.stride % group.low.span):
            raise PlanError(f"{where}: {group} doesn't exchange two digits of a rank")


_RULES = {**transfers.RULES, **blocks.RULES}


def _complete(facts: Facts, plan: Plan) -> None:
    """Every output must have all its blocks, and no partial may be left over."""
    degree = facts.problem.layout.head_parallel
    chunks = facts.problem.n // degree
    for chunk in plan.ends_with:
        if chunk.tensor not in (O, O.by_heads, OUT, DQ, DKV):
            continue
        blocks, parts = facts.blocks.pop(chunk), facts.parts(chunk)
        done = np.unpackbits(blocks.astype("<u8").view(np.uint8), axis=1, bitorder="little").astype(bool)
        for counterpart in range(chunks):
            mine, other = facts.ranks, np.full(facts.problem.n, counterpart * degree)
            needed = facts.sees(other, mine) if chunk.tensor == DKV else facts.sees(mine, other)
            done_all = done[:, counterpart * parts : (counterpart + 1) * parts].all(axis=1)
            if (rank := first_rank(needed & ~done_all)) is not None:
                raise PlanError(f"the end of the plan: {chunk} of rank {rank} lacks its block with chunk {counterpart}")
    for chunk, blocks in facts.blocks.items():
        if (rank := first_rank(blocks.any(axis=1))) is not None:
            raise PlanError(f"{facts.last[chunk]}: on rank {rank}, {chunk} is never sent on or folded after it")
