"""How much memory a point takes on a rank's device."""

from __future__ import annotations

import torch

from sp_bench.measure.resident import forget_peak, peak_resident_bytes, resident_bytes
from sp_bench.measure.spec import MemoryPeak


class MemoryWatch:
    """The growth of this process's memory since the watch was made: resident memory by the kernel's own accounts or, on
    a GPU, what torch's allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget_peak()
        on_gpu = device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if on_gpu else resident_bytes()

    def forget_peak(self) -> None:
        """Count the peak from now on; the growth is still since the watch was made."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            forget_peak()

    def peak(self, live_bytes: int) -> MemoryPeak:
        """The growth up to the peak, beside the executor's own figure."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            grown = torch.cuda.max_memory_allocated(self._device) - self._before
            return MemoryPeak(live_bytes=live_bytes, device_bytes=grown)
        return MemoryPeak(live_bytes=live_bytes, grown_bytes=max(0, peak_resident_bytes() - self._before))
