"""Parts of a Mesh-Attention tile's orders, and their costs: hops and blocks of slices, and their times.

It stands below the search for orders, their bound and the lean ones, which are ours and not the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sp_bench.plan import Tensor


class Hop(NamedTuple):
    """One hop of one slice's tensor. The hops of a tensor are equal values; their order is that round its ring."""

    slice: int
    tensor: Tensor


class Block(NamedTuple):
    """A block of one slice: row u and column v of the tile."""

    slice: int
    u: int
    v: int


@dataclass(frozen=True)
class Tensors:
    """Tensors that travel in one phase: q (rows) and kv (columns) are gathered, o (rows) and dkv (columns) reduced."""

    q: Tensor
    kv: Tensor
    o: Tensor
    dkv: Tensor | None
    """None in the forward."""


@dataclass(frozen=True)
class TileTimes:
    """A tile, with the seconds of one slice's block and of a hop of each of its tensors."""

    a: int
    b: int
    tensors: Tensors
    block_s: float
    hop_s: Mapping[Tensor, float]
    slices: int = 1

    def allowed(self, order: Sequence[Hop]) -> bool:
        """Whether each hop can be ready: a row is sent after all columns were received, a column after all rows."""
        names = self.tensors
        q, kv, o, dkv = ([0] * self.slices for _ in range(4))
        for i, name in order:
            if name == names.q:
                q[i] += 1
            elif name == names.kv:
                kv[i] += 1
            elif name == names.o:
                if kv[i] < self.b - 1 or q[i] <= o[i]:
                    return False
                o[i] += 1
            else:
                if q[i] < self.a - 1 or kv[i] <= dkv[i]:
                    return False
                dkv[i] += 1
        return True


Move = tuple[Hop | None, tuple[Block, ...]]
"""One step: at most one transfer, and the blocks that overlap it."""
