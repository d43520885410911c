"""Peak memory of a point on a rank's device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from sp_bench.machine import proc_number
from sp_bench.measure.result import MemoryPeak


class MemoryWatch:
    """The growth of this process's memory since the watch was made.

    On a CPU this is resident memory, as the kernel reports it; on a GPU, memory given out by torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget_peak()
        on_gpu = device.type == "cuda"
        self._before_bytes = torch.cuda.memory_allocated(device) if on_gpu else resident_bytes("VmRSS")

    def forget_peak(self) -> None:
        """Start a new peak. Growth still counts from when the watch was made."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # some kernels don't let a process do that
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self, live_bytes: int, outside_bytes: int = 0) -> MemoryPeak:
        """The growth up to the peak, beside the executor's own count `live_bytes`.

        `outside_bytes` were made for the point outside of torch's allocator.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return MemoryPeak(
                live_bytes=live_bytes,
                device_bytes=torch.cuda.max_memory_allocated(self._device) - self._before_bytes + outside_bytes,
                active_bytes=torch.cuda.memory_stats(self._device)["active_bytes.all.peak"] + outside_bytes,
                reserved_bytes=torch.cuda.max_memory_reserved(self._device) + outside_bytes,
            )
        grown_bytes = max(0, resident_bytes("VmHWM") - self._before_bytes)
        return MemoryPeak(live_bytes=live_bytes, grown_bytes=grown_bytes)


def resident_bytes(field: str) -> int:
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM); 0 if the kernel does not say."""
    return 1024 * (proc_number("self/status", field) or 0)
