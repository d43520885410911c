"""How much memory a point takes on a rank's device."""

from __future__ import annotations

import torch

from sp_bench.measure.resident import forget_peak, peak_resident_bytes, resident_bytes
from sp_bench.measure.spec import Measured


class MemoryWatch:
    """From its making on: by the kernel's own accounts of this process or, on a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            forget_peak()
            self._before = resident_bytes()

    def tell(self, result: Measured) -> None:
        """The growth up to the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            result.device_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            result.grown_bytes = max(0, peak_resident_bytes() - self._before)
