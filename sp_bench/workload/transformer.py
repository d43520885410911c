"""A transformer in plain torch whose attention is injected, so that any method computes it.

Shapes: B batch, S the rank's tokens, M width, H heads, D head_dim, F ffn, T text tokens. Parameters are fp32 (fp64 if
the compute dtype is) and are cast where they are used. Sharded ones are gathered in the compute dtype (sharded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from sp_bench.plan.problem import Problem
from sp_bench.run.latents import expanded
from sp_bench.workload.model import Model

Attend = Callable[..., Tensor]
"""q (B, S, H, D), k and v (B, S, kv_heads, D), and sinks (H,) if there are some -> (B, S, H, D). Where latents travel,
k has them and v no elements; sinks, or None, are followed by the matrices that make keys and values (run.attention).
"""
Recompute = Literal["none", "attention", "full"]
"""The part that the backward computes again. none: nothing. attention: all but the attention, whose inputs and output
are kept. full: all of a layer but its input, with the attention and its transfers."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "attention", "full")
EPSILON, TIMES = 1e-5, 1000.0


class Linear(nn.Linear):
    """A matrix that is cast to its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class RMSNorm(nn.Module):
    """x / rms(x), scaled; computed in fp32 at least, whatever dtype the weight has been gathered in."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(width, dtype=dtype)), dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.wide), self.weight.shape, self.weight.to(self.wide), EPSILON).to(x.dtype)


def rotary(positions_S: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of the angles of RoPE (Su et al. 2021) at these positions: (2, S, 1, D / 2)."""
    rates = theta ** -(torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float64) / head_dim)
    angles_S1D = (positions_S.double()[:, None] * rates)[:, None, :]
    return torch.stack((angles_S1D.cos(), angles_S1D.sin())).to(dtype)


def rotated(x_BSHD: Tensor, rotary_2S1D: Tensor) -> Tensor:
    """x with its halves rotated as pairs."""
    cos, sin = rotary_2S1D
    first, second = x_BSHD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    q_down: Linear
    kv_down: Linear
    k_up: Linear
    v_up: Linear
    cross_q: Linear
    cross_k: Linear
    cross_v: Linear
    cross_o: Linear

    def __init__(self, model: Model, problem: Problem, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.modulated = problem.head_dim, model.modulated
        self.latents_travel, self.kv_rope = bool(problem.latent_dim), model.kv_rope
        for name, (inputs, outputs) in model.layer_matrices(problem).items():
            self.add_module(name, Linear(inputs, outputs, bias=False, dtype=dtype))
        for name, (inputs, outputs) in model.text_matrices(problem).items():
            self.add_module(name, Linear(inputs, outputs, bias=False, dtype=dtype))
        self.modulation = None
        if model.modulated and model.modulation == "layer":
            self.modulation = Linear(model.width, 6 * model.width, dtype=dtype)
        elif model.modulated:
            self.modulation_bias = nn.Parameter(torch.zeros(6 * model.width, dtype=dtype))
        else:
            self.norms = nn.ModuleList(RMSNorm(model.width, dtype) for _ in range(2))
        self.q_norm = RMSNorm(model.q_latent, dtype) if model.q_latent else None
        self.kv_norm = RMSNorm(model.kv_latent, dtype) if model.kv_latent else None
        self.sinks = nn.Parameter(torch.zeros(problem.heads, dtype=dtype)) if model.sinks else None

    def forward(
        self,
        x_BSM: Tensor,
        rotary_2S1D: Tensor,
        time_BM: Tensor | None,
        attend: Attend,
        recompute: Recompute,
        text_BTM: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, (B, S, M). It keeps for the backward what `recompute` leaves.

        `time_BM` is the embedding of the diffusion time or, where layers share the matrix of modulations, its product,
        (B, 6 M). `text_BTM` is what its cross-attention sees.
        """
        beside = () if self.sinks is None else (self.sinks,)
        if self.latents_travel:
            beside = (self.sinks, self.k_up.weight, self.v_up.weight)

        def whole(x_BSM: Tensor) -> Tensor:
            return self.rest(x_BSM, attend(*self.heads(x_BSM, rotary_2S1D, time_BM), *beside), time_BM, text_BTM)

        if recompute == "none":
            return whole(x_BSM)
        if recompute == "full":
            return _again(whole, x_BSM)
        q, k, v = _again(self.heads, x_BSM, rotary_2S1D, time_BM)
        return _again(self.rest, x_BSM, attend(q, k, v, *beside), time_BM)

    def heads(self, x_BSM: Tensor, rotary_2S1D: Tensor, time_BM: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, S, heads, D) each, with positions; where latents travel k has these, and v no elements."""
        x_BSM = self._normed(x_BSM, time_BM, 0)
        if self.kv_norm is not None:
            return self._heads_of_latents(x_BSM, self.kv_norm, rotary_2S1D)
        q, k, v = (matrix(x_BSM).unflatten(-1, (-1, self.head_dim)) for matrix in (self.q, self.k, self.v))
        return rotated(q, rotary_2S1D), rotated(k, rotary_2S1D), v

    def _heads_of_latents(self, x_BSM: Tensor, kv_norm: RMSNorm, rotary_2S1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of a normed hidden state, by way of latents (Liu et al. 2024, equations 9 to 19 and 37 to 47)."""
        of_queries = x_BSM if self.q_norm is None else self.q_norm(self.q_down(x_BSM))
        q = self.q(of_queries).unflatten(-1, (-1, self.head_dim))
        plain, turned = q.split([self.head_dim - self.kv_rope, self.kv_rope], -1)
        q = torch.cat((plain, rotated(turned, rotary_2S1D)), -1)
        latent, shared = self.kv_down(x_BSM)[:, :, None].split([self.k_up.in_features, self.kv_rope], -1)
        c_BS1W = torch.cat((kv_norm(latent), rotated(shared, rotary_2S1D)), -1)
        if self.latents_travel:
            return q, c_BS1W, c_BS1W[..., :0]
        of_heads = (matrix.weight.to(x_BSM.dtype).unflatten(0, (q.shape[2], -1)) for matrix in (self.k_up, self.v_up))
        return q, *expanded(c_BS1W, tuple(of_heads))  # pyright: ignore[reportArgumentType]  # they are two

    def rest(self, x_BSM: Tensor, out_BSHD: Tensor, time_BM: Tensor | None, text_BTM: Tensor | None = None) -> Tensor:
        """The layer's output, given its input and the attention of its heads."""
        x_BSM = x_BSM + self._gated(self.o(out_BSHD.flatten(2)), time_BM, 0)
        if text_BTM is not None:
            x_BSM = x_BSM + self._crossed(x_BSM, text_BTM)
        y_BSM = self._normed(x_BSM, time_BM, 1)
        if self.modulated:
            y_BSF = F.gelu(self.up(y_BSM), approximate="tanh")
        else:
            y_BSF = F.silu(self.gate(y_BSM)) * self.up(y_BSM)
        return x_BSM + self._gated(self.down(y_BSF), time_BM, 1)

    def _crossed(self, x_BSM: Tensor, text_BTM: Tensor) -> Tensor:
        """The cross-attention from tokens to text, which is the same whoever else holds the text."""
        y_BSM = F.layer_norm(x_BSM, x_BSM.shape[-1:], eps=EPSILON)
        given = ((self.cross_q, y_BSM), (self.cross_k, text_BTM), (self.cross_v, text_BTM))
        q, k, v = (matrix(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for matrix, x in given)
        out_BHSD = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return self.cross_o(out_BHSD.transpose(1, 2).flatten(2))

    def _normed(self, x_BSM: Tensor, time_BM: Tensor | None, which: int) -> Tensor:
        if time_BM is None:
            return self.norms[which](x_BSM)
        shift, scale, _ = self._modulations(time_BM, which)
        return F.layer_norm(x_BSM, x_BSM.shape[-1:], eps=EPSILON) * (1 + scale) + shift

    def _gated(self, y_BSM: Tensor, time_BM: Tensor | None, which: int) -> Tensor:
        return y_BSM if time_BM is None else y_BSM * self._modulations(time_BM, which)[2]

    def _modulations(self, time_BM: Tensor, which: int) -> tuple[Tensor, ...]:
        """shift, scale and gate of one half of the layer, (B, 1, M) each."""
        if self.modulation is None:
            modulations = time_BM + self.modulation_bias.to(time_BM.dtype)
        else:
            modulations = self.modulation(F.silu(time_BM))
        return modulations[:, None].chunk(6, dim=-1)[3 * which : 3 * which + 3]


class Transformer(nn.Module):
    """Embedding, layers, and the norm before the head. `head` is applied by the loss."""

    def __init__(self, model: Model, problem: Problem, seed: int) -> None:
        """Parameters are the same on all ranks, by `seed`."""
        super().__init__()
        self.model, self.problem = model, problem
        self.compute_dtype = getattr(torch, problem.dtype)
        self.wide = dtype = torch.float64 if self.compute_dtype is torch.float64 else torch.float32
        if model.modulated:
            self.embed = Linear(model.outputs, model.width, bias=False, dtype=dtype)
            self.time = nn.ModuleList(Linear(model.width, model.width, dtype=dtype) for _ in range(2))
            self.modulation = Linear(model.width, 2 * model.width, dtype=dtype)
            if model.modulation == "shared":
                self.modulations = Linear(model.width, 6 * model.width, bias=False, dtype=dtype)
        else:
            self.embed = nn.Embedding(model.outputs, model.width, dtype=dtype)
            self.norm = RMSNorm(model.width, dtype)
        self.layers = nn.ModuleList(Layer(model, problem, dtype) for _ in range(model.layers))
        self.head = Linear(model.width, model.outputs, bias=False, dtype=dtype)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Normal: tokens and sinks of deviation 1, matrices of 0.02, over the root of their number where they end a
        residual.

        Tokens of 0.02 before a norm would make gradients 50 times as large, and the training's rounding errors grow.
        """
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim > 1:
                    ends = name.endswith(("o.weight", "down.weight"))
                    deviation = 0.02 / (2 * len(self.layers)) ** 0.5 if ends else 0.02
                    if weight is self.embed.weight and not self.model.modulated:
                        deviation = 1.0
                    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * deviation)
                elif name.endswith("bias"):
                    weight.zero_()
                elif name.endswith("sinks"):
                    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))

    def forward(
        self,
        inputs: Tensor,
        positions_S: Tensor,
        attends: Sequence[Attend],
        recompute: Recompute,
        times_B: Tensor | None = None,
        text_BTM: Tensor | None = None,
    ) -> Tensor:
        """The hidden states before the head, (B, S, M), of tokens (B, S) or patches (B, S, channels).

        Each layer has one of the attentions `attends` (Model.attention_of). Text that is joint goes through the layers
        before the patches. `positions_S` and attentions are for both then.
        """
        embedded = self.embed(inputs if times_B is None else inputs.to(self.compute_dtype))
        x_BSM, time_BM = embedded.to(self.compute_dtype), None if times_B is None else self._time(times_B)
        joint = self.model.joint_tokens if text_BTM is not None else 0
        x_BSM = torch.cat((text_BTM, x_BSM), 1) if joint and text_BTM is not None else x_BSM
        crossed, of_layers = (text_BTM if self.model.crosses else None), time_BM
        if time_BM is not None and self.model.modulation == "shared":
            of_layers = self.modulations(F.silu(time_BM))
        rotary_2S1D = rotary(positions_S, self.model.kv_rope or self.problem.head_dim, self.model.rope_theta, self.wide)
        for number, layer in enumerate(self.layers):
            attend = attends[self.model.attention_of(number)]
            x_BSM = layer(x_BSM, rotary_2S1D, of_layers, attend, recompute, crossed)
        x_BSM = x_BSM[:, joint:]
        if time_BM is None:
            return self.norm(x_BSM)
        shift, scale = self.modulation(F.silu(time_BM))[:, None].chunk(2, dim=-1)
        return F.layer_norm(x_BSM, x_BSM.shape[-1:], eps=EPSILON) * (1 + scale) + shift

    def _time(self, times_B: Tensor) -> Tensor:
        """The embedding of diffusion times in 0 .. 1: (B, M)."""
        half = self.model.width // 2
        rates = 1e4 ** -(torch.arange(half, device=times_B.device, dtype=torch.float64) / half)
        angles = TIMES * times_B.double()[:, None] * rates
        waves_BM = F.pad(torch.cat((angles.cos(), angles.sin()), dim=-1), (0, self.model.width % 2))
        first, second = self.time
        return second(F.silu(first(waves_BM.to(self.compute_dtype))))


def _again(function: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """The function's result, of which the backward computes again what it needs."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
