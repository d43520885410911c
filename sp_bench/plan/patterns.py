"""The loops that methods share, as small groups of operations.

Chunk indices are local (Chunk): index u belongs to the rank u ahead, so everything moves one position back.
"""

from __future__ import annotations

from sp_bench.plan.ops import Chunk, Fold, Pass

BACK = -1


def receive_next(chunk: Chunk, have: int, lane: str) -> Pass:
    """One hop of a ring all-gather: send chunk #have on, receive #(have + 1).

    This is Recv Q / Recv KV of the Mesh paper, section 3.4, and the step of Ring Attention.
    """
    return Pass(lane, send=chunk.at(have), recv=chunk.at(have + 1), group=chunk.home, shift=BACK)


def reduce_next(partial: Chunk, sent: int, lane: str) -> tuple[Pass, Fold]:
    """One hop of a ring reduce-scatter after `sent` others: send partial #(sent + 1), fold what arrives into the next.

    The last of the `size - 1` hops brings what all others have for this rank's own chunk #0. This is Send O,
    Send dQ and Send dKV of the Mesh paper, sections 3.4 and 3.6.
    """
    into = partial.at(sent + 2)
    hop = Pass(lane, send=partial.at(sent + 1), recv=into.arriving(), group=partial.home, shift=BACK)
    return hop, Fold(into.arriving(), into)
