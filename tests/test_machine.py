"""Facts of this machine."""

from __future__ import annotations

import os
import time

from sp_bench.machine import boot_id, busy_s


def test_busy_cores_are_counted_in_seconds() -> None:
    """Half a second of this process, and at most all cores all the time; the kernel counts in ticks."""
    before, started, used = busy_s(), time.perf_counter(), time.process_time()
    while time.process_time() < used + 0.5:
        pass
    after, passed = busy_s(), time.perf_counter() - started
    assert before is not None
    assert after is not None
    assert 0.4 < after - before < (os.cpu_count() or 1) * (passed + 0.1)


def test_a_machine_is_told_by_its_kernel() -> None:
    assert len(boot_id()) > 30
    assert boot_id() == boot_id()
