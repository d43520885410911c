"""Pair counts where each query sees one run of neighbouring keys (plan.intervals), between any two chunks."""

from __future__ import annotations

import numpy as np

RUNS_AT_ONCE = 1024
"""Few enough that counts by chunk stay in a cache."""


def pair_counts(
    owner: np.ndarray, key_owner: np.ndarray, chunks: int, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """(query, key) pairs between any two chunks: (chunks, chunks), by query and key chunk.

    `owner` is the chunk of each query, `first` and `stop` what it sees, (queries,) each, `key_owner` the chunk of each
    key, (keys,). Takes time and memory in proportion to the runs of keys of one chunk, times the chunks.
    """
    if chunks > 1 and np.array_equal(key_owner, np.arange(key_owner.size) % chunks):
        return _striped_keys_below(owner, chunks, stop) - _striped_keys_below(owner, chunks, first)
    begins = np.append(True, key_owner[1:] != key_owner[:-1])
    starts, run_of = np.flatnonzero(begins), np.append(np.cumsum(begins, dtype=np.int32) - 1, 0)
    run_of[-1] = starts.size - 1  # what is seen may end where the keys do
    of, lengths = key_owner[starts], np.diff(np.append(starts, key_owner.size))
    # What a query sees ends within one run and starts within another, whose keys are counted here.
    partly, changes = np.zeros(chunks**2), []
    for sign, limit in ((1, stop), (-1, first)):
        run = run_of[limit]
        partly += sign * np.bincount(owner * chunks + of[run], limit - starts[run], chunks**2)
        changes.append((-sign, *_counted(run * chunks + owner)))
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


def _counted(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct cells, ascending, and how often each occurs; fast where neighbours are mostly equal."""
    first = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
    different, number = np.unique(cells[first], return_inverse=True)
    return different, np.bincount(number, np.diff(np.append(first, cells.size))).astype(np.int64)


def _striped_keys_below(owner: np.ndarray, chunks: int, limit: np.ndarray) -> np.ndarray:
    """For each query chunk i and key chunk j: the keys of j below limit[p], summed over the positions p of i."""
    rounds, rest = np.divmod(limit, chunks)
    whole = np.bincount(owner, weights=rounds, minlength=chunks)[:, None]
    by_rest = np.bincount(owner * chunks + rest, minlength=chunks**2).reshape(chunks, chunks)
    return (whole + by_rest.sum(axis=1, keepdims=True) - by_rest.cumsum(axis=1)).astype(np.int64)
