"""Buffers that the phases of one problem share: a forward and a backward never run at one time."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.plan import FIELDS, Buffer, Dataflow, Plan, Problem, Slot, Stage, stages
from sp_bench.run.partials import Tensors


class Buffers:
    """Tensors by shape and dtype; each plan takes as many of a kind as it needs, the first ones first."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._made: dict[Buffer, list[Tensor]] = {}

    def of(self, plan: Plan, flow: Dataflow) -> tuple[dict[Slot, Tensors], dict[Stage, Tensors]]:
        """The plan's receive buffers by slot, and its staging buffers."""
        taken: dict[Buffer, int] = {}
        slots = {slot: self._chunk(slot, taken) for slot in dict.fromkeys(flow.slots.values())}
        staged = stages(plan, self._problem).items()
        return slots, {stage: tuple(self._take(kind, taken) for kind in kinds) for stage, kinds in staged}

    def tensors(self) -> list[Tensor]:
        """All that were made."""
        return [tensor for made in self._made.values() for tensor in made]

    def _chunk(self, slot: Slot, taken: dict[Buffer, int]) -> Tensors:
        problem, wire = self._problem, slot.arriving
        kinds = ((problem.field_shape(f), problem.field_dtype(f, wire=wire)) for f in FIELDS[slot.tensor])
        return tuple(self._take(kind, taken) for kind in kinds)

    def _take(self, kind: Buffer, taken: dict[Buffer, int]) -> Tensor:
        made, number = self._made.setdefault(kind, []), taken.get(kind, 0)
        taken[kind] = number + 1
        if number == len(made):
            # Ordinary tensors even if made in inference mode: lanes write to them, and later calls may train.
            with torch.inference_mode(False):
                made.append(torch.empty(kind[0], dtype=getattr(torch, kind[1]), device=self._device))
        return made[number]
