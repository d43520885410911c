"""Receive and staging buffers shared by forward and backward, which never run at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from sp_bench.lower import Lowering, ReceiveBuffer, StagingUse, TensorSpec
from sp_bench.run.devices import Cuda, Device
from sp_bench.run.partials import Tensors
from sp_bench.run.transport import Transport

ALIGNED_BYTES = 512
"""Tensors of an arena begin at multiples of it, as torch's own do."""


class Buffers:
    """A pool of tensors by shape and dtype. Every plan takes from the start of each list, so plans share tensors."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        """`transport` makes the tensors, in memory that suits it."""
        self._device, self._transport = device, transport
        self._made: dict[TensorSpec, list[Tensor]] = {}

    def of(self, lowering: Lowering) -> tuple[dict[ReceiveBuffer, Tensors], dict[StagingUse, Tensors]]:
        """Return the tensors of a plan's receive buffers and of its staging buffers."""
        rows, uses = list(lowering.allocations()), list(lowering.staging_buffers.items())
        specs = [tuple(specs) for _, specs in (*rows, *uses)]
        made = iter(self._take([spec for each in specs for spec in each]))
        tensors = [tuple(next(made) for _ in each) for each in specs]
        receiving: dict[ReceiveBuffer, Tensors] = {}
        for (row, _), of_row in zip(rows, tensors[: len(rows)], strict=True):
            slots = [tuple(x[i] for x in of_row) for i in range(len(row))] if len(row) > 1 else [of_row]
            receiving |= dict(zip(row, slots, strict=True))
        staging = {use: of_use for (use, _), of_use in zip(uses, tensors[len(rows) :], strict=True)}
        self._transport.allocated()
        return receiving, staging

    def tensors(self) -> list[Tensor]:
        """Return every tensor allocated so far."""
        return [tensor for made in self._made.values() for tensor in made]

    def _take(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The tensors of one plan."""
        taken: dict[TensorSpec, int] = {}
        tensors = []
        for spec in specs:
            made, number = self._made.setdefault(spec, []), taken.get(spec, 0)
            taken[spec] = number + 1
            if number == len(made):
                # Never inference tensors: lanes write to these buffers, and later calls may train.
                with torch.inference_mode(False):
                    made.append(self._transport.empty(spec.shape, getattr(torch, spec.dtype), self._device))
            tensors.append(made[number])
        return tensors


class Borrower(Protocol):
    """A holder of tensors of an arena."""

    def close(self) -> None:
        """Let go of the tensors; they are taken again when they are needed."""
        ...


class Arena:
    """Memory of one device that plans of many shapes use in turn. It is as large as the largest plan needs.

    When it grows, all that have tensors of the smaller memory let go of them. On a GPU each execution that uses it
    waits for the last one, whatever streams they are on: all are on its `queues`.
    """

    def __init__(self, device: torch.device, queues: Device | None = None) -> None:
        """`queues` is the stream interface of an asynchronous device; default: Cuda on a GPU, none on a CPU."""
        self._device = device
        self.queues = queues or (Cuda(device) if device.type == "cuda" else None)
        self._stream: Any = None
        """The one that the memory was allocated on; None on a CPU, and before."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return self._memory.numel()

    def lend(self, specs: Sequence[TensorSpec], borrower: Borrower) -> list[Tensor]:
        """The tensors of one plan."""
        sizes = [prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED_BYTES) * ALIGNED_BYTES)
        if starts[-1] > self.nbytes:
            for each in list(self._borrowers):
                each.close()
            self._order_reuse()
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)  # freed before more is asked for
            # Never inference tensors: lanes write to them, and later calls may train.
            with torch.inference_mode(False):
                self._memory = torch.empty(_rounded(starts[-1]), dtype=torch.uint8, device=self._device)
        self._borrowers.add(borrower)
        pieces = zip(starts, sizes, specs, strict=False)
        with torch.inference_mode(False):
            return [self._memory[a : a + n].view(getattr(torch, spec.dtype)).view(spec.shape) for a, n, spec in pieces]

    def _order_reuse(self) -> None:
        """Have the stream that the allocator gives the memory to next wait for its last use, on whatever stream."""
        if self.queues is None:
            return
        if self._stream is not None and self.queues.finished is not None:
            self.queues.wait(self._stream, self.queues.finished)
        self._stream = self.queues.current()

    def tensors(self) -> list[Tensor]:
        """Return the memory as one tensor."""
        return [self._memory]


class Borrowed(Buffers):
    """The buffers of one engine in an arena. Only for a transport that makes its tensors in any memory."""

    def __init__(self, arena: Arena, transport: Transport, borrower: Borrower) -> None:
        super().__init__(arena.tensors()[0].device, transport)
        self._arena, self._borrower = arena, weakref.ref(borrower)

    def tensors(self) -> list[Tensor]:
        return self._arena.tensors()

    def _take(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        borrower = self._borrower()
        assert borrower is not None, "the engine is executing"
        return self._arena.lend(specs, borrower)


def _rounded(nbytes: int) -> int:
    """The next eighth of a power of two, so that lengths that rise one by one don't each take new memory."""
    eighth = max(1 << max(nbytes.bit_length() - 4, 0), ALIGNED_BYTES)
    return -(-nbytes // eighth) * eighth
