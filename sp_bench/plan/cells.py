"""Cells: the runs of positions that one side of a pack is cut into by what the runs of the other side see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sp_bench.plan.intervals import covered
from sp_bench.plan.runs import first_rows

CELLS_AT_ONCE, MOST_CELLS = 2**17, 2**22
"""Runs of keys times chunks that are looked at together, first and at most."""
NO_ROW = 2**30
"""More rows than any chunk has."""


class Cells(NamedTuple):
    """Runs of keys that a run of queries sees all of, or none of, in the order of their positions. Or of queries that
    all see some key of a run of keys, or none does. Runs of the other side are in that order too.
    """

    owner: np.ndarray
    """The chunk of each: (cells,)."""
    tokens: np.ndarray
    """How many keys, or queries, there are: (cells,)."""
    chunk: np.ndarray
    """The chunk of each run of the other side: (runs,)."""
    first: np.ndarray
    """The first cell that it meets, and the one behind the last: (runs,)."""
    behind: np.ndarray

    def met_by(self, chunk: int) -> np.ndarray:
        """Whether one of the other side's chunks meets each cell: (cells,)."""
        of_it = self.chunk == chunk
        return covered(self.chunk[of_it] - chunk, self.first[of_it], self.behind[of_it], (1, self.owner.size))[0]

    def _met(self, low: int, high: int, chunks: int) -> np.ndarray:
        """Whether each of the other side's chunks meets the cells from low to high: (high - low, chunks)."""
        some = slice(np.searchsorted(self.behind, low, "right"), np.searchsorted(self.first, high))
        first, behind = (np.clip(each[some] - low, 0, high - low) for each in (self.first, self.behind))
        return covered(self.chunk[some], first, behind, (chunks, high - low)).T

    @property
    def _from_behind(self) -> Cells:
        """The cells with the last one first."""
        cells = self.owner.size
        runs = self.chunk[::-1], cells - self.behind[::-1], cells - self.first[::-1]
        return Cells(self.owner[::-1], self.tokens[::-1], *runs)

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Each cell as rows of its chunk: (the first, the one behind the last), (cells,) each."""
        start = first_rows(self.owner, self.tokens)[0].astype(np.int32)
        return start, start + self.tokens.astype(np.int32)

    def rows_met(self, chunks: int) -> np.ndarray:
        """The rows of cells that each chunk meets, (the first, the one behind the last): (2, chunks, owners)."""
        start, stop = self._rows()
        return np.stack([self._first_met(start, chunks), self._from_behind._first_met(stop[::-1], chunks)])

    def _first_met(self, numbers: np.ndarray, chunks: int) -> np.ndarray:
        """The number, (cells,), of the first cell of each owner that each chunk meets, or 0: (chunks, owners)."""
        found, unknown, high = np.zeros((chunks, chunks), np.int32), np.ones((chunks, chunks), bool), 0
        while high < self.owner.size and unknown.any():  # those of most packs are known after few documents
            more = max(min(high, MOST_CELLS // chunks), CELLS_AT_ONCE // chunks, 1)
            low, high = high, min(high + more, self.owner.size)
            order = np.argsort(self.owner[low:high], kind="stable")
            of_cells, met = self.owner[low:high][order], self._met(low, high, chunks).take(order, axis=0)
            begins = np.flatnonzero(np.diff(of_cells, prepend=-1))
            places = np.where(met, np.arange(order.size, dtype=np.int32)[:, None], NO_ROW)
            first = np.minimum.reduceat(places, begins)
            owner, chunk = np.nonzero((first < NO_ROW) & unknown[:, of_cells[begins]].T)
            found[chunk, of_cells[begins][owner]] = numbers[low:high][order][first[owner, chunk]]
            unknown[chunk, of_cells[begins][owner]] = False
        return found


def cells_of(cut: np.ndarray, others: np.ndarray, first: np.ndarray, behind: np.ndarray) -> Cells:
    """The cells of all runs of one side, (chunk, start, stop) each by position, without gaps, of which each of the
    `others` meets those from `first` to `behind`.
    """
    owner, begin, end = cut
    edges = np.sort(np.concatenate([begin, end, first, behind]), kind="stable")  # each is ascending
    edges = edges[np.diff(edges, prepend=edges[0] - 1) > 0]  # np.unique hashes, which takes far longer
    of_cells = owner.astype(np.min_scalar_type(int(owner.max())))[np.searchsorted(begin, edges[:-1], "right") - 1]
    return Cells(of_cells, np.diff(edges), others[0], np.searchsorted(edges, first), np.searchsorted(edges, behind))
