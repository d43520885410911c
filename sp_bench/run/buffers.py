"""Buffers that the phases of one problem share: a forward and a backward never run at one time."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.plan import FIELDS, Dataflow, Plan, Problem, Slot, casts
from sp_bench.run.partials import Tensors


class Buffers:
    """Tensors by shape and dtype; each plan takes as many of a kind as it needs, the first ones first."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._made: dict[tuple, list[Tensor]] = {}

    def of(self, plan: Plan, flow: Dataflow) -> tuple[dict[Slot, Tensors], dict[tuple[str, str], Tensors]]:
        """The plan's receive buffers by slot, and its staging buffers by (lane, tensor)."""
        taken: dict[tuple, int] = {}
        slots = {slot: self._chunk(slot.tensor, slot.arriving, taken) for slot in dict.fromkeys(flow.slots.values())}
        staging = {(lane, tensor): self._chunk(tensor, True, taken) for lane, tensor in casts(plan, self._problem)}
        return slots, staging

    def _chunk(self, tensor: str, wire: bool, taken: dict[tuple, int]) -> Tensors:
        return tuple(
            self._take(
                self._problem.field_shape(field),
                getattr(torch, self._problem.field_dtype(field, wire=wire)),
                taken,
            )
            for field in FIELDS[tensor]
        )

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, taken: dict[tuple, int]) -> Tensor:
        kind = (shape, dtype)
        made, number = self._made.setdefault(kind, []), taken.get(kind, 0)
        taken[kind] = number + 1
        if number == len(made):
            # Ordinary tensors even if made in inference mode: lanes write to them, and later calls may train.
            with torch.inference_mode(False):
                made.append(torch.empty(shape, dtype=dtype, device=self._device))
        return made[number]
