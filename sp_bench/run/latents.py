"""Keys and values of each head, made of a latent of their token where a block needs them: multi-head latent attention.

What ranks hold and send of a token is c_BS1W: its latent, L elements, and behind them the R rotated elements of a key
that all heads share, W = L + R (DeepSeek-V2, Liu et al. 2024, equations 9 to 19). Head h has k = [U_h c_L, c_R] and
v = V_h c_L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.contract import Forward, Gradients, Kind
from sp_bench.plan.problem import Problem

Heads = slice | Tensor
"""Some of the query heads: a slice where they are evenly apart."""
Matrices = tuple[Tensor, Tensor]
"""From latents to keys (H, D - R, L) and to values (H, V, L), of some heads."""


@dataclass(frozen=True)
class Latents:
    """The matrices from latents to keys and values, which all ranks have, and their gradients.

    Of heads of zeros (plan.padded_heads), which follow the true ones, they are zeros, and stay so: keys of these have
    no more than what all heads share, and neither scores nor values get a gradient.
    """

    to_keys: Tensor
    """(H, D - R, L), in the compute dtype."""
    to_values: Tensor
    """(H, V, L)."""
    gradients: tuple[Tensor, Tensor] | None = None
    """Their gradients by this rank's blocks, in the dtype of accumulators; None without a backward. Those of all
    tokens are the sums over ranks, as of other weights."""

    @classmethod
    def random(cls, problem: Problem, seed: int, device: torch.device, *, backward: bool = True) -> Latents | None:
        """Random matrices that keep the size of normal latents, the same on all ranks; None for other problems."""
        if problem.latent_dim is None:
            return None
        generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, problem.dtype)
        shapes = [(problem.heads, rows, problem.latent_dim) for rows in (problem.made_dim, problem.value_dim)]
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        to_keys, to_values = ((x * problem.latent_dim**-0.5).to(device, dtype) for x in drawn)
        if more := problem.padded_heads - problem.heads:
            to_keys, to_values = (torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (to_keys, to_values))
        if not backward:
            return cls(to_keys, to_values)
        wide = getattr(torch, problem.accumulate_dtype)
        return cls(to_keys, to_values, (torch.zeros_like(to_keys, dtype=wide), torch.zeros_like(to_values, dtype=wide)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a rank holds of them."""
        return (self.to_keys, self.to_values, *(self.gradients or ()))

    def hold(self, to_keys: Tensor, to_values: Tensor) -> None:
        """Take a layer's matrices, (H (D - R), L) and (H V, L), for the calls from now on, with gradients of zero."""
        for into, matrix in zip((self.to_keys, self.to_values), (to_keys, to_values), strict=True):
            into.flatten(0, 1)[: len(matrix)].copy_(matrix.detach())
        for gradient in self.gradients or ():
            gradient.zero_()

    def gradients_as(self, *matrices: Tensor) -> list[Tensor]:
        """Copies of the gradients so far, in the shapes and dtypes of the matrices that `hold` took."""
        assert self.gradients is not None, "of a backward"
        pairs = zip(self.gradients, matrices, strict=True)
        return [x.flatten(0, 1)[: len(matrix)].to(matrix.dtype, copy=True) for x, matrix in pairs]

    def copied(self) -> Latents:
        """The matrices now, on the CPU, without gradients."""
        return Latents(self.to_keys.to("cpu", copy=True), self.to_values.to("cpu", copy=True))

    def of(self, heads: Heads) -> Matrices:
        """The matrices of some query heads."""
        return self.to_keys[heads], self.to_values[heads]

    def add_gradients(self, c: Tensor, made: Tensor, dv: Tensor, heads: Heads) -> None:
        """Add to the matrices' gradients those by what is made of c_BS1W for some heads: the gradients of keys without
        their shared elements, (B, S, h, D - R), and of values, (B, S, h, V).
        """
        assert self.gradients is not None, "of a backward"
        latent = c[:, :, 0, : self.to_keys.shape[2]].flatten(0, 1)
        for gradient, by_head in zip(self.gradients, (made, dv), strict=True):
            of_heads = by_head.flatten(2).flatten(0, 1).T @ latent
            gradient[heads] += of_heads.unflatten(0, by_head.shape[2:])


def expanded(c: Tensor, matrices: Matrices) -> tuple[Tensor, Tensor]:
    """(k_BSHD, v_BSHV) of the matrices' heads, made of c_BS1W."""
    to_keys = matrices[0]
    latent, shared = c[:, :, 0].split([to_keys.shape[2], c.shape[3] - to_keys.shape[2]], dim=2)
    made, v = ((latent @ x.flatten(0, 1).T).unflatten(2, x.shape[:2]) for x in matrices)
    return torch.cat([made, shared[:, :, None].expand(-1, -1, len(to_keys), -1)], dim=3), v


def folded(made: Tensor, shared: Tensor, dv: Tensor, matrices: Matrices) -> Tensor:
    """The gradient of c_BS1W by those of the matrices' heads: of what is made of it and of what is shared of keys,
    (B, S, h, D - R) and (B, S, h, R), and of values, (B, S, h, V).
    """
    to_keys, to_values = matrices
    of_latent = made.flatten(2) @ to_keys.flatten(0, 1) + dv.flatten(2) @ to_values.flatten(0, 1)
    wide = torch.promote_types(made.dtype, torch.float32)
    return torch.cat([of_latent, shared.sum(2, dtype=wide).to(made.dtype)], dim=2)[:, :, None]


def parts_of_keys(dk: Tensor, matrices: Matrices) -> tuple[Tensor, Tensor]:
    """(the elements made of latents, those that heads share) of dk_BSHD."""
    made_dim = matrices[0].shape[1]
    made, shared = dk.split([made_dim, dk.shape[3] - made_dim], dim=3)
    return made, shared


class Expanding:
    """A block kernel that is given latents in place of keys, and makes keys and values of some heads of them."""

    def __init__(self, kernel: BlockKernel, latents: Latents, heads: Tensor, see: Callable[..., None]) -> None:
        """`heads` are the query heads of the blocks, (h,) int64. `see` is told the tensors that a call holds."""
        self.kernel = kernel
        """Computes the blocks."""
        self._latents, self._see = latents, see
        step = int(heads[1] - heads[0]) if len(heads) > 1 else 1
        first, even = int(heads[0]), bool((heads.diff() == step).all())
        self._heads: Heads = slice(first, int(heads[-1]) + 1, step) if even else heads

    def made(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """(k_BSHD, v_BSHV) of the heads, made of c_BS1W."""
        return expanded(c, self._latents.of(self._heads))

    def gradient_of_latents(self, c: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of c_BS1W by those of all that was made of it; the matrices' are added to theirs."""
        matrices = self._latents.of(self._heads)
        made, shared = parts_of_keys(dk, matrices)
        made = made.contiguous()
        dc = folded(made, shared, dv, matrices)
        self._latents.add_gradients(c, made, dv, self._heads)
        return dc

    def forward(self, q: Tensor, c: Tensor, v: Tensor, mask: Kind) -> tuple[Tensor, Tensor]:
        """As BlockKernel.forward, of c_BS1W and values of no width."""
        k, values = self.made(c)
        out, lse = self.kernel.forward(q, k, values, mask)
        self._see(c, k, values, out, lse)
        return out, lse

    def gradients(
        self, dout: Tensor, q: Tensor, c: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As BlockKernel.gradients: (dq, the gradient of c_BS1W, one of no width)."""
        k, values = self.made(c)
        dq, dk, dv = self.kernel.gradients(dout, q, k, values, out, lse, mask)
        dc = self.gradient_of_latents(c, dk, dv)
        self._see(c, k, values, dq, dk, dv, dc)
        return dq, dc, v

    def forward_of(self, mask: Kind, *of_block: object) -> Forward:
        """`forward` of blocks of one kind, as BlockKernel.forward_of."""
        return partial(self.forward, mask=mask)

    def gradients_of(self, mask: Kind, *of_block: object) -> Gradients:
        """`gradients` of blocks of one kind, as BlockKernel.gradients_of."""
        return partial(self.gradients, mask=mask)
