"""Heads of zeros, for a head-parallel degree that splits an attention's heads only with some more of them.

Users of DeepSpeed-Ulysses ask for it where heads are not a multiple of the GPUs (github vipshop/cache-dit issue 546,
github vllm-project/vllm-omni issue 5716). A rank puts its tokens' heads in their places among the padded ones before
the first transfer, and takes the true ones out of the results after the last. Between the two, padded heads are heads
like others: they are sent, computed and held, and counted, simulated and executed as such.

Zeros could stay at home, as the receiver knows where they are. But the library's all-to-all wants equal pieces, and a
piece with the true heads alone has another size for each pair of ranks, in other places of a key head's group. Padding
at the two ends is one copy each, needs no case in any reader of plans, and is what frameworks do that pad heads.

Query head h must see key head h // (heads / kv_heads) on its rank. So what is padded is the groups of query heads of
one key head, all alike, and the number of key heads; and several copies of a key head, one after another, may share its
queries, which makes groups smaller. A query head of zeros sees the keys of its group and adds nothing to their
gradients, as that of its own output is zero; so does a key head of zeros, whose query heads are zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class PaddedHeads(NamedTuple):
    """The heads that a method computes in place of `heads` query heads and `kv_heads` key heads."""

    kv_heads: int
    """All key heads: the true ones in their copies, then those of zeros."""
    group: int
    """Query heads of a key head."""
    copies: int = 1
    """How often each true key head is there; its query heads are those of all copies, the true ones first."""

    @property
    def heads(self) -> int:
        """All query heads."""
        return self.kv_heads * self.group


def splits(heads: int, kv_heads: int, degree: int) -> bool:
    """Whether so many ranks split the heads evenly: the key heads too, or they share each of them evenly."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


@lru_cache(maxsize=1024)
def padded_heads(heads: int, kv_heads: int, degree: int, rings: int = 1) -> PaddedHeads | None:
    """The padded heads that `degree` ranks split with the fewest bytes; None if they split the true heads evenly.

    Each rank has 1 / degree of the query heads and of the key heads, and at least one key head. Forward and backward
    together, all-to-alls send 4 (degree - 1) / degree of a chunk with such query heads, and as much of keys; and where
    keys then go round a ring of `rings` ranks with the same heads, these send 6 (rings - 1) of a chunk of keys more
    (methods/usp.py). Of equal ones it is the one with the fewest query heads, which are what is computed, and then with
    the fewest key heads.
    """
    if splits(heads, kv_heads, degree):
        return None
    group = heads // kv_heads

    def sent(padded: PaddedHeads) -> tuple[int, int, int]:
        of_keys = max(padded.kv_heads, degree)
        assigned = 4 * (degree - 1) * (padded.heads + of_keys)
        return assigned + 6 * degree * (rings - 1) * of_keys, padded.heads, padded.kv_heads

    return min(
        (_least(kv_heads * copies, -(-group // copies), degree, copies) for copies in range(1, group + 1)), key=sent
    )


def _least(kv_heads: int, group: int, degree: int, copies: int) -> PaddedHeads:
    """The fewest key heads and groups, at least these, that `degree` ranks split.

    Key heads are a multiple of the degree or a divisor of it, whose parts of a group are then equal. The smallest such
    number has the fewest query heads, too.
    """
    if kv_heads >= degree:
        return PaddedHeads(-(-kv_heads // degree) * degree, group, copies)
    shared = next(d for d in range(kv_heads, degree + 1) if degree % d == 0)
    ranks = degree // shared
    return PaddedHeads(shared, -(-group // ranks) * ranks, copies)
