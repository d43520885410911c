"""Operations that a rank does by itself: blocks of attention, folds of partials, and bundles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sp_bench.plan.chunks import Chunk
from sp_bench.plan.tensors import Field
from sp_bench.plan.transfer_ops import Pairs

BLOCKS = "blocks"
"""The name of the stream that blocks and folds run on, beside the lanes."""


@dataclass(frozen=True)
class Attend:
    """One block forward: attention of chunk `q` to chunk `kv`, folded into the accumulator `o`."""

    q: Chunk
    kv: Chunk
    o: Chunk

    stream = BLOCKS

    @property
    def blocks(self) -> tuple[Attend, ...]:
        """The blocks that it computes: itself."""
        return (self,)

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.q, self.kv)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.o,)

    def __str__(self) -> str:
        return f"Attend {self.q} x {self.kv} into {self.o}"


@dataclass(frozen=True)
class AttendBackward:
    """One block backward: the gradients from chunks `odoq` and `kv`, added to the accumulators `dq` and `dkv`."""

    odoq: Chunk
    kv: Chunk
    dq: Chunk
    dkv: Chunk

    stream = BLOCKS

    @property
    def blocks(self) -> tuple[AttendBackward, ...]:
        """The blocks that it computes: itself."""
        return (self,)

    @property
    def q(self) -> Chunk:
        """The query chunk, with what its backward needs."""
        return self.odoq

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.odoq, self.kv)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.dq, self.dkv)

    def __str__(self) -> str:
        return f"AttendBackward {self.odoq} x {self.kv} into {self.dq}, {self.dkv}"


@dataclass(frozen=True)
class _Blocks:
    """Several blocks as one operation: each of its query chunks has a block with each of its key chunks."""

    blocks: tuple[Attend, ...] | tuple[AttendBackward, ...]

    stream = BLOCKS

    @property
    def forward(self) -> bool:
        """Whether its blocks are those of a forward."""
        return isinstance(self.blocks[0], Attend)

    @cached_property
    def queries(self) -> tuple[Chunk, ...]:
        """The query chunks, in the order of their concatenation."""
        return tuple(dict.fromkeys(block.q for block in self.blocks))

    @cached_property
    def keys(self) -> tuple[Chunk, ...]:
        """The key chunks, in the order of their concatenation."""
        return tuple(dict.fromkeys(block.kv for block in self.blocks))

    @cached_property
    def reads(self) -> tuple[Chunk, ...]:
        return (*self.queries, *self.keys)

    @cached_property
    def writes(self) -> tuple[Chunk, ...]:
        return tuple(dict.fromkeys(chunk for block in self.blocks for chunk in block.writes))

    def __str__(self) -> str:
        queries, keys, written = (", ".join(map(str, x)) for x in (self.queries, self.keys, self.writes))
        return f"{type(self.blocks[0]).__name__} ({queries}) x ({keys}) into {written}"


@dataclass(frozen=True)
class Fused(_Blocks):
    """Several blocks as one: attention of query chunks, end to end, to key chunks, end to end.

    What the mask leaves of them is computed by as few kernel calls as possible (plan.union), and each call's result is
    folded once into each chunk that it belongs to.
    """


@dataclass(frozen=True)
class Gathered(_Blocks):
    """Blocks of one query chunk with all key rows that GroupCasts brought, or with the rank's own: in few calls, for
    each of some slices of its heads. Or of all query rows that they brought with the rank's own keys, backward as doq.

    What they brought is put in the order of its positions, so that rows of a document are one run (plan.casts).
    """

    pairs: Pairs = "all"
    """The pairs of chunks that it computes blocks of."""

    @property
    def brought(self) -> tuple[Chunk, ...]:
        """The chunks of which a GroupCast brought rows, or the rank's own keys."""
        return self.queries if self.pairs == "queries" else self.keys

    @property
    def rank_own(self) -> Chunk:
        """The rank's own chunk that all its blocks have: of queries, or of keys where queries were brought."""
        return self.keys[0] if self.pairs == "queries" else self.queries[0]


@dataclass(frozen=True)
class Fold:
    """Merge an arrived partial into the accumulator `into`: weighted by the lse for an output, a sum for a gradient."""

    part: Chunk
    into: Chunk

    stream = BLOCKS

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.part,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.into,)

    def __str__(self) -> str:
        return f"Fold {self.part} into {self.into}"


@dataclass(frozen=True)
class Bundle:
    """Combine the fields of several chunks into one chunk, such as q_h, o_h and do_h into odoq_h. Copies nothing."""

    parts: tuple[Chunk, ...]
    into: Chunk

    stream = BLOCKS

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return self.parts

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.into,)

    def __str__(self) -> str:
        return f"Bundle {', '.join(map(str, self.parts))} as {self.into}"


@dataclass(frozen=True)
class RowSums(Bundle):
    """Put rowsum(dO * O) in the place of O (odoq -> doq), or in its place an O that has these row sums (doq -> odoq).

    The backward depends on O by its row sums alone. The O that is put there is the projection of O on dO, row by row:
    delta / |dO|^2 * dO. Other fields are not copied.
    """

    @property
    def made(self) -> tuple[Field, ...]:
        """The fields that are computed."""
        given = {field.name for part in self.parts for field in part.tensor.fields}
        return tuple(field for field in self.into.tensor.fields if field.name not in given)

    def __str__(self) -> str:
        return f"RowSums {', '.join(map(str, self.parts))} as {self.into}"


@dataclass(frozen=True)
class Join:
    """A local barrier of one rank: all operations before it end before any after it starts (a paper's lock-step)."""

    stream = BLOCKS
    reads: tuple[Chunk, ...] = ()
    writes: tuple[Chunk, ...] = ()

    def __str__(self) -> str:
        return "Join"
