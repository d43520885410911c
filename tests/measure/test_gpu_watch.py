"""Clocks, power and throttling by NVML, on a fake with the arguments of nvidia-ml-py."""

# ruff: noqa: N802  # names of the package

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from sp_bench.measure import gpu_watch
from sp_bench.measure.gpu_watch import GpuLoad, GpuWatch, gpu_state
from sp_bench.records.quantities import GpuState

GPU = torch.device("cuda", 1)
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class Nvml:
    """The module pynvml, with one GPU. Each query of its clock finds the next one."""

    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_SUCCESS

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_power: bool = True, has_instant: bool = True, event_reasons: bool = True) -> None:
        self._clocks, self._has_power, self._event_reasons = iter((1980, 1980, 1230)), has_power, event_reasons
        self._has_instant = has_power and has_instant

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise self.NVMLError(uuid)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, type: int) -> int:
        assert (handle, type) == ("handle", 1)
        self._clock = next(self._clocks)
        return self._clock

    def nvmlDeviceGetMaxClockInfo(self, handle: str, type: int) -> int:
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self._has_power:
            raise self.NVMLError("not supported")
        return 400_000

    def nvmlDeviceGetFieldValues(self, handle: str, fieldIds: list[int]) -> Any:
        """As pynvml's ctypes: of a GPU that lacks the field, the field's own return value says so."""
        assert (handle, fieldIds) == ("handle", [186])
        values = (pynvml.c_nvmlFieldValue_t * 1)()
        values[0].nvmlReturn = 0 if self._has_instant else pynvml.NVML_ERROR_NOT_SUPPORTED
        values[0].value.uiVal = 650_500
        return values

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        if not self._event_reasons:
            raise self.NVMLError("function not found")
        return 0x4 if self._clock > 1500 else 0x4 | 0x40

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1


QUERIES = [name for name in vars(Nvml) if name.startswith("nvml")]


@pytest.mark.parametrize("name", QUERIES)
def test_the_fake_has_the_package_s_arguments(name: str) -> None:
    mine = [*inspect.signature(getattr(Nvml(), name)).parameters]
    assert mine == [*inspect.signature(getattr(pynvml, name)).parameters]


def watch(
    monkeypatch: pytest.MonkeyPatch, nvml: Any, uuid: str = UUID.removeprefix("GPU-"), capability: tuple = (9, 0)
) -> GpuWatch | None:
    monkeypatch.setattr(importlib, "import_module", lambda name: {"pynvml": nvml}[name])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuid, major=capability[0], minor=capability[1]),
    )
    return gpu_watch.gpu_watch(GPU)


def test_samples_and_what_a_record_says_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(monkeypatch, Nvml())
    assert found
    for _ in range(3):
        found.sample()
    load = found.taken()
    assert load == GpuLoad(sm_mhz=(1980, 1980, 1230), most_sm_mhz=1980, power_w=(650.5,) * 3, reasons=(0x4, 0x4, 0x44))
    cool = replace(load, sm_mhz=(1980,) * 3, reasons=(0x4,) * 3)
    state, (note,) = gpu_state([cool, load])
    assert state == GpuState(
        sm_mhz_min=1230, sm_mhz_median=1980, sm_mhz_most=1980, gpu_power_w_median=650.5,
        clocks_held_down=["software power cap", "hardware thermal slowdown"],
    )  # fmt: skip
    assert note == "the clocks of rank 1's GPU were held down in 1 of 3 samples, down to 1230 of 1980 MHz: " + (
        "hardware thermal slowdown"
    )
    assert gpu_state([cool])[1] == [], "a power cap is usual under full load"


def test_power_is_of_the_moment_and_never_an_average_in_which_other_points_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, power_w in (((9, 0), ()), ((8, 6), ()), ((8, 0), (400.0,)), ((7, 0), (400.0,))):
        found = watch(monkeypatch, Nvml(has_instant=False), capability=capability)
        assert found
        found.sample()
        assert found.taken().power_w == power_w


def test_what_a_gpu_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(monkeypatch, Nvml(has_power=False, event_reasons=False))
    assert found
    found.sample()
    assert found.taken() == GpuLoad(sm_mhz=(1980,), most_sm_mhz=1980, reasons=(0x1,)), "by the older name"
    assert gpu_state([found.taken()])[0].gpu_power_w_median is None
    assert gpu_state([None, None]) == (GpuState(), []), "on CPUs"


def test_without_nvml_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(monkeypatch, Nvml(), uuid="of a MIG instance") is None
    assert gpu_watch.gpu_watch(torch.device("cpu")) is None
    monkeypatch.setattr(importlib, "import_module", importlib.__import__)
    monkeypatch.setattr(Nvml, "nvmlInit", lambda self: (_ for _ in ()).throw(Nvml.NVMLError("no driver")))
    assert watch(monkeypatch, Nvml()) is None
