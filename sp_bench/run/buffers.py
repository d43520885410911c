"""Receive and staging buffers shared by forward and backward, which never run at the same time."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.lower import Lowering, ReceiveBuffer, StagingUse, TensorSpec
from sp_bench.run.partials import Tensors
from sp_bench.run.transport import Transport


class Buffers:
    """A pool of tensors by shape and dtype. Every plan takes from the start of each list, so plans share tensors."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        """`transport` makes the tensors, in memory that suits it."""
        self._device, self._transport = device, transport
        self._made: dict[TensorSpec, list[Tensor]] = {}

    def of(self, lowering: Lowering) -> tuple[dict[ReceiveBuffer, Tensors], dict[StagingUse, Tensors]]:
        """Return the tensors of a plan's receive buffers and of its staging buffers."""
        taken: dict[TensorSpec, int] = {}

        def tensors(specs: tuple[TensorSpec, ...]) -> Tensors:
            return tuple(self._take(spec, taken) for spec in specs)

        receiving: dict[ReceiveBuffer, Tensors] = {}
        for row, specs in lowering.allocations():
            made = tensors(specs)
            receiving |= {b: tuple(x[i] for x in made) if len(row) > 1 else made for i, b in enumerate(row)}
        staging = {use: tensors(specs) for use, specs in lowering.staging_buffers.items()}
        self._transport.allocated()
        return receiving, staging

    def tensors(self) -> list[Tensor]:
        """Return every tensor allocated so far."""
        return [tensor for made in self._made.values() for tensor in made]

    def _take(self, spec: TensorSpec, taken: dict[TensorSpec, int]) -> Tensor:
        made, number = self._made.setdefault(spec, []), taken.get(spec, 0)
        taken[spec] = number + 1
        if number == len(made):
            # Never inference tensors: lanes write to these buffers, and later calls may train.
            with torch.inference_mode(False):
                made.append(self._transport.empty(spec.shape, getattr(torch, spec.dtype), self._device))
        return made[number]
