"""Runs of positions that chunks own: by chunk, all of them in the order of their positions, and as rows of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Runs of positions `step` apart, ascending: (runs,) each."""

    start: np.ndarray
    stop: np.ndarray
    """The position behind the last one."""
    step: int = 1

    @property
    def tokens(self) -> np.ndarray:
        """Positions of each run."""
        return -(-(self.stop - self.start) // self.step)

    def below(self, positions: np.ndarray) -> np.ndarray:
        """How many positions of the runs are below each of `positions`."""
        tokens = self.tokens
        if not tokens.size:
            return np.zeros(positions.size, np.int64)
        run = np.maximum(np.searchsorted(self.start, positions, "right") - 1, 0)
        into = -((self.start[run] - positions) // self.step)
        return (np.cumsum(tokens) - tokens)[run] + np.minimum(np.maximum(into, 0), tokens[run])


def runs_of(positions: Iterable[range]) -> Runs:
    """Positions as runs. All that have several positions have them equally far apart."""
    runs = [(run.start, run[-1] + 1, run.step if len(run) > 1 else 0) for run in positions if run]
    start, stop, step = np.array(runs, np.int64).reshape(-1, 3).T
    apart = int(step.max(initial=0)) or 1
    assert ((step == 0) | (step == apart)).all(), "runs of one step"
    return Runs(start, stop, apart)


def by_position(chunks: Sequence[Runs]) -> np.ndarray:
    """(chunk, start, stop) of the runs of all chunks, ascending: (3, runs)."""
    if len(chunks) == 1:  # which has them so
        return np.stack([np.zeros_like(chunks[0].start), *chunks[0][:2]])
    chunk = np.repeat(np.arange(len(chunks)), [runs.start.size for runs in chunks])
    start, stop = (np.concatenate([runs[i] for runs in chunks]) for i in range(2))
    order = np.argsort(start, kind="stable")
    return np.stack([chunk[order], start[order], stop[order]])


def first_rows(owner: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the row of its owner's tokens that each run begins at, the order of the runs by owner and position), of runs of
    so many tokens by position: (runs,) each.
    """
    if not owner.any():  # all are of one chunk
        return np.cumsum(tokens) - tokens, np.arange(owner.size)
    small = owner.astype(np.min_scalar_type(int(owner.max(initial=0))))  # which is sorted fast
    order = np.argsort(small, kind="stable")
    before = np.cumsum(tokens[order]) - tokens[order]
    begins = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rows = np.empty_like(before)
    rows[order] = before - np.repeat(before[begins], np.diff(np.append(begins, order.size)))
    return rows, order


def in_runs(chunks: Sequence[Runs]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each run of neighbouring positions of some chunks: (chunk, start, stop), (runs,) each."""
    near = [neighbouring(runs) for runs in chunks]
    chunk = np.repeat(np.arange(len(near)), [runs.start.size for runs in near])
    return chunk, np.concatenate([runs.start for runs in near]), np.concatenate([runs.stop for runs in near])


def neighbouring(runs: Runs) -> Runs:
    """The same positions as runs of neighbours: each alone where they are apart."""
    if runs.step == 1:
        return runs
    ends = zip(runs.start.tolist(), runs.stop.tolist(), strict=True)
    positions = np.concatenate([np.arange(start, stop, runs.step) for start, stop in ends])
    return Runs(positions, positions + 1)


def whole_numbers(start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The whole numbers of runs, one run behind the other."""
    ends = np.cumsum(tokens)
    total = int(tokens.sum())
    if total < MANY:
        return np.repeat(start - (ends - tokens), tokens) + np.arange(total)
    some = tokens > 0
    start, tokens, ends = start[some].astype(np.int64), tokens[some].astype(np.int64), ends[some]
    numbers = np.ones(total, np.int64)  # what each is above the one before, added up in place: no second array
    numbers[0] = start[0]
    numbers[ends[:-1]] = start[1:] - (start + tokens)[:-1] + 1
    return np.cumsum(numbers, out=numbers)


MANY = 1 << 14
"""Numbers of which a second array takes longer than a few more steps."""
