"""The loops that methods share, as small groups of operations.

Chunk indices are local (Chunk): index u belongs to the rank u ahead in its group, so everything moves one position back
there; in a group that counts DOWN, to the next rank.
"""

from __future__ import annotations

from sp_bench.plan.groups import Group
from sp_bench.plan.ops import Chunk, Fold, Line, Op, Pass

BACK = -1


def divisors(n: int) -> list[int]:
    """Every size that rings of equal size can have on n ranks."""
    return [d for d in range(1, n + 1) if n % d == 0]


def receive_next(chunks: Chunk | Line, have: int, lane: str) -> Pass:
    """One hop of a ring all-gather: send chunk #have on, receive #(have + 1). A Chunk stands for its home's ring.

    This is Recv Q / Recv KV of the Mesh paper, section 3.4, and the step of Ring Attention.
    """
    line = line_of(chunks)
    return Pass(lane, send=line.at(have), recv=line.at(have + 1), group=line.group, shift=BACK)


def reduce_next(partials: Chunk | Line, sent: int, lane: str, arrival: int = 1) -> tuple[Pass, Fold]:
    """One hop of a ring reduce-scatter after `sent` others: send partial #(sent + 1), fold what arrives into the next.

    The last of the `size - 1` hops brings what all others have for this rank's own chunk #0. This is Send O,
    Send dQ and Send dKV of the Mesh paper, sections 3.4 and 3.6. `arrival` tells apart what arrives at one time.
    """
    line = line_of(partials)
    into = line.at(sent + 2)
    arriving = into.arriving(arrival)
    hop = Pass(lane, send=line.at(sent + 1), recv=arriving, group=line.group, shift=BACK)
    return hop, Fold(arriving, into)


def all_gather(chunks: Chunk | Line, lane: str) -> list[Pass]:
    """A ring all-gather: all chunks of the ring, one hop after the other."""
    return [receive_next(chunks, have, lane) for have in range(line_of(chunks).group.size - 1)]


def reduce_scatter(partials: Chunk | Line, lane: str) -> list[Op]:
    """A ring reduce-scatter: what all others have for this rank's own chunk is added up along the way."""
    hops = (reduce_next(partials, sent, lane) for sent in range(line_of(partials).group.size - 1))
    return [op for hop in hops for op in hop]


def return_home(partial: Chunk, lane: str, against: Chunk | None = None) -> tuple[Pass, Fold]:
    """Send partial #u straight to its owner, while the partial of this rank's own chunk comes from the other side.

    `against` is the KV chunk that it was computed with, where only rows that see it are to travel.
    """
    assert isinstance(partial.home, Group)
    own = partial.at(0)
    arriving = own.arriving(partial.index)
    hop = Pass(lane, send=partial, recv=arriving, group=partial.home, shift=partial.index, against=against)
    return hop, Fold(arriving, own)


def line_of(chunks: Chunk | Line) -> Line:
    """The ring of chunks that are at home in one group."""
    if isinstance(chunks, Line):
        return chunks
    assert isinstance(chunks.home, Group)
    return Line(chunks.at(0), chunks.home)
