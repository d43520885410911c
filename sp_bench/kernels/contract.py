"""The contract of a block kernel.

Shapes: q_BSHD and out_BSHD are (batch, tokens, heads, head_dim), k and v have kv_heads, lse_BHS is (batch, heads,
tokens). heads must be a multiple of kv_heads; query head h attends to key head h // (heads / kv_heads). Values, outputs
and their gradients may have fewer elements a head than keys. Where a backend doesn't take the two widths they are
padded with zeros: it changes no result, and takes as long as wide values do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sp_bench.kernels.entries import Entries
from sp_bench.kernels.pieces import Ends, Pieces
from sp_bench.kernels.row_sums import statistics_dtype
from sp_bench.plan.regions import Region, RegionKind

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(out_BSHD, lse_BHS) of q, k and v."""
Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(dq, dk, dv) of dout, q, k, v, out and lse."""
Kind = RegionKind | Pieces
"""The kind of a block, or several pieces of one: then all tensors are gathered, and so are results."""


class BlockKernel(ABC):
    """Attention of one block of queries to one block of keys, forward and backward.

    A backend implements FULL and CAUSAL on at least one token (`_forward`, `_backward`). STRICT, UPPER, empty blocks
    and rows that saw no key are handled here, since backends disagree on them.
    """

    name: ClassVar[str]
    packages: ClassVar[Mapping[str, str]] = {}
    """The modules besides torch's that it calls, with the distribution that each is installed by."""
    published_as: ClassVar[str] = ""
    """The kernel with the same code, whose published figures are this one's too."""
    narrow: ClassVar[frozenset[tuple[int, int]]] = frozenset()
    """The widths (of keys, of values) that the backend takes as they are, besides equal ones."""
    persistent_on: ClassVar[tuple[int, ...]] = ()
    """The major compute capabilities on which its kernel of FULL blocks holds SMs from its start to its end."""
    has_margin: ClassVar[bool] = False
    """Whether its persistent kernels leave `sm_margin` SMs free."""
    sm_margin: int = 0
    """SMs that its kernels leave to transfers, if it `has_margin`."""
    in_pages: ClassVar[bool] = False
    """Whether it is a PagedKernel that has keys in pages alone: those that lie one behind the other are pages of one
    token."""
    decodes: bool = False
    """Whether its calls are those of decode steps: few rows, and long caches that a kernel may cut into parts."""
    notes: tuple[str, ...] = ()
    """Notes on its choice for a reader of its times."""

    @classmethod
    @abstractmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        """Why the backend can't run forward and backward here; empty if it can.

        `device` is cpu or cuda. The backend itself checks the GPU and the installed packages.
        """

    @classmethod
    def refuses_caches(cls, device: str, dtype: str, head_dim: int, value_dim: int) -> str:
        """Why the backend can't run decode steps here, with keys and values of such widths; empty if it can."""
        return cls.refuses(device, dtype, head_dim)

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        """Whether it reads pages of so many tokens as they lie: a PagedKernel may."""
        return False

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Kind) -> tuple[Tensor, Tensor]:
        """(out_BSHD in q's dtype, lse_BHS) of scores scaled by 1/sqrt(head_dim).

        The lse is a natural logarithm, in fp32 (fp64 where q is fp64). On a GPU it is contiguous, so that what a
        lane sends is there when the block has ended; on a CPU it may have any strides.

        A row that saw no key is out = 0, lse = -inf. All kinds but FULL need as many keys as queries.
        """
        if v.shape[3] < k.shape[3] and self.pads(k.shape[3], v.shape[3]):
            out, lse = self.forward(q, k, _padded(v, k), mask)
            return _narrowed(out, v), lse
        if isinstance(mask, Pieces):
            return self._forward_pieces(q, k, v, mask)
        _square(q, k, mask)
        if mask is RegionKind.UPPER:
            out, lse = self.forward(q.flip(1), k.flip(1), v.flip(1), RegionKind.CAUSAL)
            return out.flip(1), lse.flip(2)
        if mask is not RegionKind.STRICT and q.shape[1] and k.shape[1]:
            return self._forward(q, k, v, mask is RegionKind.CAUSAL)
        out, lse = empty_output(q, width=v.shape[3])
        rows, columns = _seen(q, k, mask)
        if rows.stop > rows.start and columns.stop > columns.start:
            out[:, rows], lse[:, :, rows] = self._forward(q[:, rows], k[:, columns], v[:, columns], True)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this block, given the *global* out and lse of its rows; shapes and dtypes of q, k, v."""
        return self.gradients(dout, q, k, v, out, harmless(lse), mask)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward`, given an lse that is `harmless`, which rows of many blocks need but once."""
        if v.shape[3] < k.shape[3] and self.pads(k.shape[3], v.shape[3]):
            dq, dk, dv = self.gradients(_padded(dout, q), q, k, _padded(v, k), _padded(out, q), lse, mask)
            return dq, dk, _narrowed(dv, v)
        if isinstance(mask, Pieces):
            grads = self._gradients_of_pieces(dout, q, k, v, out, lse, mask)
            dq, dk, dv = (grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
            return dq, dk, dv
        _square(q, k, mask)
        if mask is RegionKind.UPPER:
            dout, q, k, v, out = (x.flip(1) for x in (dout, q, k, v, out))
            dq, dk, dv = self.gradients(dout, q, k, v, out, lse.flip(2), RegionKind.CAUSAL)
            return dq.flip(1), dk.flip(1), dv.flip(1)
        if mask is not RegionKind.STRICT and q.shape[1] and k.shape[1]:
            return self._backward(dout, q, k, v, out, lse, mask is RegionKind.CAUSAL)
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
        rows, columns = _seen(q, k, mask)
        if rows.stop > rows.start and columns.stop > columns.start:
            parts = self._backward(
                dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows], True
            )
            for grad, part, part_slice in zip(grads, parts, (rows, columns, columns), strict=True):
                grad[:, part_slice] = part
        return grads[0], grads[1], grads[2]

    def forward_of(self, mask: Kind, queries: int, keys: int, dims: tuple[int, int]) -> Forward:
        """`forward` of blocks of one kind and size, with heads of `dims` (of keys, of values) elements: the backend's
        own function, where nothing is to be done beside it.
        """
        forward = self.forward
        if getattr(forward, "__func__", None) is BlockKernel.forward and self._is_plain(mask, queries, keys, dims):
            return partial(self._forward, causal=mask is RegionKind.CAUSAL)
        return lambda q, k, v: forward(q, k, v, mask)

    def gradients_of(self, mask: Kind, queries: int, keys: int, dims: tuple[int, int]) -> Gradients:
        """`gradients`, as `forward_of` has `forward`."""
        gradients = self.gradients
        if getattr(gradients, "__func__", None) is BlockKernel.gradients and self._is_plain(mask, queries, keys, dims):
            return partial(self._backward, causal=mask is RegionKind.CAUSAL)
        return lambda dout, q, k, v, out, lse: gradients(dout, q, k, v, out, lse, mask)

    def _is_plain(self, mask: Kind, queries: int, keys: int, dims: tuple[int, int]) -> bool:
        """Whether a block is one call of the backend, on the tensors as they are."""
        square = mask is RegionKind.CAUSAL and queries == keys
        return (mask is RegionKind.FULL or square) and queries > 0 and keys > 0 and not self.pads(*dims)

    def pads(self, head_dim: int, value_dim: int) -> bool:
        """Whether values of that width are computed as wide as keys."""
        return value_dim < head_dim and (head_dim, value_dim) not in self.narrow

    def takes_varlen(self, head_dim: int) -> bool:
        """Whether it takes pieces of different sizes in one call: a VarlenKernel may."""
        return False

    def _forward_pieces(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """`forward` of pieces, and values of a width that the backend takes: here of equal pieces, as a batch."""
        out, lse = self._forward(_stacked(q, pieces), _stacked(k, pieces), _stacked(v, pieces), pieces.causal)
        return out.reshape(*q.shape[:3], v.shape[3]), _in_line(lse, pieces)

    def _gradients_of_pieces(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pieces: Pieces
    ) -> tuple[Tensor, ...]:
        """(dq, dk, dv) of pieces, as `_forward_pieces` has them, in any shape."""
        dout, q, k, v, out = (_stacked(x, pieces) for x in (dout, q, k, v, out))
        lse = lse.unflatten(2, (len(pieces.regions), -1)).transpose(1, 2).flatten(0, 1)
        return self._backward(dout, q, k, v, out, lse, pieces.causal)


class PagedKernel(BlockKernel):
    """A kernel of decode steps that is told in which pages of a pool keys lie."""

    @abstractmethod
    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        """`forward` of entries, each of which sees its own pages: (out_ERHD, lse_EHR) of q_ERHD.

        k and v are pools, (pages, tokens, heads, D), with any numbers where no key is. Values are as wide as keys.
        """


class VarlenKernel(BlockKernel):
    """A kernel that takes pieces of different sizes in one call."""

    def takes_varlen(self, head_dim: int) -> bool:
        return True

    def _forward_pieces(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        if not self.takes_varlen(q.shape[3]):
            return super()._forward_pieces(q, k, v, pieces)
        out, lse = self._forward_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), pieces.ends(len(q)))
        return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()

    def _gradients_of_pieces(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pieces: Pieces
    ) -> tuple[Tensor, ...]:
        if not self.takes_varlen(q.shape[3]):
            return super()._gradients_of_pieces(dout, q, k, v, out, lse, pieces)
        ends, lse = pieces.ends(len(q)), lse.transpose(0, 1).flatten(1).contiguous()
        dout, q, k, v, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
        return self._backward_varlen(dout, q, k, v, out, lse, ends)

    @abstractmethod
    def _forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """(out_THD, lse_HT) of q_THD, k and v, in which the pieces of all batch entries stand one behind the other."""

    @abstractmethod
    def _backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), as `_forward_varlen` has its tensors."""


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """x with zeros behind the elements of each head, up to as many as another tensor has."""
    return torch.nn.functional.pad(x, (0, like.shape[-1] - x.shape[-1]))


def _narrowed(x: Tensor, like: Tensor) -> Tensor:
    """x without the elements of each head beyond those of another tensor."""
    return x[..., : like.shape[-1]].contiguous()


def _stacked(x: Tensor, pieces: Pieces) -> Tensor:
    """Gathered pieces of one size as a batch: (B, P * S, H, D) -> (B * P, S, H, D)."""
    return x.unflatten(1, (len(pieces.regions), -1)).flatten(0, 1)


def _in_line(lse: Tensor, pieces: Pieces) -> Tensor:
    """The statistics of a batch of pieces, gathered and contiguous: (B * P, H, S) -> (B, H, P * S)."""
    return lse.unflatten(0, (-1, len(pieces.regions))).transpose(1, 2).flatten(2).contiguous()


def empty_output(q: Tensor, *, width: int | None = None) -> tuple[Tensor, Tensor]:
    """(out_BSHD, lse_BHS) of rows that saw no key, 0 and -inf: the neutral element of a fold. `width` is that of
    values, if they are narrower.
    """
    batch, tokens, heads, _ = q.shape
    out = torch.zeros((*q.shape[:3], width or q.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.full((batch, heads, tokens), -math.inf, dtype=statistics_dtype(q), device=q.device)


def heads_first(x_BSHD: Tensor) -> Tensor:
    """x as a (B, H, S, D) view with head_dim contiguous, as torch's kernels need; other strides are free."""
    return (x_BSHD if x_BSHD.stride(3) == 1 else x_BSHD.contiguous()).transpose(1, 2)


def _seen(q: Tensor, k: Tensor, mask: RegionKind) -> tuple[slice, slice]:
    """The queries that see any key, and the keys that any query sees."""
    region = Region(mask, range(q.shape[1]), range(k.shape[1])).plain
    return slice(region.q.start, region.q.stop), slice(region.kv.start, region.kv.stop)


def _square(q: Tensor, k: Tensor, mask: RegionKind) -> None:
    # Backends align a causal mask to different corners of a block that is not square.
    if mask is not RegionKind.FULL and q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: a {mask.value} block must be square")


def harmless(lse: Tensor) -> Tensor:
    """The lse with -inf as +inf: exp(score - lse) is then 0 in a row that saw no key, not NaN."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)
