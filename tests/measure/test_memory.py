"""Peak memory on a GPU: what torch's allocator gave out, could not give out, and has; and what is outside of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sp_bench.measure.memory import MemoryWatch
from sp_bench.measure.result import MemoryPeak, RankResult
from sp_bench.point import timed
from sp_bench.records.quantities import Memory
from sp_bench.run.symmetric_memory import SymmetricMemory
from sp_bench.workload.gate import GateErrors

MIB = 1 << 20


def test_buffers_outside_of_the_allocator_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of symmetric memory, each with its signal pad in steps of 2 MiB."""
    cuda = {
        "memory_allocated": 5 * MIB, "max_memory_allocated": 30 * MIB, "max_memory_reserved": 64 * MIB,
        "memory_stats": {"active_bytes.all.peak": 40 * MIB}, "synchronize": None, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    module = SimpleNamespace(
        empty=lambda size, *, dtype, device: torch.empty(size, dtype=dtype),
        rendezvous=lambda tensor, group: SimpleNamespace(signal_pad_size=2048),
    )
    symmetric = SymmetricMemory(range(2), 0, lambda lane: lane, torch.device("cpu"), module)
    symmetric.connect((), lanes=2)
    assert symmetric.outside_bytes == 4 * MIB, "a pad for each lane"
    symmetric.empty((2 * MIB,), torch.uint8)
    assert symmetric.outside_bytes == 8 * MIB
    found = MemoryWatch(torch.device("cuda", 0)).peak(1, symmetric.outside_bytes)
    assert found == MemoryPeak(
        live_bytes=1, device_bytes=33 * MIB, active_bytes=48 * MIB, reserved_bytes=72 * MIB
    )  # 30 + 8 - 5
    ranks = [
        RankResult(gate=GateErrors(), memory=found),
        RankResult(gate=GateErrors(), memory=MemoryPeak(device_bytes=9)),
    ]
    record = timed.memory(Memory(), ranks)
    assert (record.peak_mem_bytes_max, record.peak_mem_bytes_min) == (33 * MIB, 9)
    assert (record.peak_active_bytes_max, record.peak_reserved_bytes_max) == (48 * MIB, 72 * MIB)
