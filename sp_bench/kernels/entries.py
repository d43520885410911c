"""Entries: rows of one sequence that see the same of its cache, which kernels for decoding take as a batch.

Keys lie in pages of T tokens in a pool, in any order, (pages, T, heads, D), and a table says where each entry has its
own (PagedAttention, Kwon et al. 2023, section 4.3). Keys that lie one behind the other are pages of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

ABSORBED = (576, 512)
"""The widths of latent keys and of the values that are their first elements, for which kernels of libraries are made
(DeepSeek-V2 and V3): 512 of the latent, and 64 that are rotated."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of R rows each, in the order of their rows.

    A kernel may keep what it makes of them: it is the same at every execution.
    """

    lengths: tuple[int, ...]
    """Keys of each entry, at least one."""
    places: tuple[Sequence[int], ...]
    """The place in the pool of each of an entry's pages, in the order of its keys."""
    page: int
    """Tokens of a page."""
    device: torch.device

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def counts(self) -> Tensor:
        """Keys of each entry: (E,) int32."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def table(self) -> Tensor:
        """Places of each entry's pages, (E, pages) int32, and 0 behind those of shorter ones."""
        most = max(map(len, self.places))
        rows = [[*places, *[0] * (most - len(places))] for places in self.places]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    @cached_property
    def ends(self) -> Tensor:
        """Starts of each entry's pages in `in_line`, and the end of the last: (E + 1,) int32, on the host."""
        return torch.tensor([0, *accumulate(map(len, self.places))], dtype=torch.int32)

    @cached_property
    def in_line(self) -> Tensor:
        """Places of all entries' pages, one behind the other: (pages,) int32."""
        every = [place for places in self.places for place in places]
        return torch.tensor(every, dtype=torch.int32, device=self.device)

    @cached_property
    def last(self) -> Tensor:
        """Keys of each entry's last page: (E,) int32, on the host."""
        return torch.tensor([(length - 1) % self.page + 1 for length in self.lengths], dtype=torch.int32)

    @cached_property
    def runs(self) -> list[tuple[range, int, Tensor]]:
        """Runs of places in the pool whose pages have as many keys: (places, keys of each, the entries that read them,
        (places,) int64).
        """
        reads = sorted(
            (min(self.page, length - number * self.page), place, entry)
            for entry, (length, places) in enumerate(zip(self.lengths, self.places, strict=True))
            for number, place in enumerate(places)
        )
        all_runs = []
        for (count, _), run in groupby(enumerate(reads), lambda read: (read[1][0], read[1][1] - read[0])):
            of_run = [read for _, read in run]
            readers = torch.tensor([entry for _, _, entry in of_run], device=self.device)
            all_runs.append((range(of_run[0][1], of_run[-1][1] + 1), count, readers))
        return all_runs


def merged(out: Tensor, lse: Tensor, entry: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """(out_ERHD, lse_EHR) of all parts of each entry, of those by parts, (parts, R, H, D) and (parts, H, R).

    `entry` is the number of each part's entry, (parts,) int64; each of the `entries` has one. A part that saw no key
    has lse = -inf (FlashDecoding, Dao et al. 2023: a reduction over splits of the keys).
    """
    most = lse.new_full((entries, *lse.shape[1:]), -torch.inf)
    most.scatter_reduce_(0, entry[:, None, None].expand_as(lse), lse, "amax")
    weight = torch.exp(lse - most[entry])
    total = torch.zeros_like(most).index_add_(0, entry, weight)
    wide = out.to(lse.dtype) * weight.transpose(1, 2)[..., None]
    summed = wide.new_zeros(entries, *out.shape[1:]).index_add_(0, entry, wide)
    return (summed / total.transpose(1, 2)[..., None]).to(out.dtype), most + total.log()
