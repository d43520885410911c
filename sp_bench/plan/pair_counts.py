"""Pair counts where each query sees one run of neighbouring keys (plan.intervals), between any two chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sp_bench.plan.intervals import Sight, stretches
from sp_bench.plan.runs import Runs, by_position

RUNS_AT_ONCE = 1024
"""Few enough that counts by chunk stay in a cache."""


def pair_counts(mask: Sight, queries: Sequence[Runs], keys: Sequence[Runs]) -> np.ndarray:
    """(query, key) pairs between any two of as many chunks of queries and of keys, all of their runs those of
    neighbours: (chunks, chunks), by query and key chunk.

    Takes time and memory in proportion to the runs of keys, times the chunks.
    """
    chunks = len(keys)
    owner, _, count, (first, last_first, stop, last_stop) = stretches(mask, queries, keys)
    of, starts, stops = by_position(keys)
    lengths = stops - starts
    # What a query sees ends within one run and starts within another, whose keys are counted here. Along a stretch of
    # queries that are as many more, or as many fewer, with each.
    partly, changes = np.zeros(chunks**2), []
    for sign, low, high in ((1, stop, last_stop), (-1, first, last_first)):
        run = np.searchsorted(starts, low, "right") - 1
        partly += sign * np.bincount(owner * chunks + of[run], count * (low + high - 2 * starts[run]), chunks**2)
        changes.append((-sign, *_counted(run * chunks + owner, count)))
    partly /= 2
    # How many queries of each chunk see all of a run, since what they see starts before it and ends behind it.
    pairs, seeing = partly.reshape(chunks, chunks).astype(np.int64), np.zeros(chunks, np.int64)
    for low in range(0, starts.size, RUNS_AT_ONCE):
        high = min(low + RUNS_AT_ONCE, starts.size)
        more = np.zeros((chunks, high - low), np.int64)
        for sign, cells, counts in changes:
            in_group = slice(*np.searchsorted(cells, (low * chunks, high * chunks)))
            run, chunk = np.divmod(cells[in_group], chunks)
            more[chunk, run - low] += sign * counts[in_group]
        more[:, 0] += seeing
        more.cumsum(axis=1, out=more)
        seeing = more[:, -1].copy()
        more *= lengths[low:high]
        # Sums by owner, as differences of running ones: np.add.reduceat takes several times as long.
        by_owner = np.argsort(of[low:high], kind="stable")
        last = np.flatnonzero(np.diff(of[low:high][by_owner], append=-1))
        total = more.take(by_owner, axis=1).cumsum(axis=1)[:, last]
        pairs[:, of[low:high][by_owner][last]] += np.diff(total, axis=1, prepend=0)
    return pairs


def _counted(cells: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct cells, ascending, and how often each occurs, if each of `cells` does so many times."""
    different, number = np.unique(cells, return_inverse=True)
    return different, np.bincount(number, times).astype(np.int64)


def pair_counts_of_striped(owner: np.ndarray, chunks: int, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """`pair_counts` where keys are dealt to chunks one by one: every query sees the keys from `first` to the one before
    `stop`, and is of the chunk `owner`, (queries,) each.
    """
    return _striped_keys_below(owner, chunks, stop) - _striped_keys_below(owner, chunks, first)


def _striped_keys_below(owner: np.ndarray, chunks: int, limit: np.ndarray) -> np.ndarray:
    """For each query chunk i and key chunk j: the keys of j below limit[p], summed over the positions p of i."""
    rounds, rest = np.divmod(limit, chunks)
    whole = np.bincount(owner, weights=rounds, minlength=chunks)[:, None]
    by_rest = np.bincount(owner * chunks + rest, minlength=chunks**2).reshape(chunks, chunks)
    return (whole + by_rest.sum(axis=1, keepdims=True) - by_rest.cumsum(axis=1)).astype(np.int64)
