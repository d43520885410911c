"""The loops that methods share, as small groups of operations.

Chunk indices are local: chunk #u belongs to the rank u ahead in its group. A hop therefore goes one position back in
the group; in a group that counts DOWN, that is the next higher rank.
"""

from __future__ import annotations

from sp_bench.plan.groups import Group
from sp_bench.plan.ops import AllGather, Chunk, Fold, Line, Op, Pass, ReduceScatter, TreeReduce

BACK = -1


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending: the sizes that equal rings on n ranks can have."""
    return [d for d in range(1, n + 1) if n % d == 0]


def receive_next(chunks: Chunk | Line, have: int, lane: str) -> Pass:
    """One hop of a ring all-gather: send chunk #have, receive #(have + 1). A Chunk stands for its home's ring.

    This is Recv Q / Recv KV of the Mesh paper, section 3.4, and the step of Ring Attention.
    """
    line = line_of(chunks)
    return Pass(lane, send=line.at(have), recv=line.at(have + 1), group=line.group, shift=BACK)


def reduce_next(partials: Chunk | Line, sent: int, lane: str, arrival: int = 1) -> tuple[Pass, Fold]:
    """Hop number `sent` of a ring reduce-scatter: send partial #(sent + 1), fold the arrival into #(sent + 2).

    The last of the `size - 1` hops brings the sum of all other ranks for this rank's own chunk #0. This is Send O,
    Send dQ and Send dKV of the Mesh paper, sections 3.4 and 3.6. Partials that arrive at the same time need different
    numbers `arrival`.
    """
    line = line_of(partials)
    into = line.at(sent + 2)
    arriving = into.arriving(arrival)
    hop = Pass(lane, send=line.at(sent + 1), recv=arriving, group=line.group, shift=BACK)
    return hop, Fold(arriving, into)


def all_gather(chunk: Chunk, lane: str, *, library: bool) -> list[AllGather] | list[Pass]:
    """Gather chunk #0 of all ranks of its home: the library's all-gather, or the hops of a ring."""
    size = chunk.home.size
    if library and size > 1:
        return [AllGather(lane, chunk.at(0))]
    return [receive_next(chunk, have, lane) for have in range(size - 1)]


def reduce_scatter(partial: Chunk, lane: str, *, library: bool) -> list[Op]:
    """At the end every rank has the sum of its own chunk #0: the library's reduce-scatter, or hops and folds."""
    size = partial.home.size
    if library and size > 1:
        own = partial.at(0)
        return [ReduceScatter(lane, own), Fold(own.arriving(), own)]
    return [op for sent in range(size - 1) for op in reduce_next(partial, sent, lane)]


def tree_reduce(partial: Chunk, lane: str, inner: int = 1) -> list[Op]:
    """`reduce_scatter` in rounds that merge on the way, among `inner` neighbours first (TreeReduce)."""
    if partial.home.size == 1:
        return []
    own = partial.at(0)
    return [TreeReduce(lane, own, inner), Fold(own.arriving(), own)]


def return_home(partial: Chunk, lane: str, against: Chunk | None = None) -> tuple[Pass, Fold]:
    """Send partial #u straight to its owner, and fold the partial that arrives for this rank's own chunk.

    With `against`, the KV chunk that the partial was computed with, only rows that see it travel.
    """
    assert isinstance(partial.home, Group)
    own = partial.at(0)
    arriving = own.arriving(partial.index)
    hop = Pass(lane, send=partial, recv=arriving, group=partial.home, shift=partial.index, against=against)
    return hop, Fold(arriving, own)


def line_of(chunks: Chunk | Line) -> Line:
    """The ring of a chunk whose home is a Group; a Line is returned as it is."""
    if isinstance(chunks, Line):
        return chunks
    assert isinstance(chunks.home, Group)
    return Line(chunks.at(0), chunks.home)
