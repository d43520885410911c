"""Every registered workload: its records pass their check, and its ranks send what was counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.__main__ import main
from sp_bench.records import Record
from sp_bench.records.checking import problems_of
from sp_bench.workload import WORKLOADS

MODELS = ("tiny", "tiny_dit", "none")
"""Models that a workload may take: the first that it does is that of its point."""
SHAPE = ("gpus=2", "cluster=local", "dtype=float32", "iters=5", "warmup=0", "parts=false", "head_dim=64", "heads=4")


def ran(name: str, folder: Path, *keys: str) -> int:
    """The exit code of a small point of a workload."""
    method = WORKLOADS[name].baselines.get("ring", "ring")
    own = (f"workload={name}", f"method={method}", "baseline=null", "logger=none", f"results_dir={folder}")
    return main([*SHAPE, *own, *keys])


def record_in(folder: Path) -> Record:
    """The only record of a folder, which passes its check."""
    (found,) = records.read_all(folder)
    assert problems_of(folder / f"{found.run_id}.json") == []
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_ranks_do_what_is_simulated(name: str, tmp_path: Path) -> None:
    """They are held against fp64, before the timing and in what was timed, and send the bytes that were counted."""
    taken = (model for model in MODELS if ran(name, tmp_path / "measured", "mode=measure", f"model={model}") == 0)
    model = next(taken, None)
    assert model is not None, "no model is taken"
    assert ran(name, tmp_path / "simulated", "mode=simulate", f"model={model}") == 0
    measured, simulated = (record_in(tmp_path / mode) for mode in ("measured", "simulated"))
    assert measured.status == simulated.status == "ok"
    assert measured.workload == name and measured.workload_id == simulated.workload_id
    assert measured.workload_id.startswith(name)
    assert measured.err_out is not None or measured.err_loss is not None
    assert measured.err_timed_out is not None
    assert measured.comm_bytes_per_gpu == simulated.comm_bytes_per_gpu
    assert measured.tflops_per_gpu and measured.tokens_per_s
