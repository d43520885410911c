"""The keys that a query of a pack sees, by the definition. Imported inside ranks: no pytest, no hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sp_bench.plan.documents import Packed


def seen(mask: Packed) -> np.ndarray:
    """Whether each query sees each key: (seqlen, keys). Queries are the last tokens of each document."""
    return _seen(mask, mask.lengths)


def seen_of_all(mask: Packed) -> np.ndarray:
    """Whether each query sees each key of its document, those among them that the mask leaves out: (seqlen, keys)."""
    whole = [sum(cached) + new for cached, new in zip(mask.cached, mask.new, strict=True)] if mask.new else mask.lengths
    return _seen(mask, whole)


def seen_of_whole(mask: Packed) -> np.ndarray:
    """`seen` with columns of keys that the mask leaves out: (seqlen, queries and all of histories)."""
    found = np.zeros((mask.seqlen, mask.seqlen + mask.cached_tokens), bool)
    found[:, places_of_kept(mask)] = seen(mask)
    return found


def places_of_kept(mask: Packed) -> np.ndarray:
    """The places of a mask's keys among all of its documents': (keys,)."""
    if not mask.new:
        return np.arange(mask.seqlen)
    found, start = [np.zeros(0, int)], 0
    for cached, new, kept in zip(mask.cached, mask.new, mask.lengths, strict=True):
        start += sum(cached) + new
        found.append(np.arange(start - kept, start))
    return np.concatenate(found)


def _seen(mask: Packed, lengths: Sequence[int]) -> np.ndarray:
    document = np.repeat(np.arange(len(lengths)), lengths)
    behind = np.concatenate([np.arange(length)[::-1] for length in lengths])
    query, key = np.flatnonzero(behind < np.repeat(mask.queries, lengths))[:, None], np.arange(len(document))
    found = document[query] == document
    found &= (key <= query) | (not mask.causal)
    found &= (mask.left is None) | (key >= query - (mask.left or 0))
    return found & ((mask.causal or mask.right is None) | (key <= query + (mask.right or 0)))
