"""Buffers that the phases of one problem share: a forward and a backward never run at one time."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.lower import Lowering, ReceiveBuffer, StagingUse, TensorSpec
from sp_bench.run.partials import Tensors


class Buffers:
    """Tensors by shape and dtype; each plan takes as many of a kind as it needs, the first ones first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[TensorSpec, list[Tensor]] = {}

    def of(self, lowering: Lowering) -> tuple[dict[ReceiveBuffer, Tensors], dict[StagingUse, Tensors]]:
        """The tensors of a plan's receive buffers, and of its staging buffers."""
        taken: dict[TensorSpec, int] = {}

        def tensors(specs: tuple[TensorSpec, ...]) -> Tensors:
            return tuple(self._take(spec, taken) for spec in specs)

        buffers = dict.fromkeys(lowering.receive_buffers.values())
        receiving = {buffer: tensors(lowering.received_specs(buffer)) for buffer in buffers}
        return receiving, {use: tensors(specs) for use, specs in lowering.staging_buffers.items()}

    def tensors(self) -> list[Tensor]:
        """All that were made."""
        return [tensor for made in self._made.values() for tensor in made]

    def _take(self, spec: TensorSpec, taken: dict[TensorSpec, int]) -> Tensor:
        made, number = self._made.setdefault(spec, []), taken.get(spec, 0)
        taken[spec] = number + 1
        if number == len(made):
            # Ordinary tensors even if made in inference mode: lanes write to them, and later calls may train.
            with torch.inference_mode(False):
                made.append(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device))
        return made[number]
