"""Masks of packed documents, sliding windows and chunks.

Documents are packed one behind the other into one sequence, and a query sees keys of its own document only. A window
further limits how far a query sees. No length has to be divisible by anything.

    document   the keys of the same document: all of them, or those up to the query's own position
    window     the keys from `left` tokens before a query to `right` tokens behind it
    chunked    documents of equal length (chunked attention of Llama 4)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.dealers import DEALERS, FOR_ANY, Deal, Dealt
from sp_bench.plan.intervals import pair_counts, regions_between, regions_of_runs, runs_of
from sp_bench.plan.layout import LAYOUTS, Layout, Positions
from sp_bench.plan.mask import CAUSAL, FULL, Blocks, Mask, Part
from sp_bench.plan.regions import Regions

EVEN_ENOUGH = 1.1
"""layout=auto takes, of the layouts whose busiest rank has at most this multiple of the mean work, the one that needs
the least data of other ranks."""
MOST_SHOWN = 8


@dataclass(frozen=True)
class OfLengths(Mask):
    """A mask of several sequences, one behind the other. It may have thousands, and is hashed again and again."""

    lengths: tuple[int, ...]
    """Tokens, of keys, of each sequence, in their order."""

    in_pieces: ClassVar[bool] = True

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, *self._values))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):  # hashes differ from process to process
        return type(self), self._values

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def edges(self) -> np.ndarray:
        """The start of each sequence, and the end of the last one, in tokens: (sequences + 1,)."""
        return np.array([0, *accumulate(self.lengths)])

    @abstractmethod
    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first key that the query at each position sees, and the key behind the last one."""


@dataclass(frozen=True)
class Packed(OfLengths):
    """Documents packed into one sequence, with an optional window. Raises RequestError for a length below 1."""

    causal: bool = True
    """Whether a query sees only keys up to its own position."""
    left: int | None = None
    """How many keys before its own position a query sees; None: all of its document."""
    right: int | None = None
    """How many keys behind its own position a query sees, if not causal; None: all of its document."""

    sends_unseen: ClassVar[bool] = False
    __hash__ = OfLengths.__hash__

    def __post_init__(self) -> None:
        for number, length in enumerate(self.lengths):
            if type(length) is not int or length < 1:
                raise RequestError(
                    f"document {number} has length {length}",
                    "a document has at least one token",
                    "a whole number of at least 1 would work",
                )
        if not self.lengths:
            raise RequestError("a pack of no documents", "a pack has at least one", "lengths=[1024] would work")

    @property
    def seqlen(self) -> int:
        """Tokens of all documents together."""
        return int(self.edges[-1])

    @property
    def measured_as(self) -> str:
        return f"mask={self.name} with a window" if self.windowed and self.name != Window.name else super().measured_as

    @property
    def windowed(self) -> bool:
        """Whether a window limits what a query sees."""
        return self.left is not None or (not self.causal and self.right is not None)

    @property
    def unlimited(self) -> Mask | None:
        return type(self)(self.lengths, self.causal) if self.windowed else None

    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        document = np.searchsorted(self.edges, positions, side="right") - 1
        first, stop = self.edges[document], self.edges[document + 1]
        if self.left is not None:
            first = np.maximum(first, positions - self.left)
        ahead = 0 if self.causal else self.right
        return first, stop if ahead is None else np.minimum(stop, positions + ahead + 1)

    def turns(self, low: int, high: int, keys: np.ndarray) -> np.ndarray:
        """The queries of low <= p < high from which on either end of what is seen begins or ends to move on from query
        to query, where only keys count from and up to the given ones.
        """
        documents = slice(*np.searchsorted(self.edges, [low, high]))
        edges = self.edges[max(documents.start - 1, 0) : documents.stop + 1]
        turns, changes = [edges], np.concatenate([edges, keys])
        if self.left is not None:
            turns.append(changes + self.left)
        if (ahead := 0 if self.causal else self.right) is not None:
            turns.append(changes - 1 - ahead)
        return np.concatenate(turns)

    def regions(self, q: Positions, kv: Positions) -> Regions:
        if not (any(q) and any(kv)):
            return ()
        low, high = min(q[0].start, kv[0].start), max(q[-1][-1], kv[-1][-1])
        documents = np.searchsorted(self.edges, [low, high], side="right")
        if documents[0] == documents[1] and not self.windowed:
            return (CAUSAL if self.causal else FULL).regions(q, kv)
        of_q, of_kv = runs_of(q), runs_of(kv)
        if of_q and of_kv:
            return regions_of_runs(self, of_q, of_kv)
        first, stop = self.sees(_flat(q))
        keys = _flat(kv)
        return regions_between(np.searchsorted(keys, first), np.searchsorted(keys, stop))

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> PackBlocks:
        return _blocks(self, layout, n, seqlen)

    def pairs(self, seqlen: int, kv_seqlen: int | None = None) -> float:
        """(query, key) pairs that MFU counts: those that are seen, or by convention half a causal document's square."""
        if self.windowed:
            first, stop = self.sees(np.arange(self.seqlen))
            return float((stop - first).sum())
        squares = float(sum(length**2 for length in self.lengths))
        return squares / 2 if self.causal else squares

    @property
    def work_of_documents(self) -> np.ndarray:
        """(query, key) pairs of each document: (documents,)."""
        return self._work_of_documents

    @cached_property
    def _work_of_documents(self) -> np.ndarray:
        return np.diff(self.work_before(self.edges))

    def work_before(self, positions: np.ndarray) -> np.ndarray:
        """(query, key) pairs of all queries before each position, which may be the end: (positions,)."""
        if self.windowed:
            first, stop = self.sees(np.arange(self.seqlen))
            return np.append(0, np.cumsum(stop - first))[positions]
        lengths = np.diff(self.edges)
        whole = np.append(0, np.cumsum(lengths * (lengths + 1) // 2 if self.causal else lengths**2))
        document = np.searchsorted(self.edges, positions, side="right") - 1
        before = positions - self.edges[document]
        return whole[document] + (
            before * (before + 1) // 2 if self.causal else before * np.append(lengths, 0)[document]
        )

    def _filling(self, seqlen: int) -> str:
        """The change that makes the documents fill a sequence, in words: padding, or a shorter end."""
        if self.seqlen < seqlen:
            return f"one more document of {seqlen - self.seqlen} tokens as padding"
        kept = int(np.searchsorted(self.edges, seqlen, side="left"))
        return f"the first {kept} documents with {seqlen - int(self.edges[kept - 1])} tokens of the last of them"

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Raise RequestError unless the documents fill the sequence, and its tokens are queries and keys alike."""
        if kv_seqlen not in (None, seqlen):
            rule = f"documents and windows have as many keys as queries, and seqlen={seqlen}"
            raise RequestError(
                f"kv_seqlen={kv_seqlen}", rule, f"kv_seqlen={seqlen}, or mask=causal or full, would work"
            )
        if self.seqlen != seqlen:
            shown = ", ".join(map(str, self.lengths[:MOST_SHOWN])) + (", ..." if len(self.lengths) > MOST_SHOWN else "")
            raise RequestError(
                f"seqlen={seqlen}",
                f"the {len(self.lengths)} documents ({shown}) must fill it, and have {self.seqlen} tokens together",
                f"seqlen={self.seqlen}, or {self._filling(seqlen)}, would work",
            )

    def scaled(self, seqlen: int, unit: int = 1) -> Packed:
        """The same documents and window, in proportion, in a shorter sequence; what gets no token is left out."""
        edges = np.unique(np.round(self.edges * (seqlen / unit / self.seqlen)).astype(int)) * unit
        share = [None if x is None else round(x * seqlen / self.seqlen) for x in (self.left, self.right)]
        return type(self)(tuple(np.diff(edges).tolist()), self.causal, *share)

    def layout(self, name: str, n: int = 1, among: Sequence[str] = ()) -> Layout:
        """The layout of that name. `auto` is chosen by work, then by what ranks need of each other (EVEN_ENOUGH).

        It leaves no rank without a token where another layout gives all of them some.
        Raises RequestError for an unknown name; its message has the nearest one.
        """
        among = [*(among or (*LAYOUTS, *FOR_ANY))]
        if name == "auto":
            layouts = {each: self.layout(each) for each in among}
            among = [each for each, it in layouts.items() if it.gives_all_work(n, self.seqlen)] or among
            found = {each: self.blocks(layouts[each], n, self.seqlen) for each in among}
            enough = max(EVEN_ENOUGH, min(blocks.imbalance for blocks in found.values()))
            even = [each for each in among if found[each].imbalance <= enough]
            name = min(even, key=lambda each: found[each].remote_tokens)
        if name in LAYOUTS:
            return LAYOUTS[name]
        if name not in DEALERS:
            raise unknown("method.layout", name, [*LAYOUTS, *DEALERS, "auto"])
        return Dealt(name, 1, Deal(self, name))


class Documents(Packed):
    """Documents, each causal or full inside, with or without a window."""

    name: ClassVar[str] = "document"


class Window(Packed):
    """A sliding window over one sequence."""

    name: ClassVar[str] = "window"

    @property
    def unlimited(self) -> Mask:
        return CAUSAL if self.causal else FULL


class Chunked(Packed):
    """Documents of equal length; the last may be shorter."""

    name: ClassVar[str] = "chunked"

    @property
    def unlimited(self) -> Mask:
        return CAUSAL if self.causal else FULL

    @classmethod
    def of(cls, tokens: int, seqlen: int, *, causal: bool = True) -> Chunked:
        """Chunks of so many tokens in a sequence of `seqlen`."""
        whole, rest = divmod(seqlen, tokens)
        return cls((tokens,) * whole + (rest,) * (rest > 0), causal)


class Shapes(NamedTuple):
    """The mean size of the pieces that a block falls into: queries and keys of the same document. (classes,) each."""

    pieces: np.ndarray
    q_tokens: np.ndarray
    kv_tokens: np.ndarray


class Seen(NamedTuple):
    """The keys of other chunks that the queries of one chunk see, in groups: by document, or by run of a window."""

    keys: np.ndarray
    """How many a query sees, rising in a group: (queries,)."""
    behind: np.ndarray
    """How many more queries its group has behind it: (queries,)."""
    first: np.ndarray
    """The first query of each group: (groups,)."""
    queries: np.ndarray
    """How many each group has: (groups,)."""


@dataclass(frozen=True)
class PackBlocks(Blocks):
    """The blocks of a pack: each pair of chunks is a class of its own, whose regions are found when they are asked for.

    Counts of pairs are an array over all pairs of chunks.
    """

    mask: Packed  # pyright: ignore[reportIncompatibleVariableOverride]
    found: dict[int, Regions] = field(default_factory=dict, compare=False, repr=False)

    def of(self, q_rank, kv_rank):
        degree = self.layout.head_parallel
        return q_rank // degree * self.chunks + kv_rank // degree

    @property
    def numbering(self) -> Hashable:
        return self.n, self.layout.head_parallel

    def regions_of(self, kind: int) -> Regions:
        if kind not in self.found:
            q, kv = map(self._queries, divmod(int(kind), self.chunks))
            self.found[kind] = self.mask.regions(q, kv) if self.computes[kind] else ()
        return self.found[kind]

    @property
    def classes(self) -> int:
        return self.chunks**2

    @cached_property
    def owner(self) -> np.ndarray:
        """The chunk of each position: (seqlen,)."""
        owner = np.empty(self.seqlen, np.int64)
        for chunk in range(self.chunks):
            for run in self._queries(chunk):
                owner[run.start : run.stop : run.step] = chunk
        return owner

    @cached_property
    def pairs(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return pair_counts(self.owner, self.chunks, *self.mask.sees(np.arange(self.seqlen))).ravel()

    @cached_property
    def computes(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether any pair of each class is computed, (classes,): found without counting pairs."""
        return self.pairs > 0 if self._runs is None else (self._seen(self._runs[1]) > 0).ravel()

    @cached_property
    def keys_seen(self) -> np.ndarray:
        """How many keys of each block some query of it sees: (classes,). Of chunks that are no runs of neighbours, all
        that are of the same documents.
        """
        if self._runs is None:
            return self.shapes.pieces * self.shapes.kv_tokens
        edges = np.unique(np.concatenate(self._runs[1:]))
        return self._seen(edges[edges < self.seqlen]).ravel()

    @cached_property
    def _runs(self) -> tuple[np.ndarray, ...] | None:
        """The runs of neighbours that chunks are dealt as, ascending: the chunk of each, its first position, the first
        key that it sees and the key behind the last, (runs,). None where chunks are no runs, or one has none.
        """
        dealt = [runs_of(self._queries(chunk)) for chunk in range(self.chunks)]
        if not all(dealt):
            return None
        owner = np.repeat(np.arange(self.chunks), [runs.start.size for runs in dealt if runs])
        start, stop = (np.concatenate(each) for each in zip(*filter(None, dealt), strict=True))
        # The queries of a run see neighbouring keys, all together.
        order, first, behind = np.argsort(start), self.mask.sees(start)[0], self.mask.sees(stop - 1)[1]
        return tuple(x[order] for x in (owner, start, first, behind))

    def _seen(self, cells: np.ndarray) -> np.ndarray:
        """Tokens of the cells of keys that begin at these positions, of those that any query of a chunk sees a key of,
        by the chunk of queries and that of keys: (chunks, chunks).
        """
        assert self._runs is not None, "chunks are runs"
        owner, start, first, behind = self._runs
        of_cells, tokens = owner[np.searchsorted(start, cells, "right") - 1], np.diff(np.append(cells, self.seqlen))
        begins, ends = (np.searchsorted(cells, keys, "right") for keys in (first, behind - 1))
        runs = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=self.chunks))[:-1])
        found = np.empty((self.chunks, self.chunks))
        for chunk, mine in enumerate(runs):
            there = np.bincount(begins[mine] - 1, minlength=cells.size + 1)
            there -= np.bincount(ends[mine], minlength=cells.size + 1)
            seen = np.cumsum(there[:-1]) > 0
            found[chunk] = np.bincount(of_cells[seen], tokens[seen], self.chunks)
        return found

    def parts(self, *, keys: bool) -> Sequence[Part]:
        """Whole chunks: a kernel for variable lengths returns all rows."""
        return [Part(1.0, False)] * self.classes

    @property
    def narrows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True: most blocks compute a part of their rows."""
        return True

    @property
    def skips_queries(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False: all rows of a chunk travel together."""
        return False

    @cached_property
    def tokens_of_documents(self) -> np.ndarray:
        """Tokens of each document in each chunk: (documents, chunks)."""
        documents = np.arange(len(self.mask.lengths))
        cell = np.repeat(documents, self.mask.lengths) * self.chunks + self.owner
        return np.bincount(cell, minlength=documents.size * self.chunks).reshape(documents.size, -1)

    @cached_property
    def shapes(self) -> Shapes:
        """The mean pieces of each block. A kernel call takes them together."""
        tokens = self.tokens_of_documents.astype(float)
        there = (tokens > 0).astype(float)
        pieces, q_tokens, kv_tokens = there.T @ there, tokens.T @ there, there.T @ tokens
        divided = np.maximum(pieces, 1)
        return Shapes(pieces.ravel(), (q_tokens / divided).ravel(), (kv_tokens / divided).ravel())

    @property
    def imbalance(self) -> float:
        """(query, key) pairs of the chunk with most of them over the mean of all."""
        work = self.pairs.reshape(self.chunks, self.chunks).sum(axis=1)
        return float(work.max() / work.mean())

    @property
    def remote_tokens(self) -> int:
        """Keys that chunks see in other chunks, a whole chunk of keys for each pair of chunks that has any."""
        tokens = self.layout.chunk_tokens(np.arange(self.chunks), self.chunks, self.seqlen)
        seen = self.pairs.reshape(self.chunks, self.chunks) > 0
        np.fill_diagonal(seen, False)
        return int((seen * tokens).sum())

    def least_moved(self, per_query: float, per_key: float) -> float:
        """The least that any method moves between chunks, of so much for a query and for a key, all chunks together.

        A pair of a query of one chunk and a key of another is computed somewhere. Then the key has come to the query's
        chunk, or the query has left it and its result came back. What it costs at least is a vertex cover of least
        weight of a chunk's queries and the others' keys that they see. In a document later queries see more, so that
        the cover is all keys up to one query and all queries behind it. With a window, only the keys between two runs
        of a chunk are counted, with the queries of the second.
        """
        moved = 0.0
        for seen in self._seen_elsewhere:
            kept = np.minimum.reduceat(per_key * seen.keys + per_query * seen.behind, seen.first)
            moved += float(np.minimum(kept, per_query * seen.queries).sum())
        return moved

    @cached_property
    def _seen_elsewhere(self) -> list[Seen]:
        """The keys of other chunks that the queries of each chunk see, for chunks that have any."""
        ends = np.cumsum(np.bincount(self.owner, minlength=self.chunks))
        of_chunks = np.split(np.argsort(self.owner, kind="stable"), ends[:-1])
        return [self._seen_by(queries) for queries in of_chunks if queries.size]

    def _seen_by(self, queries: np.ndarray) -> Seen:
        first, stop = self.mask.sees(queries)
        if self.mask.windowed:
            of = np.append(0, np.cumsum(np.diff(queries) > 1))  # the run of each query
            before = np.append(0, queries[:-1] + 1)[np.flatnonzero(np.diff(of, prepend=-1))]
            start = queries[np.flatnonzero(np.diff(of, prepend=-1))]
            keys = np.maximum(start[of] - np.maximum(first, before[of]), 0)
            order = np.lexsort((keys, of))
            of, keys = of[order], keys[order]
        else:
            of = np.searchsorted(self.mask.edges, queries, side="right") - 1
            keys = (stop - first) - (np.searchsorted(queries, stop) - np.searchsorted(queries, first))
        groups = np.flatnonzero(np.diff(of, prepend=-1))
        sizes = np.diff(np.append(groups, queries.size))
        behind = np.repeat(groups + sizes, sizes) - np.arange(queries.size) - 1
        return Seen(keys.astype(np.int32), behind.astype(np.int32), groups, sizes)


@lru_cache(maxsize=32)
def _blocks(mask: Packed, layout: Layout, n: int, seqlen: int) -> PackBlocks:
    # Counting pairs takes long, and a method's variants deal alike.
    return PackBlocks(mask, layout, n, seqlen, seqlen)


def _flat(positions: Positions) -> np.ndarray:
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in positions] or [np.zeros(0, int)])
