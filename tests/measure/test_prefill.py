"""Measured prompts: real ranks, the gate, what was timed, and bytes that are those of the plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sp_bench.measure.pool import RankPool
from sp_bench.point import run_points
from sp_bench.records.checking import problems_of
from sp_bench.workload.sampled_rows import ROWS
from tests.support.points import point
from tests.support.typed import Known
from tests.workload.requests import prompting

RANKS, HEADS = 3, 4
SMALL = (
    "workload=prefill",
    "cluster=local",
    "gpus=3",
    "heads=4",
    "head_dim=16",
    "dtype=float32",
    "iters=2",
    "warmup=0",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of three ranks."""
    with RankPool(RANKS) as ranks:
        yield ranks


def test_records_of_measured_prompts(tmp_path: Path) -> None:
    """Two methods in turn: each chunk's bytes as its plan says, the whole and its chunks timed, the cache counted."""
    asked = ("seqlen=160", "prefill.chunk=60", "prefill.cached=30", "kv_heads=2")
    requests = [point(*SMALL, *asked, f"method={name}") for name in ("ring", "pass_q")]
    outcomes = run_points(requests, folder=tmp_path, reuse=False)
    assert [problems_of(path) for path in tmp_path.glob("*.json") if path.name.count(".") == 1] == [[], []]
    for outcome in outcomes:
        record = Known(outcome.record)
        assert (record.status, record.mode, outcome.record.error) == ("ok", "measure", None)
        assert (record.chunks, record.prefill_chunk, record.prefill_cached) == (3, 60, 30)
        assert record.comm_bytes_per_gpu == pytest.approx(record.comm_bytes_expected)
        assert 0 < max(record.err_out, record.err_timed_out) < 2e-6
        assert record.err_seqlen == record.err_timed_seqlen == 160
        assert record.err_timed_query_rows == (2 * ROWS * RANKS + 40) * HEADS, "of the last chunk all 40"
        assert record.kv_cache_bytes == (30 + 60 + 60 + 42) // 3 * 2 * 2 * 16 * 4
        assert record.ttft_s == pytest.approx(record.step_ms_median / 1e3)
        assert len(record.chunk_ms) == 3 and min(record.chunk_ms) > 0
        samples = json.loads((tmp_path / f"{record.run_id}.samples.json").read_text())
        assert {part for part in samples["part"] if part.startswith("chunk ")} == {"chunk 0", "chunk 1", "chunk 2"}


def test_a_kernel_that_is_wrong_in_later_rows_is_found_in_what_was_timed(pool: RankPool) -> None:
    """A rank has 300 tokens of a chunk, and the gate 256."""
    spec = prompting("gpus=3", "method=ring", "seqlen=1800", "prefill.chunk=900", "kernel=aten_cpu", *SMALL[3:6])
    for gate, timed, rows in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", spec, 256, "out"):
        assert gate == "" and "out is off by" in timed and timed.endswith("at 1800 tokens")
        assert rows == (2 * ROWS * RANKS * HEADS, 0)
    for gate, timed, _ in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", spec, 300, "out"):
        assert gate == timed == ""


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_cache_that_does_not_grow_is_found_by_the_gate(pool: RankPool, index: int) -> None:
    """One chunk's keys are never written."""
    spec = prompting("gpus=3", "method=ring", "seqlen=90", "prefill.chunk=30", "kernel=aten_cpu", *SMALL[3:6])
    assert all("out is off by" in wrong for wrong in pool.run("tests.measure.jobs:gated_without_writing", spec, index))


def test_one_piece_of_a_prompt_is_checked_too(pool: RankPool) -> None:
    spec = prompting("gpus=3", "method=ulysses", "seqlen=90", "heads=3", "kernel=aten_cpu", "dtype=float32")
    for found in pool.run("tests.measure.jobs:gated", spec):
        assert found.wrong("float32") == "" and 1e-8 < found.overall["out"] < 1e-6
    assert all("out is" in found.wrong("float32") for found in pool.run("tests.measure.jobs:gated", spec, ("out", 0)))


def test_a_model_is_not_measured() -> None:
    with pytest.raises(
        ValueError, match=r"model=tiny: is simulated only: .*; mode=simulate, or model=none, would work"
    ):
        point("model=tiny", "workload=prefill", "cluster=local", "gpus=2", "seqlen=64")
