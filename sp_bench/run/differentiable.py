"""An attention of a rank as one differentiable function of torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_bench.run.engine import Saved
from sp_bench.run.latents import Latents
from sp_bench.run.partials import Tensors


class Differentiable(Protocol):
    """An attention and its gradients: an Engine, or something around one."""

    @property
    def latents(self) -> Latents | None:
        """The matrices that make keys where latents travel."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Saved]:
        """(out_BSHD, what the backward needs of it)."""
        ...

    def backward(self, dout: Tensor, saved: Saved, /) -> tuple[Tensor, ...]:
        """The gradients of q, k and v, and of what else it took."""
        ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    engine: Differentiable,
    sinks: Tensor | None = None,
    latents: Latents | None = None,
    matrices: Tensors = (),
) -> Tensor:
    """The engine's attention of this rank's tokens, differentiable in q, k and v; all are (B, S, heads, D).

    `sinks`, (H,), are for an Engine alone, in the dtype of statistics. Where k has latents, `latents` are the engine's,
    and `matrices`, (H (D - R), L) and (H V, L), make keys and values of them: it is differentiable in these too, whose
    gradients on all ranks add up to the whole ones.
    """
    return _Attention.apply(q, k, v, sinks, engine, latents, *matrices)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        engine: Any,
        latents: Latents | None,
        *matrices: Tensor,
    ) -> Tensor:
        if latents:
            latents.hold(*matrices)
        out, saved = engine.forward(q, k, v) if sinks is None else engine.forward(q, k, v, sinks=sinks)
        ctx.save_for_backward(*matrices, *(x for tensors in saved.values() for x in tensors))
        ctx.engine, ctx.latents, ctx.matrices = engine, latents, len(matrices)
        ctx.names = {name: len(tensors) for name, tensors in saved.items()}
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        matrices = tuple(itertools.islice(tensors, ctx.matrices))
        saved = {name: tuple(itertools.islice(tensors, count)) for name, count in ctx.names.items()}
        if ctx.latents:
            ctx.latents.hold(*matrices)
        gradients = ctx.engine.backward(grad_outputs[0], saved)
        of_matrices = ctx.latents.gradients_as(*matrices) if ctx.latents else ()
        return (*gradients, *[None] * (6 - len(gradients)), *of_matrices)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile of a caller must take it: whole, since it can't trace plans.

    As long as nobody has imported torch._dynamo, nothing is traced; importing it takes a second.
    """
    untraced: Any = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
    return untraced
