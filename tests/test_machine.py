"""Facts of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from sp_bench.machine import boot_id, busy_s, give_back_memory, left_in_groups
from sp_bench.measure.memory import resident_bytes


def test_busy_cores_are_counted_in_seconds() -> None:
    """Half a second of this process, and at most all cores all the time; the kernel counts in ticks."""
    before, started, used = busy_s(), time.perf_counter(), time.process_time()
    while time.process_time() < used + 0.5:
        pass
    after, passed = busy_s(), time.perf_counter() - started
    assert before is not None
    assert after is not None
    assert 0.4 < after - before < (os.cpu_count() or 1) * (passed + 0.1)


def test_what_was_freed_is_given_back() -> None:
    """Arrays too small for memory of their own, of which the last one stays."""
    arrays = [np.ones(10_000) for _ in range(2000)]
    held = resident_bytes("VmRSS")
    del arrays[:-1]
    give_back_memory()
    assert held - resident_bytes("VmRSS") > 0.8 * 80_000 * 2000


def test_a_machine_is_told_by_its_kernel() -> None:
    assert len(boot_id()) > 30
    assert boot_id() == boot_id()


@pytest.mark.parametrize(
    ("line", "top", "limit", "used", "total"),
    [
        ("0::/slurm/job_7/step_0", ".", "memory.max", "memory.current", ""),
        (
            "4:cpu,memory:/slurm/job_7/step_0",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_",
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_job_s_memory_is_what_its_groups_leave(
    tmp_path: Path, line: str, top: str, limit: str, used: str, total: str
) -> None:
    step = tmp_path / top / "slurm" / "job_7" / "step_0"
    step.mkdir(parents=True)
    job = step.parent
    for folder, most, has, files in ((step, "max", 400, 0), (job, "1000", 900, 300), (tmp_path / top, "5000", 1000, 0)):
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{has}\n")
        (folder / "memory.stat").write_text(
            f"anon 12\n{total}inactive_file {files // 3}\n{total}active_file {files - files // 3}\n"
        )
    assert left_in_groups(f"1:pids:/elsewhere\n{line}\n", tmp_path) == [400, 4000]
    (job / used).write_text("1400\n")
    assert left_in_groups(line, tmp_path)[0] == 0


def test_a_container_s_limit_is_at_the_top(tmp_path: Path) -> None:
    """The path of its group is the host's, which isn't there."""
    for name, text in (("memory.max", "2048"), ("memory.current", "48"), ("memory.stat", "")):
        (tmp_path / name).write_text(text)
    assert left_in_groups("0::/docker/1234", tmp_path) == [2000]
    assert left_in_groups("", tmp_path) == []
