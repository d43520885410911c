"""One rank's share of a denoising step: its patches, and the text that all ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sp_bench.plan.problem import Problem
from sp_bench.run.sharding import positions
from sp_bench.workload.model import Model
from sp_bench.workload.tasks import noisy
from sp_bench.workload.transformer import Attend, Transformer

HeldAttend = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
"""q (B, T + S, H, D), the assigned k and v (B, S, kv_heads, D), and those that all ranks hold, (B, T, kv_heads, D) each
or none, -> (B, T + S, H, D)."""


class Latent(NamedTuple):
    """This rank's patches of a noisy latent, and what all ranks have."""

    patches_BSC: Tensor
    times_B: Tensor
    text_BTM: Tensor | None
    """Text tokens at the model's width; None for none."""


class Denoiser:
    """The model of one rank, in the compute dtype, without gradients."""

    def __init__(self, model: Model, problem: Problem, seed: int, rank: int, device: torch.device) -> None:
        """Make the same parameters on every rank. `problem.keys` says which patches are this `rank`'s."""
        self.model, self.problem, self.seed, self.device = model, problem, seed, device
        self.network = Transformer(model, problem, seed)
        self.network.to(device, self.network.compute_dtype).requires_grad_(False)
        self.places = positions(problem.layout, rank, problem.n, problem.keys.seqlen)
        of_text = torch.zeros(model.joint_tokens, dtype=self.places.dtype)  # text has no place among patches (FLUX.1)
        self._positions_S = torch.cat((of_text, self.places)).to(device)

    def latent(self, number: int) -> Latent:
        """This rank's part of latent `number`, by the seed."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        model, batch = self.model, self.problem.batch
        noised, _, times = noisy(model.outputs, batch, self.problem.keys.seqlen, generator)
        shape, text = (batch, model.text_tokens, model.width), None
        if model.text_tokens:
            text = torch.randn(shape, generator=generator, dtype=torch.float64)
            text = text.to(self.device, self.network.compute_dtype)
        return Latent(noised[:, self.places].to(self.device), times.to(self.device), text)

    @torch.no_grad()
    def predicted(self, latent: Latent, attend: HeldAttend) -> Tensor:
        """The noise that the model finds in this rank's patches: (B, S, C), in the compute dtype."""
        hidden_BSM = self.network(
            latent.patches_BSC, self._positions_S, [self._apart(attend)], "none", latent.times_B, latent.text_BTM
        )
        return F.linear(hidden_BSM, self.network.head.weight)

    def _apart(self, attend: HeldAttend) -> Attend:
        """The attention of a layer, given the keys of its text apart."""
        text = self.model.joint_tokens

        def of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            held = (k[:, :text], v[:, :text]) if text else ()
            return attend(q, k[:, text:], v[:, text:], held)

        return of_both
