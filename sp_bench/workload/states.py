"""Parameters and gradients that every rank has in whole, summed over the ranks by one all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 * 2**20
"""Gradients are summed in messages of at most so many bytes."""


class Replicated:
    """All parameters on every rank. Gradients are views of one buffer whose last element is the loss: this rank's part
    until `synchronize`, which all ranks must call. Sharded (sharded.py) has the same attributes and methods.
    """

    def __init__(self, network: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Make gradients for the parameters. `group` has the ranks that share the sequence; None for one rank."""
        self.parameters, self._group = list(network.parameters()), group
        first = self.parameters[0]
        size = sum(p.numel() for p in self.parameters) + 1
        self._summed = torch.zeros(size, dtype=first.dtype, device=first.device)
        begin = 0
        for parameter in self.parameters:
            parameter.grad = self._summed[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()

    @property
    def loss(self) -> Tensor:
        """The last element of the buffer."""
        return self._summed[-1]

    @property
    def collectives(self) -> None:
        """None: gradients are summed in the update."""

    def local(self, x: Tensor) -> Tensor:
        """All of it."""
        return x

    def forget(self) -> None:
        """Begin new gradients, all zero."""
        self._summed.zero_()

    def synchronize(self) -> None:
        """Sum the gradients and the loss, a bucket at a time."""
        if self._group is not None:
            for bucket in self._summed.split(BUCKET_BYTES // self._summed.element_size()):
                dist.all_reduce(bucket, group=self._group)

    def clip(self, most: float) -> None:
        """Scale the gradients so that their norm is at most `most`."""
        gradients = self._summed[:-1]
        gradients.mul_(clipping(gradients.norm(), most))

    def gradients(self) -> list[Tensor]:
        """The whole gradient of each parameter."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters, gradients, and what is gathered at one time."""
        return {"parameters": sum(p.nbytes for p in self.parameters), "gradients": self._summed.nbytes, "gathered": 0}


def clipping(norm: Tensor, most: float) -> Tensor:
    """The factor that makes a norm at most `most`; 1 where there is nothing to scale."""
    return (most / norm).clamp(max=1.0).nan_to_num(1.0)
