"""Masks of packed documents, sliding windows and chunks.

Documents are packed one behind the other into one sequence, and a query sees keys of its own document only. A window
further limits how far a query sees. No length has to be divisible by anything.

    document   the keys of the same document: all of them, or those up to the query's own position
    window     the keys from `left` tokens before a query to `right` tokens behind it
    chunked    documents of equal length (chunked attention of Llama 4)

Queries may be the last tokens of each document, behind a history of it: what is cached of a sequence of which a part is
prefilled. A rank then has its part of every history, and the keys of its own queries. What no query sees of a history,
since it is before all windows, is no part of the problem.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Self

import numpy as np

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.assignments import ASSIGNMENTS, FOR_ANY, AssignedLayout, TokenAssignment
from sp_bench.plan.intervals import regions_of_runs
from sp_bench.plan.layout import LAYOUTS, Cut, Cuts, Layout, Positions, Shards, joined_cuts, placed
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.regions import Regions
from sp_bench.plan.runs import Runs, runs_of

MOST_TOKENS, MOST_BEFORE = 2**27, 2**40
"""Tokens of a pack, whose arrays have some bytes for each, and of its histories or of a window, which are numbers."""
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

    new: tuple[int, ...] = ()
    """Tokens of each document that are queries, which are its last ones; empty for all of them."""
    cached: tuple[tuple[int, ...], ...] = ()
    """For each document, the tokens before its queries in stretches that were assigned to ranks one by one, among them
    those that no query sees; empty where nothing is."""

    sends_unseen: ClassVar[bool] = False
    other_history: ClassVar[str] = ""
    """The words for more keys than queries."""
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
        if (tokens := sum(self.lengths)) > MOST_TOKENS:
            rule = f"has more tokens than the {MOST_TOKENS} that are looked at one by one"
            raise RequestError(f"a pack of {tokens} tokens", rule, f"at most {MOST_TOKENS} would work")
        for what, count in (
            ("histories", sum(map(sum, self.cached))),
            ("window", max(self.left or 0, self.right or 0)),
        ):
            if count > MOST_BEFORE:
                rule = f"is more than the {MOST_BEFORE} that numbers hold"
                raise RequestError(f"{what} of {count} tokens", rule, f"at most {MOST_BEFORE} would work")

    def behind(self, cached: Sequence[Sequence[int]]) -> Self:
        """The same documents as queries, each behind what is `cached` of it: the tokens of each stretch that was
        assigned to ranks on its own. No history is the same as one of no tokens.
        """
        stretches = tuple(tuple(filter(None, each)) for each in cached)
        if not any(stretches):
            return self
        seen = (sum(each) if self.left is None else min(sum(each), self.left) for each in stretches)
        return self._behind(stretches, tuple(seen))

    def _behind(self, cached: tuple[tuple[int, ...], ...], seen: tuple[int, ...]) -> Self:
        """The documents behind histories of which queries see the last `seen` tokens."""
        lengths = tuple(map(sum, zip(self.lengths, seen, strict=True)))
        return replace(self, lengths=lengths, new=self.lengths, cached=cached)

    def part(self, start: int, stop: int, cached: tuple[int, ...]) -> Self:
        """The mask of the queries start <= q < stop of one sequence, behind its tokens before them, which were assigned
        to ranks in these stretches one by one: those of which a query sees some. Parts that see alike are alike.
        """
        edges = self.query_edges.clip(start, stop)
        new = tuple(np.diff(edges)[np.diff(edges) > 0].tolist())
        rest = type(self)(new, self.causal, self.left, self.right)
        first = self.query_positions[[start]]
        seen = int((first - self.sees(first)[0])[0])
        unseen = sum(behind >= seen for behind in accumulate(reversed(cached[1:])))
        return rest._one_behind(cached[unseen:] if seen else (), seen)

    def after(self, cached: tuple[int, ...]) -> Self:
        """The mask, of one sequence, with as many of its last tokens seen of another history, if that has as many."""
        rest = type(self)(self.queries, self.causal, self.left, self.right)
        return rest._one_behind(cached, self.lengths[0] - self.queries[0])

    def _one_behind(self, cached: tuple[int, ...], seen: int) -> Self:
        """One sequence behind a history, of which its first queries see at most so many tokens."""
        others, stretches = len(self.lengths) - 1, tuple(filter(None, cached))
        if not stretches:
            return self
        return self._behind((stretches, *((),) * others), (min(seen, sum(cached)), *(0,) * others))

    @property
    def queries(self) -> tuple[int, ...]:
        """Tokens of each document that are queries."""
        return self.new or self.lengths

    @cached_property
    def query_edges(self) -> np.ndarray:
        """The first query of each document, and how many there are: (documents + 1,)."""
        return np.array([0, *accumulate(self.queries)]) if self.new else self.edges

    @property
    def seqlen(self) -> int:
        """Queries of all documents together."""
        return int(self.query_edges[-1])

    @property
    def cached_tokens(self) -> int:
        """Tokens of all histories, those among them that no query sees."""
        return sum(map(sum, self.cached))

    def history(self, seqlen: int, kv_seqlen: int) -> int:
        return self.cached_tokens

    @cached_property
    def _placed(self) -> Cuts:
        """The places of queries among keys."""
        firsts = zip(self.query_edges.tolist(), self.queries, self.edges[1:].tolist(), strict=False)
        return joined_cuts(Cut(range(first, first + count), stop - count) for first, count, stop in firsts)

    def among_keys(self, queries: Positions, seqlen: int = 0, kv_seqlen: int = 0) -> Positions:
        return placed(queries, self._placed) if self.new else queries

    @cached_property
    def query_positions(self) -> np.ndarray:
        """The position of each query among the keys: (seqlen,)."""
        shift = self.edges[1:] - self.query_edges[1:]
        return np.arange(self.seqlen) + np.repeat(shift, self.queries)

    @cached_property
    def key_places(self) -> np.ndarray:
        """The place of each key among the tokens of all documents, those that no query sees included: (keys,)."""
        whole = np.cumsum([sum(each) for each in self.cached]) + self.query_edges[1:] if self.new else self.edges[1:]
        return np.arange(self.edges[-1]) + np.repeat(whole - self.edges[1:], self.lengths)

    def keys(self, layout: Layout, n: int, seqlen: int = 0, kv_seqlen: int = 0) -> Shards:
        if not self.new:
            return Shards(layout, n, (self.seqlen,))
        stretches = (*(tokens for each in self.cached for tokens in each), self.seqlen)
        return Shards(layout, n, stretches, self._kept)

    @cached_property
    def _kept(self) -> Cuts:
        """The keys that queries see, of all histories one after another and then all queries."""
        whole, seen = [sum(each) for each in self.cached], np.subtract(self.lengths, self.queries).tolist()
        firsts = self.edges.tolist()
        cuts = [
            Cut(range(stop - count, stop), first)
            for stop, count, first in zip(accumulate(whole), seen, firsts, strict=False)
        ]
        cuts += [
            Cut(range(cut.tokens.start + sum(whole), cut.tokens.stop + sum(whole)), cut.position)
            for cut in self._placed
        ]
        return joined_cuts(cuts)

    @property
    def measured_as(self) -> str:
        return f"mask={self.name} with a window" if self.windowed and self.name != Window.name else super().measured_as

    @property
    def windowed(self) -> bool:
        """Whether a window limits what a query sees."""
        return self.left is not None or (not self.causal and self.right is not None)

    @property
    def unlimited(self) -> Mask | None:
        if not self.windowed:
            return None
        return type(self)(self.queries, self.causal).behind(self.cached or ((),) * len(self.lengths))

    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._around(positions, self.left, 0 if self.causal else self.right)

    def seen_by(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first token that as a query sees the key at each position, and the one behind the last."""
        return self._around(positions, 0 if self.causal else self.right, self.left)

    def _around(self, positions: np.ndarray, before: int | None, ahead: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the document of each position from so many before it to so many ahead; None: all there are."""
        document = np.searchsorted(self.edges, positions, side="right") - 1
        first, stop = self.edges[document], self.edges[document + 1]
        if before is not None:
            first = np.maximum(first, positions - before)
        return first, stop if ahead is None else np.minimum(stop, positions + ahead + 1)

    def turns(self, low: int, high: int, keys: np.ndarray) -> np.ndarray:
        """The queries of low <= p < high from which on either end of what is seen begins or ends to move on from query
        to query, or the ones behind these, where only keys count from and up to the given ones.
        """
        documents = slice(*np.searchsorted(self.edges, [low, high]))
        edges = self.edges[max(documents.start - 1, 0) : documents.stop + 1]
        turns, changes = [edges], np.concatenate([edges, keys])
        if self.left is not None:
            turns.append(changes + self.left)
        if (ahead := 0 if self.causal else self.right) is not None:
            turns.append(changes - ahead)  # the one behind: without a window these are the changes themselves
        return np.concatenate(turns)

    def regions(self, q: Positions, kv: Positions) -> Regions:
        of_q, of_kv = runs_of(q), runs_of(kv)
        return self.inside.regions(q, kv) if self.in_one(of_q, of_kv) else regions_of_runs(self, [(of_q, [of_kv])])[0]

    def in_one(self, q: Runs, kv: Runs) -> bool:
        """Whether all these queries and keys are of one document, of which there is no window."""
        if self.windowed or not (q.start.size and kv.start.size):
            return False
        ends = min(q.start[0], kv.start[0]), max(q.stop[-1], kv.stop[-1]) - 1
        low, high = np.searchsorted(self.edges, ends, side="right")
        return bool(low == high)

    @property
    def inside(self) -> Mask:
        """The mask of one document, without a window."""
        return CAUSAL if self.causal else FULL

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> PackBlocks:
        return _blocks(self, layout, n)

    def pairs(self, seqlen: int, kv_seqlen: int | None = None) -> float:
        """(query, key) pairs that MFU counts: those that are seen, or by convention half a causal document's square."""
        if self.windowed:
            first, stop = self.sees(self.query_positions)
            return float((stop - first).sum())
        pairs = 0.0
        for queries, keys in zip(self.queries, self.lengths, strict=True):
            pairs += queries * (keys - queries) + queries**2 * (0.5 if self.causal else 1.0)
        return pairs

    @cached_property
    def work_of_documents(self) -> np.ndarray:
        """(query, key) pairs of each document: (documents,)."""
        return np.diff(self.work_before(self.query_edges))

    def work_before(self, positions: np.ndarray) -> np.ndarray:
        """(query, key) pairs of all queries before each one, or before the end: (positions,)."""
        if self.windowed:
            first, stop = self.sees(self.query_positions)
            return np.append(0, np.cumsum(stop - first))[positions]
        queries, keys = np.diff(self.query_edges), np.diff(self.edges)
        seen = keys - queries * self.causal
        """How many keys every query of a document sees; under a causal mask as many more as its number in it."""
        whole = np.append(0, np.cumsum(queries * seen + self.causal * (queries * (queries + 1) // 2)))
        document = np.searchsorted(self.query_edges, positions, side="right") - 1
        before = positions - self.query_edges[document]
        return whole[document] + before * np.append(seen, 0)[document] + self.causal * (before * (before + 1) // 2)

    def _filling(self, seqlen: int) -> str:
        """The change that makes the documents fill a sequence, in words: padding, or a shorter end."""
        if self.seqlen < seqlen:
            return f"one more document of {seqlen - self.seqlen} tokens as padding"
        kept = int(np.searchsorted(self.query_edges, seqlen, side="left"))
        return f"the first {kept} documents with {seqlen - int(self.query_edges[kept - 1])} tokens of the last of them"

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Raise RequestError unless the documents fill the sequence, and keys are those of their histories, too."""
        if (kv_seqlen or seqlen) != seqlen + self.cached_tokens:
            rule = f"keys are those of the seqlen={seqlen} queries and of histories of {self.cached_tokens} tokens"
            works = f"kv_seqlen={seqlen + self.cached_tokens} would work" + self.other_history
            raise RequestError(f"kv_seqlen={kv_seqlen or seqlen}", rule, works)
        if self.seqlen != seqlen:
            lengths = self.queries
            shown = ", ".join(map(str, lengths[:MOST_SHOWN])) + (", ..." if len(lengths) > MOST_SHOWN else "")
            raise RequestError(
                f"seqlen={seqlen}",
                f"the {len(self.lengths)} documents ({shown}) must fill it, and have {self.seqlen} tokens together",
                f"seqlen={self.seqlen}, or {self._filling(seqlen)}, would work",
            )

    def scaled(self, seqlen: int, unit: int = 1) -> Packed:
        """The same documents, histories and window, in proportion, in a shorter sequence; what gets no token is left
        out.
        """
        edges, kept = np.unique(
            np.round(self.query_edges * (seqlen / unit / self.seqlen)).astype(int), return_index=True
        )
        left, right = (None if x is None else round(x * seqlen / self.seqlen) for x in (self.left, self.right))
        smaller = type(self)(tuple(np.diff(edges * unit).tolist()), self.causal, left, right)
        if not self.new:
            return smaller
        # Of documents that begin at one place only the last has tokens.
        documents = [int(stop) - 1 for stop in kept[1:]]
        cached = tuple(tuple(-(-tokens * seqlen // self.seqlen) for tokens in self.cached[i]) for i in documents)
        seen = np.subtract(self.lengths, self.queries).tolist()
        most = (sum(each) for each in cached)
        of_seen = (-(-seen[i] * seqlen // self.seqlen) for i in documents)
        return smaller._behind(cached, tuple(map(min, of_seen, most)))

    def layout(self, name: str, n: int = 1, among: Sequence[str] = ()) -> Layout:
        """The layout of that name. `auto` is chosen by work, then by what ranks need of each other (EVEN_ENOUGH).

        It leaves no rank without a token where another layout gives all of them some.
        Raises RequestError for an unknown name; its message has the nearest one.
        """
        among = [*(among or (*LAYOUTS, *FOR_ANY))]
        if name == "auto":
            layouts = {each: self.layout(each) for each in among}
            among = [each for each, it in layouts.items() if it.gives_all_work(n, self.seqlen)] or among
            blocks_of = {each: self.blocks(layouts[each], n, self.seqlen) for each in among}
            enough = max(EVEN_ENOUGH, min(blocks.imbalance for blocks in blocks_of.values()))
            even = [each for each in among if blocks_of[each].imbalance <= enough]
            name = min(even, key=lambda each: blocks_of[each].remote_tokens)
        if name in LAYOUTS:
            return LAYOUTS[name]
        if name not in ASSIGNMENTS:
            raise unknown("method.layout", name, [*LAYOUTS, *ASSIGNMENTS, "auto"])
        return AssignedLayout(name, 1, TokenAssignment(self, name))


class Documents(Packed):
    """Documents, each causal or full inside, with or without a window."""

    name: ClassVar[str] = "document"
    other_history: ClassVar[str] = ", and data=lengths with data.cached says how many are before each document"


class Window(Packed):
    """A sliding window over one sequence."""

    name: ClassVar[str] = "window"

    @property
    def unlimited(self) -> Mask:
        return self.inside


class Chunked(Packed):
    """Documents of equal length; the last may be shorter."""

    name: ClassVar[str] = "chunked"

    @property
    def unlimited(self) -> Mask:
        return self.inside

    @classmethod
    def of(cls, tokens: int, seqlen: int, *, causal: bool = True, cached: Sequence[int] = ()) -> Chunked:
        """Chunks of so many tokens in a sequence of `seqlen`, behind what is `cached` of it, in stretches that were
        assigned one by one.
        """
        begun = sum(cached) % tokens
        first = min(tokens - begun, seqlen)
        whole, rest = divmod(seqlen - first, tokens)
        chunked = cls((first,) + (tokens,) * whole + (rest,) * (rest > 0), causal)
        return chunked._one_behind(tuple(cached), begun)


@lru_cache(maxsize=128)
def _blocks(mask: Packed, layout: Layout, n: int) -> PackBlocks:
    # Counting pairs takes long, and a method's variants assign alike.
    return PackBlocks(mask, layout, n, mask.seqlen, int(mask.edges[-1]))
