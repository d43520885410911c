"""The class of `Problem.blocks` of each block of a plan on each rank: one table for all who count or cost blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.plan.blocks import Blocks
from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import Block, Chunk, Place, Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.travel import travel

BLOCKS_AT_ONCE = 512
"""Few enough that a number for each of them on all ranks fits a cache."""
FEW_CLASSES = 16
"""Up to so many, blocks are counted by class."""


@dataclass(frozen=True, eq=False)
class BlockClasses:
    """The classes of a plan's blocks in the order of its operations."""

    first: Mapping[int, int]
    """By operation that computes blocks, the row of its first one; `op.blocks` are in consecutive rows."""
    find: Callable[[np.ndarray], np.ndarray]
    """The class of each block on each of some ranks, in the smallest integers that hold it: (ranks,) -> (blocks,
    ranks)."""
    n: int
    nothing: int | None = None
    """The number that stands for a pair of chunks that the operation has nothing to do with on a rank (ops.Pairs): one
    above all classes. None if there are no such operations."""
    _on: dict[bytes, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def of(self) -> np.ndarray:
        """The class of each block on each rank: (blocks, n)."""
        return self.find(np.arange(self.n))

    def on(self, ranks: np.ndarray) -> np.ndarray:
        """The class of each block on each of some ranks: (blocks, ranks). Those of a few ranks are found without those
        of all, and kept until others are asked for.
        """
        if ranks.size == self.n:
            return self.of
        key = ranks.tobytes()
        if key not in self._on:
            self._on.clear()
            self._on[key] = self.of[:, ranks] if "of" in self.__dict__ else self.find(ranks)
        return self._on[key]

    def by_number(self, by_class: np.ndarray) -> np.ndarray:
        """A quantity of each class, (classes,), with 0 for `nothing`."""
        return by_class if self.nothing is None else np.append(by_class, by_class.dtype.type(0))

    @cached_property
    def _counts(self) -> np.ndarray:
        """How many blocks of each class each rank has, where classes are few: (classes, n)."""
        return np.stack([(self.of == kind).sum(axis=0) for kind in range(1 + int(self.of.max(initial=0)))])

    @cached_property
    def there(self) -> np.ndarray:
        """The classes that any block has on any rank."""
        few = self.of.max(initial=0) < FEW_CLASSES
        return np.flatnonzero(self._counts.any(axis=1)) if few else np.unique(self.of)

    def totals(self, by_class: np.ndarray) -> np.ndarray:
        """A quantity of each class, (classes,), added up over the blocks of each rank: (n,)."""
        by_class = self.by_number(by_class)
        if by_class.size <= FEW_CLASSES:
            return by_class[: len(self._counts)] @ self._counts
        total = np.zeros(self.of.shape[1], by_class.dtype)
        for few in self.slabs(by_class):
            total += few.sum(axis=0)
        return total

    def slabs(self, by_number: np.ndarray, rows: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """A quantity of each class (`by_number`), of all blocks or some `rows`, few at once: (blocks, n)."""
        rows = np.arange(len(self.of)) if rows is None else rows
        for start in range(0, len(rows), BLOCKS_AT_ONCE):
            yield by_number[self.of[rows[start : start + BLOCKS_AT_ONCE]]]


_CACHE: WeakKeyDictionary[Plan, dict[Hashable, BlockClasses]] = WeakKeyDictionary()


def block_classes(plan: Plan, problem: Problem) -> BlockClasses:
    """The classes of all blocks of a plan, cached; layouts that number blocks alike share them, unless the mask decides
    which pairs of chunks an operation has to do with.
    """
    known, numbering = _CACHE.setdefault(plan, {}), problem.blocks.numbering
    apart = [index for index, op in plan.gathered.items() if op.pairs != "all"]
    if numbering not in known:
        known[numbering] = _find(plan, problem)
    if apart and problem not in known:
        keep(known, problem, _without_others(known[numbering], plan, apart, problem))
    return known[problem if apart else numbering]


def _without_others(classes: BlockClasses, plan: Plan, apart: Sequence[int], problem: Problem) -> BlockClasses:
    """The classes with `nothing` in the place of pairs of which some operations compute no block."""
    nothing, degree = problem.blocks.classes, problem.layout.head_parallel
    ops = [(classes.first[index], plan.gathered[index]) for index in apart]

    def find(ranks: np.ndarray) -> np.ndarray:
        of = classes.on(ranks).astype(np.min_scalar_type(nothing))
        for first, op in ops:
            travels = travel(problem, forward=op.forward).queries.travels
            q, kv = (_owners([getattr(block, x).place for block in op.blocks], ranks) // degree for x in ("q", "kv"))
            rows = of[first : first + len(op.blocks)]
            rows[travels[q, kv] != (op.pairs == "queries")] = nothing
        return of

    return BlockClasses(classes.first, find, plan.n, nothing)


def _find(plan: Plan, problem: Problem) -> BlockClasses:
    """The classes of the blocks, of any layout with this numbering. Chunks have few places: each one's owners are found
    once.
    """
    numbers = dict[Place, int]()

    def number(chunk: Chunk) -> int:
        return numbers.setdefault(chunk.place, len(numbers))

    first, pairs = dict[int, int](), list[tuple[int, int]]()
    for index, op in plan:
        if isinstance(op, Block):
            first[index] = len(pairs)
            pairs += [(number(block.q), number(block.kv)) for block in op.blocks]
    return BlockClasses(first, partial(_found, problem.blocks, [*numbers], np.array(pairs).reshape(-1, 2)), plan.n)


def _found(blocks: Blocks, places: Sequence[Place], pairs: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The class of each block, of which `pairs` has the places of its queries and keys, on some ranks."""
    of = np.empty((len(pairs), ranks.size), np.min_scalar_type(max(blocks.classes - 1, 0)))
    owner = _owners(places, ranks.astype(np.int32))
    for start in range(0, len(pairs), BLOCKS_AT_ONCE):
        q, kv = pairs[start : start + BLOCKS_AT_ONCE].T
        of[start : start + BLOCKS_AT_ONCE] = blocks.of(owner[q], owner[kv])
    return of


def _owners(places: Sequence[Place], ranks: np.ndarray) -> np.ndarray:
    """The owners of some places on some ranks: (places, ranks)."""
    each, homes = np.empty((len(places), ranks.size), ranks.dtype), dict[Group | Grid, list[int]]()
    for row, place in enumerate(places):
        homes.setdefault(place.home, []).append(row)
    for home, rows in homes.items():
        each[rows] = home.member(ranks, np.array([places[row].index for row in rows], ranks.dtype)[:, None])
    return each


def of_held_keys(plan: Plan, problem: Problem) -> frozenset[Chunk]:
    """The outputs to which some rank adds the attention to keys that all ranks hold (mask.Joint)."""
    if not problem.mask.held:
        return frozenset()
    classes, blocks = block_classes(plan, problem), problem.blocks
    kinds = [kind for kind in range(blocks.classes) if blocks.held_of(kind)]
    return frozenset(
        block.writes[0]
        for index, op in plan
        if isinstance(op, Block)
        for row, block in enumerate(op.blocks, classes.first[index])
        if np.isin(classes.of[row], kinds).any()
    )


def of_one_region(plan: Plan, problem: Problem, written: Mapping[Chunk, int]) -> frozenset[Chunk]:
    """The gradients, of chunks with the operation that writes them, that one block makes, with one region at most on
    each rank. None of packs, whose blocks have many, or of decode steps.
    """
    if not written or problem.decodes or isinstance(problem.blocks, PackBlocks):
        return frozenset()
    classes, rows = block_classes(plan, problem), dict[Chunk, list[int]]()
    several = np.array([len(problem.blocks.regions_of(kind)) > 1 for kind in range(problem.blocks.classes)])
    for index in dict.fromkeys(written.values()):
        op = plan.ops[index]
        assert isinstance(op, Block), "blocks make partials"
        for row, block in enumerate(op.blocks, classes.first[index]):
            for chunk in block.writes:
                if written.get(chunk) == index and not chunk.tensor.is_output:
                    rows.setdefault(chunk, []).append(row)
    return frozenset(c for c, at in rows.items() if len(at) == 1 and not several[classes.of[at[0]]].any())
