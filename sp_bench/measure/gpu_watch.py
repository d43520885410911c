"""Clocks, power and throttling of a rank's GPU while points are timed, by NVML: the package nvidia-ml-py, extra `gpu`.

A sample is taken once a phase has been queued and before the caller waits for it: the GPU is at work, and nothing
that is timed waits for the sample. Imports no torch, and NVML only where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sp_bench.records.quantities import GpuState

if TYPE_CHECKING:
    import torch

HELD_DOWN = {
    0x2: "clocks set by a user", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip
"""NVML's bits of why clocks are held down; idle, 0x1, and the display's, 0x100, are no obstacle."""
GA100 = (8, 0)
"""The compute capability up to which NVML's power usage is that of the moment; of later GPUs it is an average."""
ALARMS = 0x8 | 0x20 | 0x40 | 0x80
OBSTACLES = ALARMS | 0x2 | 0x10
"""All but the software's power cap, at which a card under full load usually is."""


def reasons_in_words(mask: int) -> list[str]:
    """The reasons in NVML's mask, in words."""
    return [text for bit, text in HELD_DOWN.items() if mask & bit]


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """The samples of one GPU. What NVML can't tell of it is left out."""

    sm_mhz: tuple[int, ...] = ()
    most_sm_mhz: int | None = None
    """The highest clock that the card has."""
    power_w: tuple[float, ...] = ()
    reasons: tuple[int, ...] = ()
    """The mask of each sample."""


class GpuWatch:
    """Samples one GPU."""

    def __init__(self, nvml: Any, handle: Any, *, averages: bool) -> None:
        """`nvml` is the module pynvml after nvmlInit, `handle` its handle of the GPU.

        `averages`: whether NVML's power usage is that of the last second, in which other points ran too.
        """
        self._nvml, self._handle, self._averages = nvml, handle, averages
        self._sm_mhz: list[int] = []
        self._power_w: list[float] = []
        self._reasons: list[int] = []

    def sample(self) -> None:
        """Take one sample."""
        nvml = self._nvml
        mhz = self._asked(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        milliwatts = self._asked(self._ask_power)
        reasons = self._asked(self._ask_reasons)
        self._sm_mhz += [] if mhz is None else [mhz]
        self._power_w += [] if milliwatts is None else [milliwatts / 1e3]
        self._reasons += [] if reasons is None else [reasons]

    def taken(self) -> GpuLoad:
        """The samples so far."""
        most = self._asked(self._nvml.nvmlDeviceGetMaxClockInfo, self._nvml.NVML_CLOCK_SM)
        samples = {"sm_mhz": tuple(self._sm_mhz), "power_w": tuple(self._power_w), "reasons": tuple(self._reasons)}
        return GpuLoad(most_sm_mhz=most, **samples)

    def _ask_power(self, handle: Any) -> int | None:
        """The power at this moment in mW; None where there is only an average."""
        (field,) = self._nvml.nvmlDeviceGetFieldValues(handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn == self._nvml.NVML_SUCCESS:
            return field.value.uiVal
        return None if self._averages else self._nvml.nvmlDeviceGetPowerUsage(handle)

    def _ask_reasons(self, handle: Any) -> int:
        """By the function's name since driver 535, or the one before."""
        try:
            return self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except (AttributeError, self._nvml.NVMLError):
            return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _asked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:  # this GPU, or driver, doesn't tell
            return None


def gpu_watch(device: torch.device) -> GpuWatch | None:
    """The watch of a rank's device; None on a CPU, without the package, or if NVML doesn't know the GPU."""
    if device.type != "cuda":
        return None
    import torch

    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or without a driver that it knows
        return None
    try:
        of_device = torch.cuda.get_device_properties(device)
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{of_device.uuid}")
        return GpuWatch(nvml, handle, averages=(of_device.major, of_device.minor) > GA100)
    except (AttributeError, nvml.NVMLError):  # an older torch tells no uuid
        return None


def gpu_state(loads: Sequence[GpuLoad | None]) -> tuple[GpuState, list[str]]:
    """The state of all ranks' GPUs, and a note for each GPU whose clocks something held down."""
    known = [load for load in loads if load]
    mhz, watts = ([x for load in known for x in getattr(load, name)] for name in ("sm_mhz", "power_w"))
    mask = int(np.bitwise_or.reduce([mask for load in known for mask in load.reasons] or [0]))
    most = [load.most_sm_mhz for load in known if load.most_sm_mhz is not None]
    state = GpuState(
        sm_mhz_min=min(mhz, default=None),
        sm_mhz_median=float(np.median(mhz)) if mhz else None,
        sm_mhz_most=min(most, default=None),
        gpu_power_w_median=float(np.median(watts)) if watts else None,
        clocks_held_down=reasons_in_words(mask) if any(load.reasons for load in known) else None,
    )
    return state, [note for rank, load in enumerate(loads) if load and (note := _note(rank, load))]


def _note(rank: int, load: GpuLoad) -> str:
    held = [mask & OBSTACLES for mask in load.reasons if mask & OBSTACLES]
    if not held:
        return ""
    words = ", ".join(reasons_in_words(int(np.bitwise_or.reduce(held))))
    clock = f", down to {min(load.sm_mhz)} of {load.most_sm_mhz} MHz" if load.sm_mhz else ""
    return (
        f"the clocks of rank {rank}'s GPU were held down in {len(held)} of {len(load.reasons)} samples{clock}: {words}"
    )
