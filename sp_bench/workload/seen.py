"""The keys that the queries at given positions see, as spans of positions: for the exact results of single rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.plan.documents import OfLengths, Packed
from sp_bench.plan.mask import Mask
from sp_bench.plan.regions import RegionKind


class Seen:
    """The keys that each query of a sequence sees, under a mask."""

    def __init__(self, mask: Mask, seqlen: int, kv_seqlen: int) -> None:
        """Holds the first key, and the key behind the last, of each span of each query."""
        queries = torch.arange(seqlen)
        self._spans: list[tuple[Tensor, Tensor]] = []
        if isinstance(mask, OfLengths):
            first, stop = mask.sees(mask.query_positions if isinstance(mask, Packed) else queries.numpy())
            self._spans = [(torch.from_numpy(first), torch.from_numpy(stop))]
            return
        history = mask.history(seqlen, kv_seqlen)
        for kind, q, kv in mask.regions((range(history, history + seqlen),), (range(kv_seqlen),)):
            first, stop = torch.zeros(seqlen, dtype=torch.int64), torch.zeros(seqlen, dtype=torch.int64)
            rows, place = slice(q.start, q.stop), kv.start + torch.arange(len(q))
            last = {RegionKind.CAUSAL: place + 1, RegionKind.STRICT: place}.get(kind, torch.full_like(place, kv.stop))
            first[rows] = place if kind is RegionKind.UPPER else kv.start
            stop[rows] = last
            self._spans.append((first, stop))

    def range_of(self, queries: Tensor) -> range:
        """The range of keys that has all that any of these queries sees."""
        pairs = [(first[queries], stop[queries]) for first, stop in self._spans]
        ends = [(first[first < stop], stop[first < stop]) for first, stop in pairs if bool((first < stop).any())]
        if not ends:
            return range(0)
        return range(min(int(first.min()) for first, _ in ends), max(int(stop.max()) for _, stop in ends))

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query sees each key: (queries, keys), on the device of the keys."""
        sees = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=keys.device)
        for first, stop in self._spans:
            low, high = (x[queries].to(keys.device)[:, None] for x in (first, stop))
            sees |= (keys >= low) & (keys < high)
        return sees

    def see_any(self, keys: Tensor) -> Tensor:
        """Whether each query sees one of these keys, which ascend: (seqlen,)."""
        any_seen = [torch.searchsorted(keys, first) < torch.searchsorted(keys, stop) for first, stop in self._spans]
        return torch.stack(any_seen).any(0) if any_seen else torch.zeros(0, dtype=torch.bool)
