"""Parameters that are split over the ranks, by torch's own FSDP2 (torch.distributed.fsdp.fully_shard).

A layer's parameters are gathered before its forward and its backward and let go after each; its gradients are reduced
to the ranks that own them. What is outside the layers is gathered once for both. Gradients are summed, not averaged:
each rank's loss is divided by the labels of all ranks already (losses.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sp_bench.run.devices import Clock
from sp_bench.workload.collectives import Collectives, Gather, Reduce
from sp_bench.workload.states import clipping
from sp_bench.workload.transformer import Transformer


class Sharded:
    """A shard of each parameter, of its gradient and its moments on every rank."""

    def __init__(self, network: Transformer, group: dist.ProcessGroup, device: torch.device, clock: Clock) -> None:
        """Split the network's parameters, in place, and move the shards to the device. All ranks must call it."""
        self._group, self._network, self.collectives = group, network, Collectives(clock)
        mesh = DeviceMesh.from_group(group, device.type)
        precision = MixedPrecisionPolicy(
            param_dtype=network.compute_dtype, reduce_dtype=network.wide, cast_forward_inputs=False
        )
        for layer in network.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(network, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        own = self.collectives, self._gathered_bytes, device
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(Gather(*own))  # pyright: ignore[reportArgumentType]
                module.set_custom_reduce_scatter(Reduce(*own))  # pyright: ignore[reportArgumentType]
        self.parameters = list(network.parameters())
        self._loss_and_square = torch.zeros(2, dtype=network.wide, device=device)

    @property
    def loss(self) -> Tensor:
        """The loss, which is summed together with the square of the gradients' norm."""
        return self._loss_and_square[0]

    def local(self, x: Tensor) -> Tensor:
        """This rank's shard of a tensor; the tensor itself if it is not split."""
        return x.to_local() if isinstance(x, DTensor) else x

    def forget(self) -> None:
        """Begin new gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def synchronize(self) -> None:
        """Sum what FSDP leaves to be summed."""
        self._loss_and_square[1] = sum(gradient.square().sum() for gradient in self._gradients())
        dist.all_reduce(self._loss_and_square, group=self._group)

    def clip(self, most: float) -> None:
        """Scale the gradients so that their norm is at most `most`."""
        factor = clipping(self._loss_and_square[1].sqrt(), most)
        for gradient in self._gradients():
            gradient.mul_(factor)

    def gradients(self) -> list[Tensor]:
        """The whole gradient of each parameter."""
        return [p.grad.full_tensor() for p in self.parameters if isinstance(p.grad, DTensor)]

    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters, gradients, and what is gathered at one time."""
        own = sum(self.local(p).nbytes for p in self.parameters)
        gradients = sum(gradient.nbytes for gradient in self._gradients())
        return {"parameters": own, "gradients": gradients, "gathered": self.collectives.gathered_bytes}

    def _gathered_bytes(self) -> int:
        """Bytes of the parameters that are whole at the moment: FSDP puts them in the place of shards."""
        return sum(p.nbytes for p in self._network.parameters() if not isinstance(p, DTensor))

    def _gradients(self) -> list[Tensor]:
        """This rank's shards."""
        return [self.local(p.grad) for p in self.parameters if p.grad is not None]
