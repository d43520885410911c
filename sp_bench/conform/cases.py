"""The cases of each check: (claims, sizes, long) -> cases on the numbers of ranks `sizes`. Imports no torch.

One case covers several kinds where no attention documents to refuse their pair, so that the short profile stays short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import lcm
from typing import Any

from sp_bench.conform.case import Case
from sp_bench.conform.claims import Claims

SIZES = (1, 2, 3, 4, 6, 8)
"""The numbers of ranks that are run."""
SHORT_TOKENS = 8
"""Tokens of each rank in most cases."""
LENGTHS = {1: 2100, 2: 2100, 4: 600}
"""Whole lengths in tokens by the number of ranks, beyond 2,048 and beyond 256. No power of two from 32 on divides them
or a rank's part."""
LONGER = {2: 4200, 3: 1500, 6: 1500, 8: 2100}
"""Those that the long profile adds; on two ranks each has more than 2,048."""
PACKED_TOKENS = 600
"""Whole length of the longer packs, windows and uneven sequences."""
NEITHER = {2: 3, 3: 2, 4: 7, 6: 4, 8: 3}
"""By the number of ranks, how many key heads neither divide it nor are divided by it."""
LEAK_TOKENS, LEAK_HEAD_DIM = 32, 128
"""Tokens of a rank and head_dim of the cases for memory: many bytes that take little work."""


def chosen(sizes: Sequence[int], *wanted: int) -> list[int]:
    """Those of the wanted numbers of ranks that are in `sizes`; if none is, the smallest of several, or one."""
    several = [n for n in sizes if n > 1] or [*sizes]
    return [n for n in wanted if n in sizes] or [min(several)]


def case_of(claims: Claims, n: int, **changes: object) -> Case:
    """A case with as many heads as ranks, in the first claimed dtype and mask."""
    base = Case(
        n=n,
        heads=n if n > 1 else 2,
        kv_heads=n if n > 1 else 2,
        tokens=SHORT_TOKENS,
        head_dim=16,
        dtype=claims.dtypes[0],
        mask=claims.masks[0],
    )
    return base.simpler(**changes)


def share(n: int, seqlen: int) -> int:
    """Tokens of a rank, even so that every layout cuts them into equal pieces, for about `seqlen` in all."""
    return 2 * round(seqlen / n / 2)


def every(
    claims: Claims, sizes: Sequence[int], wanted: Sequence[int], *kinds: Mapping[str, Any], masks: Sequence[str] = ()
) -> Iterator[Case]:
    """Each kind of case with each claimed mask, or these, on those of the wanted numbers of ranks that are run."""
    for n, mask, kind in product(chosen(sizes, *wanted), masks or claims.masks, kinds or ({},)):
        yield case_of(claims, n, mask=mask, **{key: x(n) if callable(x) else x for key, x in kind.items()})


GROUPED = {"heads": lambda n: 2 * max(n, 2), "kv_heads": lambda n: max(n, 2)}
"""Two query heads for each key head, of which each rank could have one."""
PACKED = {"tokens": lambda n: share(n, PACKED_TOKENS)}


def sizes_and_masks(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """All numbers of ranks with all masks."""
    larger = {"tokens": 32, "batch": 2, "heads": lambda n: 2 * n, "kv_heads": lambda n: 2 * n}
    return every(claims, sizes, sizes, {}, *[larger] * long)


def lengths(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Whole lengths beyond those at which kernels change tiles; the longest, where none is of these ranks."""
    pairs = [*LENGTHS.items(), *(LONGER.items() if long else ())]
    pairs_of_sizes = [(n, seqlen) for n, seqlen in pairs if n in sizes]
    for n, seqlen in pairs_of_sizes or [(n, max(LENGTHS.values())) for n in chosen(sizes)]:
        yield from every(claims, sizes, [n], {"tokens": share(n, seqlen)})


def kv_heads(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Key heads that the ranks share, one for all, fewer than ranks, and numbers that neither divide the other."""
    for n in chosen(sizes, *(SIZES[1:] if long else (2, 4))):
        kinds = [GROUPED, {"heads": 2 * n, "kv_heads": 1}]
        kinds += [{"heads": n, "kv_heads": n // 2}] if n in (4, 6, 8) else []
        kinds += [{"heads": lcm(n, NEITHER[n]), "kv_heads": NEITHER[n]}] if n in NEITHER else []
        yield from every(claims, sizes, [n], *kinds)


def uneven_heads(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Numbers of heads that the ranks don't divide, with a key head each."""
    triples = [(2, 3, 3), (4, 6, 3), (3, 4, 4), (4, 6, 6)]
    triples += [(6, 8, 8), (8, 12, 12), (3, 2, 2), (8, 3, 3), (2, 1, 1)] * long
    of_sizes = [each for each in triples if each[0] in sizes]
    for n, heads, keys in of_sizes or [(n, n + 1, n + 1) for n in chosen(sizes)]:
        yield case_of(claims, n, heads=heads, kv_heads=keys)


def head_dims(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """The head dims that models have, from 64 to 256."""
    kinds = [{"head_dim": dim} for dim in (64, 80, 128, 192, 256)]
    return every(claims, sizes, (2, 4, 8) if long else (2,), *kinds, masks=_first(claims, long))


def batches(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two sequences in a batch."""
    return every(claims, sizes, (2, 3, 4, 8) if long else (2, 3), {"batch": 2})


def dtypes(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Each claimed dtype."""
    kinds = [{"dtype": dtype} for dtype in claims.dtypes]
    return every(claims, sizes, (2, 4, 8) if long else (2,), *kinds, masks=_first(claims, long))


def uneven(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """A few tokens more than the ranks share evenly; also in a longer sequence, in a batch, with grouped queries."""
    kinds = [{"more": more} for more in ((1, 2, 5) if long else (1,))]
    yield from every(claims, sizes, (2, 3, 4, 8) if long else (3, 4), *kinds)
    yield from every(claims, sizes, (3,), {"more": 1, "batch": 2, **PACKED, **GROUPED})


def documents(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Packs; also with grouped queries, in a batch, both, and of longer documents."""
    kinds = [{"documents": count} for count in ((1, 3, 5) if long else (3,))]
    yield from every(claims, sizes, (2, 3, 4, 8) if long else (2, 4), *kinds)
    more = ({"documents": 3, **GROUPED}, {"documents": 3, "batch": 2}, {"documents": 5, **PACKED})
    yield from every(claims, sizes, (2, 3) if long else (2,), *more)
    yield from every(claims, sizes, (4, 8) if long else (4,), {"documents": 3, "batch": 2, **GROUPED})


def padded(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """A pack whose last tokens are padding; also in a batch, with grouped queries."""
    pack = {"documents": 2, "padded": True}
    yield from every(claims, sizes, (2, 3, 4, 8) if long else (3,), pack)
    yield from every(claims, sizes, (2,), {**pack, "batch": 2, **GROUPED})


def windows(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Windows within a rank's tokens and beyond them, and in longer sequences; with documents where claimed."""
    yield from every(claims, sizes, (2, 3, 4, 8) if long else (2, 4), {"window": 3}, {"window": SHORT_TOKENS + 3})
    packs = [{"window": 3, "documents": 3}] * claims.documents
    yield from every(claims, sizes, (2,), {"window": 200, "batch": 2, **PACKED, **GROUPED}, *packs)


def scales(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Another scale; with the window or documents that are claimed too."""
    kinds = [{}, *[{"window": 3}] * claims.window, *[{"documents": 3}] * claims.documents]
    return every(claims, sizes, (2, 3, 4, 8) if long else (2, 4), *({"scale": 0.4, **kind} for kind in kinds))


def one(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks; in the long profile others, and each mask."""
    return every(claims, sizes, (2, 3, 4) if long else (2,), masks=_first(claims, long))


def plain(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks in both profiles."""
    return one(claims, sizes, False)


def three(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Three ranks, where each has two others."""
    return every(claims, sizes, (3, 4, 8) if long else (3,), masks=_first(claims, long))


def several(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks, with each mask; nothing on one rank, which has no other."""
    return (case for case in every(claims, sizes, (2, 3, 4) if long else (2,)) if case.n > 1)


def groups(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Groups of two and three ranks, in the long profile of four too."""
    return every(claims, sizes, (2, 3, 4) if long else (2, 3), masks=_first(claims, long))


def volumes(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Numbers of ranks of which bytes are counted, with key heads for all queries and with grouped ones."""
    return every(claims, sizes, (2, 3, 4, 6, 8) if long else (2, 4), {}, GROUPED)


def large(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Sequences long enough for a leak of memory to show."""
    many = {"tokens": LEAK_TOKENS, "head_dim": LEAK_HEAD_DIM, "heads": lambda n: 8 * n, "kv_heads": lambda n: 8 * n}
    return every(claims, sizes, (2, 4) if long else (2,), many, masks=claims.masks[:1])


def large_packed(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """The same; also packed, where documents are claimed. In 16 bits torch's own kernels keep code for each shape."""
    wide = next((dtype for dtype in claims.dtypes if dtype in ("float32", "float64")), "float32")
    for case in (each.simpler(dtype=wide) for each in large(claims, sizes, long)):
        yield case
        if claims.documents:
            yield case.simpler(documents=3)


def _first(claims: Claims, long: bool) -> tuple[str, ...]:
    """The first claimed mask; two in the long profile."""
    return claims.masks[: 1 + long]
