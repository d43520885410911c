"""Activations kept in the host's memory between forward and backward, by torch's saved-tensor hooks.

What autograd keeps for the backward is copied to pinned memory of the host on a stream of its own, beside what the
device computes next, and copied back when the backward asks for it. Parameters stay where they are, and so do small
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_BYTES = 2**20
"""Smaller tensors stay on the device: a copy would take longer than it saves."""


class Kept(NamedTuple):
    """A saved tensor on the host."""

    host: Tensor
    device: torch.device
    copied: Any
    """An event after the copy; None on a CPU."""


class Offload:
    """Copies saved tensors of one device to the host, and back."""

    def __init__(self, device: torch.device, least_bytes: int = LEAST_BYTES) -> None:
        self._device, self._least_bytes = device, least_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied_bytes = 0
        """Bytes copied to the host so far."""

    def hooks(self, parameters: Iterable[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which what autograd saves goes to the host, but for parameters (or this rank's shards of them)
        and views of these.
        """
        stay = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        return torch.autograd.graph.saved_tensors_hooks(partial(self._pack, stay), self._unpack)

    def _pack(self, stay: Set[int], x: Tensor) -> Tensor | Kept:
        if x.nbytes < self._least_bytes or x.untyped_storage().data_ptr() in stay:
            return x
        self.copied_bytes += x.nbytes
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._stream is not None)
        if self._stream is None:
            return Kept(host.copy_(x), x.device, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
            copied = self._stream.record_event()
        x.record_stream(self._stream)  # its memory is another's only after the copy
        return Kept(host, x.device, copied)

    def _unpack(self, kept: Tensor | Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.copied is None:
            return kept.host.to(kept.device, copy=True)
        torch.cuda.current_stream(self._device).wait_event(kept.copied)
        return kept.host.to(kept.device, non_blocking=True)
