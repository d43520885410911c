"""A peer as a benchmark point: beside a method in one allocation, with the same record."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve, run_points
from sp_bench.records import Record

SMALL = ("gpus=2", "cluster=local", "seqlen=256", "heads=4", "head_dim=16", "dtype=float32", "iters=2", "warmup=1")
WRONG = "tests.peers.jobs:gathered"


def measured(folder: Path, *points: tuple[str, ...]) -> list[Record]:
    with Composer() as composer:
        requests = [resolve(composer.compose([*SMALL, "logger=none", *point])) for point in points]
    return [outcome.record for outcome in run_points(requests, folder=folder, reuse=False)]


def test_a_peer_beside_methods(tmp_path: Path) -> None:
    """It is right where it is, is not timed where it is wrong, and what a peer does not have is not in its record."""
    ours, torch, wrong = measured(
        tmp_path,
        ("method=ring", "method.layout=zigzag"),
        ("method=peer", "impl=torch_context_parallel"),
        ("method=peer", f"impl={WRONG}", "method.layout=zigzag"),
    )
    assert (ours.status, torch.status, wrong.status) == ("ok", "ok", "incorrect")
    assert (torch.method, torch.variant, torch.layout) == ("torch_context_parallel", "all_gather", "zigzag")
    assert torch.err_out is not None and torch.err_dq is not None and max(torch.err_out, torch.err_dq) < 2e-6
    assert torch.step_ms_median and torch.kernel == "aten_cpu"
    assert torch.comm_bytes_by_lane and torch.comm_bytes_by_lane["forward/all_gather_into_tensor"] == 2 * 128 * 64 * 4
    assert torch.compute_ms is torch.exposed_comm_ms is torch.comm_bytes_expected is torch.peak_mem_bytes_max is None
    assert torch.notes and torch.notes[0].startswith("torch_context_parallel is torch 2.")
    assert wrong.err_out and wrong.err_out > 0.1 and wrong.step_ms_median is None


def test_a_function_that_is_wrong_at_the_length_that_is_timed_only(tmp_path: Path) -> None:
    """It passes the gate; the rows of what was timed tell, and at what length. A right one has both errors."""
    options = ("method=peer", "method.layout=striped", "iters=1")
    functions = ("wrong_from_512_tokens", "gathered")
    points = [(*options, f"impl=tests.peers.jobs:{name}", "seqlen=1024") for name in functions]
    wrong, right = measured(tmp_path, *points)
    assert (wrong.status, right.status) == ("incorrect", "ok")
    assert wrong.err_out and wrong.err_seqlen == 512 and wrong.err_out < 2e-6
    assert wrong.err_timed_out and wrong.err_timed_seqlen == 1024 and wrong.err_timed_out > 1e-3
    assert wrong.error and "of what was timed, out is off by" in wrong.error and "at 1024 tokens" in wrong.error
    assert wrong.step_ms_median is None
    errors = [right.err_timed_out, right.err_timed_dq, right.err_timed_dk, right.err_timed_dv]
    assert all(error and 1e-8 < error < 2e-6 for error in errors)
    assert (right.err_timed_query_rows, right.err_timed_key_rows) == (2 * 16 * 4, 256)


@pytest.mark.long
def test_a_backward_by_itself(tmp_path: Path) -> None:
    """A peer's graph is gone after a backward, so that each one gets a forward, whose bytes and time don't count."""
    options = ("method=peer", "impl=torch_context_parallel")
    only, both = measured(tmp_path, (*options, "phase=backward"), options)
    assert (only.status, only.forward_ms_median) == ("ok", None)
    assert only.step_ms_median and only.step_ms_median == only.backward_ms_median
    assert only.comm_bytes_by_lane and both.comm_bytes_by_lane
    backward = {name: sent for name, sent in both.comm_bytes_by_lane.items() if name.startswith("backward/")}
    assert only.comm_bytes_by_lane == backward


def test_impl_is_of_peers_only() -> None:
    """A method is the same point with or without it, so that one sweep can have both."""
    with Composer() as composer:
        ids = {
            resolve(composer.compose([*SMALL, "method=ring", f"impl={impl}"])).run_id
            for impl in ("null", "torch_context_parallel")
        }
    assert len(ids) == 1


def test_a_peer_is_not_simulated() -> None:
    with Composer() as composer, pytest.raises(RequestError, match="no plan that could be simulated"):
        resolve(composer.compose(["method=peer", "impl=torch_context_parallel"]))
