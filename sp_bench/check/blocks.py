"""The rules of blocks, folds and what is made of chunks: each block once, on the right chunks and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from sp_bench.check.facts import (
    NOTHING,
    Cast,
    Facts,
    Ranks,
    Where,
    check_all_rows,
    check_place,
    check_slice,
    check_whole,
    first_rank,
)
from sp_bench.plan.ops import (
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Fold,
    Fused,
    Gathered,
    Join,
    Op,
    Pairs,
    PlanError,
    RowSums,
)
from sp_bench.plan.tensors import DKV, DO, DOQ, DQ, KV, ODOQ, O, Q, Tensor


def _tensors(facts: Facts, where: Where | str, chunks: Sequence[Chunk], wanted: Sequence[Tensor]) -> None:
    """A block's operands must be held chunks of the wanted tensors (by heads where split), of one head slice."""
    split = facts.problem.layout.head_parallel > 1
    for chunk, tensor in zip(chunks, wanted, strict=True):
        given = tensor.by_heads if split else tensor
        if chunk.tensor not in (given, tensor.by_heads) or chunk.is_arriving:
            raise PlanError(f"{where}: {chunk} stands where a held chunk of {given} should")
    check_slice(facts, where, chunks)


def _bundle(facts: Facts, op: Bundle, where: Where | str) -> None:
    parts = Counter(part.tensor for part in op.parts)
    if op.into.tensor is not ODOQ.by_heads or parts != Counter(t.by_heads for t in (Q, O, DO)):
        raise PlanError(f"{where}: only q_h, o_h and do_h make an odoq_h")
    check_slice(facts, where, (*op.parts, op.into))
    for part in op.parts:
        check_place(facts, part, where)
        check_all_rows(facts, part, where)
        if part in facts.blocks:
            raise PlanError(f"{where}: {part} is not known to be complete")
    facts.content[op.into] = facts.owner(op.into)
    if (rank := first_rank(np.any([facts.content[p] != facts.content[op.into] for p in op.parts], axis=0))) is not None:
        raise PlanError(f"{where}: on rank {rank}, the parts are of different chunks")


def _row_sums(facts: Facts, op: RowSums, where: Where | str) -> None:
    tensors = [chunk.tensor for chunk in (*op.parts, op.into)]
    alike = len({tensor.is_by_heads for tensor in tensors}) == 1
    if Counter(tensor.by_tokens for tensor in tensors) != Counter((ODOQ, DOQ)) or not alike:
        raise PlanError(f"{where}: only odoq makes a doq, and only doq an odoq")
    check_slice(facts, where, (*op.parts, op.into))
    source = facts.content[op.parts[0]]
    made = source != NOTHING
    if (rank := first_rank(made & (facts.owner(op.into) != source))) is not None:
        raise PlanError(f"{where}: on rank {rank}, the parts are of different chunks")
    facts.content[op.into] = source
    facts.rows[op.into] = facts.rows_of(op.parts[0])
    if op.parts[0] in facts.runs:
        facts.runs[op.into] = facts.runs[op.parts[0]]
    else:
        facts.runs.pop(op.into, None)


def _count_block(
    facts: Facts, into: Chunk, counterpart: Ranks, part: int, visible: np.ndarray, where: Where | str
) -> None:
    """Record that the block of each rank with chunk `counterpart`, or a part of it, is folded into `into`."""
    blocks = facts.partial(into)
    word, bit = facts.bit(counterpart, facts.parts(into), part)
    all_visible = visible is facts.everyone
    cells, bit = facts.ranks * blocks.shape[1] + word, bit if all_visible else np.where(visible, bit, np.uint64(0))
    old = blocks.reshape(-1)[cells]
    if (rank := first_rank((old & bit) != 0)) is not None:
        raise PlanError(f"{where}: on rank {rank}, block ({into}, chunk {counterpart[rank]}) is computed twice")
    blocks.reshape(-1)[cells] = old | bit
    facts.last[into] = where


def _attend(facts: Facts, op: Attend, where: Where | str) -> None:
    check_whole(facts, op.reads, where)
    _folded(facts, op, where)


def _folded(facts: Facts, op: Attend, where: Where | str, pairs: Pairs = "all") -> None:
    _tensors(facts, where, (op.q, op.kv, op.o), (Q, KV, O))
    q, kv, visible = _operands(facts, op, where, pairs)
    _serves(facts, op.o, q, where)
    _rows_read(facts, op.q, op.kv, op.o, visible, where)
    _count_block(facts, op.o, kv, 0, visible, where)
    if facts.cuts_rows:
        facts.add_run(op.o, facts.run_read(q, kv, of_keys=False).where(visible))


def _attend_backward(facts: Facts, op: AttendBackward, where: Where | str) -> None:
    check_whole(facts, op.reads, where)
    _folded_backward(facts, op, where)


def _folded_backward(facts: Facts, op: AttendBackward, where: Where | str, pairs: Pairs = "all") -> None:
    of_queries = DOQ if pairs == "queries" else ODOQ
    _tensors(facts, where, (op.odoq, op.kv, op.dq, op.dkv), (of_queries, KV, DQ, DKV))
    q, kv, visible = _operands(facts, op, where, pairs)
    _serves(facts, op.dq, q, where)
    _serves(facts, op.dkv, kv, where)
    _rows_read(facts, op.odoq, op.kv, op.dq, visible, where)
    _count_block(facts, op.dq, kv, 0, visible, where)
    _count_block(facts, op.dkv, q, op.odoq.heads % facts.problem.query_parts, visible, where)
    if facts.cuts_rows:
        for partial in op.writes:
            facts.add_run(partial, facts.run_read(q, kv, of_keys=partial.tensor.of_keys).where(visible))


def _fused(facts: Facts, op: Fused, where: Where | str) -> None:
    """Its blocks must be of one kind, and each of its query chunks must have one with each of its key chunks."""
    pairs = [(block.q, block.kv) for block in op.blocks]
    if len({type(block) for block in op.blocks}) > 1 or Counter(pairs) != Counter(product(op.queries, op.keys)):
        raise PlanError(f"{where}: is not a block of each of its query chunks with each of its key chunks")
    if len({chunk.heads for chunk in op.queries}) > 1 or len({chunk.heads for chunk in op.keys}) > 1:
        raise PlanError(f"{where}: mixes slices of heads")
    for block in op.blocks:
        RULES[type(block)](facts, block, where)


def _gathered(facts: Facts, op: Gathered, where: Where | str) -> None:
    """Its keys must be the rank's own, or rows that all its queries are asked for; or its queries must be rows that see
    the rank's own keys.
    """
    by_queries = op.pairs == "queries"
    whole, parts = (op.keys, op.queries) if by_queries else (op.queries, op.keys)
    pairs = [(block.q, block.kv) for block in op.blocks]
    mixed = len({chunk.place for chunk in whole}) > 1 or len({chunk.heads for chunk in parts}) > 1
    if mixed or (by_queries and len(whole) > 1) or Counter(pairs) != Counter(product(op.queries, op.keys)):
        raise PlanError(f"{where}: is not a block of one chunk with each of those of which there are rows")
    if by_queries and op.rank_own.index:
        raise PlanError(f"{where}: {op.rank_own} is not the rank's own")
    for block in op.blocks:
        brought, own = (block.q, block.kv) if by_queries else (block.kv, block.q)
        partial = block.writes[0] if by_queries else None if isinstance(block, Attend) else block.dkv
        if brought.index or by_queries:
            rows = facts.of_rows.get(brought)
            if rows is None or not rows.agrees(own, op.pairs):
                raise PlanError(f"{where}: the rows of {brought} were not cast that {own} has to do with")
            if partial is not None:
                facts.of_rows[partial] = Cast(own, op.pairs)
        if isinstance(block, Attend):
            _folded(facts, block, where, op.pairs)
        else:
            _folded_backward(facts, block, where, op.pairs)


def _operands(
    facts: Facts, op: Attend | AttendBackward, where: Where | str, pairs: Pairs
) -> tuple[Ranks, Ranks, np.ndarray]:
    """The content of a block's chunks, and where it has anything to compute: there both must have been sent."""
    q, kv = op.q, op.kv
    owners, keys = facts.owner(q), facts.owner(kv)
    visible = facts.computes(owners, keys, pairs, forward=isinstance(op, Attend))
    check_place(facts, q, where, visible)
    check_place(facts, kv, where, visible)
    return owners, keys, visible


def _rows_read(facts: Facts, q: Chunk, kv: Chunk, partial: Chunk, visible: np.ndarray, where: Where | str) -> None:
    """Both chunks of a block must hold the same heads, and the query chunk every row that the block reads."""
    degree, owners, keys = facts.problem.layout.head_parallel, facts.owner(q), facts.owner(kv)
    if degree > 1 and (rank := first_rank(owners % degree != keys % degree)) is not None:
        raise PlanError(f"{where}: on rank {rank}, {q} and {kv} have different heads")
    for chunk, words in ((kv, f"{q} sees"), (q, f"see {kv}")):
        if chunk in facts.runs:
            needed = facts.run_read(owners, keys, of_keys=chunk is kv).where(visible)
            if (rank := first_rank(~needed.within(facts.runs[chunk]))) is not None:
                raise PlanError(f"{where}: on rank {rank}, {chunk} lacks rows that {words}")
    if not facts.leaves_out:
        return
    needed = facts.rows_seen(owners, keys).where(visible)
    if (rank := first_rank(~needed.within(facts.rows_of(q)))) is not None:
        raise PlanError(f"{where}: on rank {rank}, {q} lacks rows that see {kv}")
    facts.rows[partial] = needed.around(facts.rows_of(partial)) if partial in facts.blocks else needed


def _serves(facts: Facts, partial: Chunk, chunk: Ranks, where: Where | str) -> None:
    """The accumulator's owner must be the chunk that the block is computed for."""
    said = facts.owner(partial)
    if said is not chunk and (rank := first_rank(said != chunk)) is not None:
        raise PlanError(
            f"{where}: on rank {rank}, {partial} belongs to chunk {said[rank]}, the block to chunk {chunk[rank]}"
        )


def _fold(facts: Facts, op: Fold, where: Where | str) -> None:
    if op.part not in facts.of_rows or op.into not in facts.of_rows:  # rows are added to the same rows
        check_whole(facts, (op.part, op.into), where)
    facts.of_rows.pop(op.part, None)
    if not op.part.is_arriving or op.part.tensor != op.into.tensor or op.into.is_arriving:
        raise PlanError(f"{where}: folds {op.part} into {op.into}")
    _serves(facts, op.into, facts.content[op.part], where)
    check_slice(facts, where, (op.part, op.into))
    part = facts.blocks.pop(op.part)
    if facts.cuts_rows:
        facts.add_run(op.into, facts.take_run(op.part))
    if op.part in facts.rows or op.into in facts.rows:  # otherwise both have all of them
        rows = facts.rows_of(op.part)
        facts.rows[op.into] = rows.around(facts.rows_of(op.into)) if op.into in facts.blocks else rows
    into = facts.partial(op.into)
    if (both := into & part).any():
        rank = first_rank(both.any(axis=1))
        raise PlanError(f"{where}: on rank {rank}, a block of {op.part} is in {op.into} already")
    into |= part
    facts.last[op.into] = where


def _join(facts: Facts, op: Join, where: Where | str) -> None:
    """A Join only orders operations; nothing to check."""


RULES: dict[type[Op], Callable] = {
    Attend: _attend,
    AttendBackward: _attend_backward,
    Fused: _fused,
    Gathered: _gathered,
    Fold: _fold,
    Bundle: _bundle,
    RowSums: _row_sums,
    Join: _join,
}
"""The rule of each operation that isn't a transfer."""
