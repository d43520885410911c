"""Blocks of a whole sequence that are alike: whose queries see as many keys, query by query.

A group cast of 512 ranks has a hundred thousand blocks, of a few kinds. What a block computes follows from how many of
its keys each of its queries sees, wherever they are. That number is the same for all queries of a run, or it grows
with them by a key a query, from each run of keys that some of these queries see more of than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sp_bench.plan.runs import Runs

_MANY = 1 << 31
"""More than a run has tokens."""


class _Padded(NamedTuple):
    """The runs of every chunk, filled up with empty ones: (chunks, runs) each."""

    start: np.ndarray
    tokens: np.ndarray
    step: np.ndarray

    def of(self, chunks: np.ndarray) -> _Padded:
        return _Padded(*(each[chunks] for each in self))


def _padded(chunks: Sequence[Runs]) -> _Padded:
    shape = len(chunks), max(runs.start.size for runs in chunks)
    padded = _Padded(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.ones(shape, np.int64))
    for i, runs in enumerate(chunks):
        filled = slice(runs.start.size)
        padded.start[i, filled], padded.tokens[i, filled], padded.step[i] = runs.start, runs.tokens, runs.step
    return padded


class Alike:
    """Says which blocks of a whole sequence are alike, causal or not, by their chunks of queries and keys."""

    def __init__(self, queries: Sequence[Runs], keys: Sequence[Runs], *, causal: bool) -> None:
        self._queries, self._keys, self._causal = _padded(queries), _padded(keys), causal

    def seen(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """How many keys of a chunk the last query of another sees, which are its first ones; both chunks broadcast."""
        q, kv = self._queries.of(queries), self._keys.of(keys)
        last = (q.start + (q.tokens - 1) * q.step).max(axis=-1, initial=-1, where=q.tokens > 0)
        return self._below(last[..., None], kv).sum(axis=-1)

    def codes(self, queries: np.ndarray, members: np.ndarray) -> np.ndarray | None:
        """Numbers that are the same for blocks that are alike: (blocks, numbers). None where that can't be told.

        `queries` is the query chunk of each block, (blocks,), `members` its key chunks, (blocks, members).
        """
        q, kv = self._queries.of(queries), self._keys.of(members)
        kv = _Padded(*(each.reshape(len(queries), 1, -1) for each in kv))
        start, tokens, step = (each[:, :, None] for each in q)
        first, last = (self._below(at, kv) for at in (start, start + np.maximum(tokens - 1, 0) * step))
        moves = (first != last) & (tokens > 0)
        steady = np.where(moves, 0, first).sum(axis=-1) * (q.tokens > 0)
        codes = np.concatenate([q.tokens, steady], axis=1)
        if not moves.any():
            return codes
        if (moves & (kv.tokens > 1) & (kv.step != step)).any():
            return None
        # How many keys of a run the first query would see, if the run went on to both sides.
        ahead = -((kv.start - start - 1) // step)
        each = np.where(moves, ahead * _MANY + kv.tokens, -_MANY * _MANY)
        most = int(moves.sum(axis=-1).max())
        each = np.sort(each, axis=-1)[:, :, each.shape[-1] - most :]
        return np.concatenate([codes, each.reshape(len(queries), -1)], axis=1)

    def _below(self, position: np.ndarray, kv: _Padded) -> np.ndarray:
        """How many keys of each run a query at a position sees."""
        if not self._causal:
            return np.broadcast_to(kv.tokens, np.broadcast_shapes(position.shape, kv.tokens.shape))
        return np.clip(-((kv.start - position - 1) // kv.step), 0, kv.tokens)
