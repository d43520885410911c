"""One rank's share of training a transformer: its tokens, its loss, gradients that are summed over all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.problem import Problem
from sp_bench.run.devices import clock_of
from sp_bench.run.differentiable import Differentiable, attend
from sp_bench.run.sharding import positions
from sp_bench.workload.losses import IGNORED, cross_entropy, next_tokens, squared_error
from sp_bench.workload.model import Model
from sp_bench.workload.offload import Offload
from sp_bench.workload.states import Replicated
from sp_bench.workload.tasks import noisy, tokens
from sp_bench.workload.training import Training
from sp_bench.workload.transformer import Transformer

if TYPE_CHECKING:
    from sp_bench.workload.sharded import Sharded

BETAS, EPSILON, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


class Batch(NamedTuple):
    """This rank's tokens of a batch."""

    inputs: Tensor
    """(B, S) tokens or (B, S, C) noisy patches."""
    wanted: Tensor
    """(B, S) labels or (B, S, C) noise."""
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    """Labels, or elements, of all ranks."""
    times_B: Tensor | None = None


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(
        self,
        model: Model,
        problem: Problem,
        training: Training,
        seed: int,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        sharded: bool = False,
    ) -> None:
        """Make the same parameters on every rank of the group, or a shard of them; None for one rank.

        `problem.layout` says which tokens are this `rank`'s. All ranks must call it.
        """
        self.model, self.problem, self.training, self.seed = model, problem, training, seed
        self.rank, self.device = rank, device
        self.network = Transformer(model, problem, seed)
        if sharded and group is not None:
            from sp_bench.workload.sharded import Sharded  # FSDP takes a second to import

            self.states: Replicated | Sharded = Sharded(self.network, group, device, clock_of(device))
        else:
            self.states = Replicated(self.network.to(device), group)
        self.optimizer = torch.optim.AdamW(
            self.states.parameters, training.learning_rate, BETAS, EPSILON, weight_decay=WEIGHT_DECAY
        )
        self.offload = Offload(device) if training.offload else None
        lengths = getattr(problem.mask, "lengths", None) if problem.mask.name == "document" else None
        self._lengths = lengths
        self._mine = positions(problem.layout, rank, problem.n, problem.seqlen)
        self.positions_S = _inside(self._mine, lengths).to(device)

    def batch(self, number: int) -> Batch:
        """This rank's tokens of batch `number`. Labels are shifted before tokens are assigned."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        shape = self.problem.batch, self.problem.seqlen
        if self.model.modulated:
            noised, noise, times = noisy(self.model.outputs, *shape, generator)
            mine, wanted = (x[:, self._mine].to(self.device, self.network.wide) for x in (noised, noise))
            return Batch(mine, wanted, noise.numel(), times.to(self.device))
        whole = tokens(self.training.task, self.model.outputs, *shape, generator)
        labels = next_tokens(whole, self._lengths)
        count = int((labels != IGNORED).sum())
        return Batch(whole[:, self._mine].to(self.device), labels[:, self._mine].to(self.device), count)

    def hidden(self, batch: Batch, *attentions: Differentiable) -> Tensor:
        """The hidden states of this rank's tokens: (B, S, M). What the backward needs goes to the host, if asked.

        There is one attention, or one for each kind of layers (Model.layers_by_attention).
        """
        own = map(self.states.local, self.network.parameters())
        with self.offload.hooks(own) if self.offload else nullcontext():
            return self.network(
                batch.inputs,
                self.positions_S,
                [partial(self._attend, attention) for attention in attentions],
                self.training.recompute,
                batch.times_B,
            )

    def _attend(
        self, attention: Differentiable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *matrices: Tensor
    ) -> Tensor:
        """The attention's output; sinks that were gathered in the compute dtype get that of statistics."""
        sunk = None if sinks is None else sinks.to(self.network.wide)
        return attend(q, k, v, attention, sunk, attention.latents if matrices else None, matrices)

    def loss(self, hidden_BSM: Tensor, batch: Batch) -> Tensor:
        """This rank's part of the loss: those of all ranks add up to the mean over all tokens."""
        head = self.network.head.weight
        if self.model.modulated:
            loss = squared_error(hidden_BSM, head, batch.wanted, batch.count)
        else:
            loss = cross_entropy(hidden_BSM, head, batch.wanted, batch.count, self.training.loss_chunk)
        self.states.loss.copy_(loss.detach())
        return loss

    def update(self) -> None:
        """Clip the gradients by their norm, and step the optimizer."""
        self.states.clip(CLIP)
        self.optimizer.step()

    @property
    def global_loss(self) -> float:
        """The loss of the last batch, once it is summed."""
        return float(self.states.loss)

    def step(self, number: int, *attentions: Differentiable) -> float:
        """Train on batch `number`; return its loss. All ranks must call it."""
        self.states.forget()
        batch = self.batch(number)
        self.loss(self.hidden(batch, *attentions), batch).backward()
        self.states.synchronize()
        self.update()
        return self.global_loss

    def bytes_held(self) -> dict[str, int]:
        """Bytes by kind: parameters, gradients, gathered, optimizer."""
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return {**self.states.bytes_held(), "optimizer": sum(self.states.local(x).nbytes for x in moments)}


def _inside(positions_S: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Positions within each token's own document."""
    if lengths is None:
        return positions_S
    ends = torch.tensor(lengths).cumsum(0)
    return positions_S - (ends - torch.tensor(lengths))[torch.searchsorted(ends, positions_S, right=True)]


def group_on(device: torch.device) -> dist.ProcessGroup | None:
    """A group of all ranks that sums gradients: gloo's on CPUs, a new one of NCCL. All ranks must call it."""
    if device.type == "cpu":
        return dist.group.WORLD
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    return group
