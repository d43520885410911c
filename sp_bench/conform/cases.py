"""The cases of each check: (claims, sizes, long) -> cases on the numbers of ranks `sizes`. Imports no torch.

One case covers several kinds where no attention documents to refuse their pair, so that the short profile stays short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm

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


def grouped(n: int) -> dict[str, int]:
    """Two query heads for each key head, of which each rank could have one."""
    return {"heads": 2 * max(n, 2), "kv_heads": max(n, 2)}


def share(n: int, seqlen: int) -> int:
    """Tokens of a rank, even so that every layout cuts them into equal pieces, for about `seqlen` in all."""
    return 2 * round(seqlen / n / 2)


def sizes_and_masks(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """All numbers of ranks with all masks."""
    for n, mask in product(sizes, claims.masks):
        yield case_of(claims, n, mask=mask)
        if long:
            yield case_of(claims, n, mask=mask, tokens=32, batch=2, heads=2 * n, kv_heads=2 * n)


def lengths(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    pairs = [*LENGTHS.items(), *(LONGER.items() if long else ())]
    found = [(n, seqlen) for n, seqlen in pairs if n in sizes]
    for n, seqlen in found or [(n, max(LENGTHS.values())) for n in chosen(sizes)]:
        for mask in claims.masks:
            yield case_of(claims, n, mask=mask, tokens=share(n, seqlen))


def kv_heads(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Key heads that the ranks share, one for all, fewer than ranks, and numbers that neither divide the other."""
    for n, mask in product(chosen(sizes, *(SIZES[1:] if long else (2, 4))), claims.masks):
        yield case_of(claims, n, mask=mask, **grouped(n))
        yield case_of(claims, n, mask=mask, heads=2 * n, kv_heads=1)
        if n in (4, 6, 8):
            yield case_of(claims, n, mask=mask, heads=n, kv_heads=n // 2)
        if n in NEITHER:
            yield case_of(claims, n, mask=mask, heads=lcm(n, NEITHER[n]), kv_heads=NEITHER[n])


def uneven_heads(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    triples = [(2, 3, 3), (4, 6, 3), (3, 4, 4), (4, 6, 6)] + [
        (6, 8, 8),
        (8, 12, 12),
        (3, 2, 2),
        (8, 3, 3),
        (2, 1, 1),
    ] * long
    found = [each for each in triples if each[0] in sizes]
    for n, heads, keys in found or [(n, n + 1, n + 1) for n in chosen(sizes)]:
        yield case_of(claims, n, heads=heads, kv_heads=keys)


def head_dims(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    masks = claims.masks if long else claims.masks[:1]
    for n, dim, mask in product(chosen(sizes, *((2, 4, 8) if long else (2,))), (64, 80, 128, 192, 256), masks):
        yield case_of(claims, n, head_dim=dim, mask=mask)


def batches(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    for n, mask in product(chosen(sizes, *((2, 3, 4, 8) if long else (2, 3))), claims.masks):
        yield case_of(claims, n, batch=2, mask=mask)


def dtypes(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    masks = claims.masks if long else claims.masks[:1]
    for n, dtype, mask in product(chosen(sizes, *((2, 4, 8) if long else (2,))), claims.dtypes, masks):
        yield case_of(claims, n, dtype=dtype, mask=mask)


def uneven(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """A few tokens more than the ranks share evenly; also in a longer sequence, in a batch, with grouped queries."""
    for mask in claims.masks:
        for n, more in product(chosen(sizes, *((2, 3, 4, 8) if long else (3, 4))), (1, 2, 5) if long else (1,)):
            yield case_of(claims, n, more=more, mask=mask)
        for n in chosen(sizes, 3):
            yield case_of(claims, n, more=1, mask=mask, batch=2, tokens=share(n, PACKED_TOKENS), **grouped(n))


def documents(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Packs; also with grouped queries, in a batch, both, and of longer documents."""
    for mask in claims.masks:
        for n, count in product(chosen(sizes, *((2, 3, 4, 8) if long else (2, 4))), (1, 3, 5) if long else (3,)):
            yield case_of(claims, n, documents=count, mask=mask)
        for n in chosen(sizes, *((2, 3) if long else (2,))):
            yield case_of(claims, n, documents=3, mask=mask, **grouped(n))
            yield case_of(claims, n, documents=3, mask=mask, batch=2)
            yield case_of(claims, n, documents=5, mask=mask, tokens=share(n, PACKED_TOKENS))
        for n in chosen(sizes, *((4, 8) if long else (4,))):
            yield case_of(claims, n, documents=3, mask=mask, batch=2, **grouped(n))


def padded(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    for n, mask in product(chosen(sizes, *((2, 3, 4, 8) if long else (3,))), claims.masks):
        yield case_of(claims, n, documents=2, padded=True, mask=mask)
    for n, mask in product(chosen(sizes, 2), claims.masks):
        yield case_of(claims, n, documents=2, padded=True, mask=mask, batch=2, **grouped(n))


def windows(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Windows within a rank's tokens and beyond them, and in longer sequences; with documents where claimed."""
    for mask in claims.masks:
        for n, window in product(chosen(sizes, *((2, 3, 4, 8) if long else (2, 4))), (3, SHORT_TOKENS + 3)):
            yield case_of(claims, n, window=window, mask=mask)
        for n in chosen(sizes, 2):
            tokens = share(n, PACKED_TOKENS)
            yield case_of(claims, n, window=200, mask=mask, batch=2, tokens=tokens, **grouped(n))
            if claims.documents:
                yield case_of(claims, n, window=3, mask=mask, documents=3)


def scales(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Another scale; with the window or documents that are claimed too."""
    for n, mask in product(chosen(sizes, *((2, 3, 4, 8) if long else (2, 4))), claims.masks):
        yield case_of(claims, n, scale=0.4, mask=mask)
        if claims.window:
            yield case_of(claims, n, scale=0.4, mask=mask, window=3)
        if claims.documents:
            yield case_of(claims, n, scale=0.4, mask=mask, documents=3)


def one(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks; in the long profile others, and each mask."""
    wanted = (2, 3, 4) if long else (2,)
    return (case_of(claims, n, mask=mask) for n, mask in product(chosen(sizes, *wanted), claims.masks[: 1 + long]))


def plain(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks in both profiles."""
    return one(claims, sizes, False)


def three(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Three ranks, where each has two others."""
    wanted = (3, 4, 8) if long else (3,)
    return (case_of(claims, n, mask=mask) for n, mask in product(chosen(sizes, *wanted), claims.masks[: 1 + long]))


def several(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """Two ranks, with each mask; nothing on one rank, which has no other."""
    for n, mask in product(chosen(sizes, *((2, 3, 4) if long else (2,))), claims.masks):
        if n > 1:
            yield case_of(claims, n, mask=mask)


def groups(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    wanted = (2, 3, 4) if long else (2, 3)
    return (case_of(claims, n, mask=mask) for n, mask in product(chosen(sizes, *wanted), claims.masks[: 1 + long]))


def volumes(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    for n, mask in product(chosen(sizes, *((2, 3, 4, 6, 8) if long else (2, 4))), claims.masks):
        yield case_of(claims, n, mask=mask)
        yield case_of(claims, n, mask=mask, **grouped(n))


def large(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    for n in chosen(sizes, *((2, 4) if long else (2,))):
        yield case_of(claims, n, tokens=LEAK_TOKENS, heads=8 * n, kv_heads=8 * n, head_dim=LEAK_HEAD_DIM)


def large_packed(claims: Claims, sizes: Sequence[int], long: bool) -> Iterator[Case]:
    """The same; also packed, where documents are claimed. In 16 bits torch's own kernels keep code for each shape."""
    wide = next((dtype for dtype in claims.dtypes if dtype in ("float32", "float64")), "float32")
    for case in (each.simpler(dtype=wide) for each in large(claims, sizes, long)):
        yield case
        if claims.documents:
            yield case.simpler(documents=3)
