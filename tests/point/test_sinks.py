"""Points with sinks: what they cost, what they are told apart by, and what refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.point import run_points
from sp_bench.point.simulated import simulate_point
from sp_bench.records import Record
from sp_bench.records.checking import problems_of
from tests.support.points import point
from tests.support.typed import Known

SHAPE = ("gpus=8", "seqlen=64k", "heads=32", "kv_heads=8", "cluster=h100_ndr400", "method=ring")


def simulated(*overrides: str) -> Record:
    return simulate_point(point(*SHAPE, *overrides))[0]


@pytest.mark.parametrize("phase", ["backward", "forward_backward"])
def test_nothing_is_sent_but_the_sum_of_their_gradient(phase: str) -> None:
    """A number in fp32 for each of 32 heads, by a ring: 2 * 7 / 8 of them."""
    records = [simulated(f"phase={phase}", "sinks=true"), simulated(f"phase={phase}")]
    assert [record.sinks for record in records] == [True, None]
    with_sinks, without = map(Known, records)
    assert with_sinks.comm_bytes_per_gpu == without.comm_bytes_per_gpu + 2 * 7 * 32 * 4 // 8
    assert with_sinks.comm_bytes_per_gpu == with_sinks.comm_bytes_expected
    assert with_sinks.comm_bytes_by_lane["backward/sinks/all_reduce/sum"] == 224
    assert with_sinks.comm_bytes_by_link["port"] > without.comm_bytes_by_link["port"]
    assert 0 < with_sinks.step_ms_median - without.step_ms_median < 0.2, "14 steps of a ring of 8 GPUs"
    assert with_sinks.record.forward_ms_median == without.record.forward_ms_median


def test_a_forward_sends_what_it_sends_without() -> None:
    with_sinks, without = simulated("phase=forward", "sinks=true"), simulated("phase=forward")
    assert with_sinks.comm_bytes_per_gpu == without.comm_bytes_per_gpu
    assert with_sinks.step_ms_median == without.step_ms_median


def test_they_are_another_question_and_no_measurement_backs_it() -> None:
    with_sinks, without = point(*SHAPE, "sinks=true"), point(*SHAPE)
    assert with_sinks.run_id != without.run_id == point(*SHAPE, "sinks=false").run_id
    assert simulated("sinks=true").workload_id.split("/")[2] == "causal-sinks"
    record = simulated("sinks=true", "kv_heads=32")
    assert record.validation_error is None and "no sinks" in (record.validation or "")


def test_measured_points_with_sinks(tmp_path: Path) -> None:
    """Bytes are those of plans and the sum, all errors are those of roundings; of a backward alone too."""
    asked = ("cluster=local", "gpus=3", "seqlen=150", "heads=6", "head_dim=16", "dtype=float32", "iters=2", "warmup=0")
    each = (
        "method=ring",
        "method=mesh kv_seqlen=301",
        "method=ulysses phase=backward",
        "method=ring mask=full kv_seqlen=90",
    )
    requests = [point(*asked, "sinks=true", *one.split()) for one in each]
    for outcome in run_points(requests, folder=tmp_path, reuse=False):
        record = Known(outcome.record)
        assert (record.status, outcome.record.error) == ("ok", None)
        errors = (record.err_out, record.err_dq, record.err_dk, record.err_dv, record.err_dsinks)
        assert all(0 < error < 2e-6 for error in errors)
        assert record.comm_bytes_per_gpu == pytest.approx(record.comm_bytes_expected)
        assert record.comm_bytes_by_lane["backward/sinks/all_reduce/sum"] == 2 * 2 * 6 * 4 // 3
    assert [problems_of(path) for path in tmp_path.glob("*.json") if path.name.count(".") == 1] == [[]] * len(each)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("sinks=perhaps", "sinks=perhaps: must be true or false"),
        ("sinks=true model=llama3_8b", "sinks=true: are of attention points: workload=train has none"),
        ("sinks=true workload=prefill", "sinks=true: are of attention points: workload=prefill has none"),
        ("sinks=true cuda_graph=true", "sinks=true cuda_graph=true: are summed by the host"),
        (
            "sinks=true cluster=local gpus=2 dtype=float32 seqlen=1k device=cpu mode=alone",
            "sinks=true: are summed over ranks",
        ),
        (
            "sinks=true cluster=local gpus=2 dtype=float32 seqlen=1k method=peer impl=torch_context_parallel",
            "sinks=true of impl=.*: are the suite.s own",
        ),
    ],
)
def test_what_is_refused(overrides: str, message: str) -> None:
    given = {override.partition("=")[0] for override in overrides.split()}
    usual = [each for each in SHAPE if each.partition("=")[0] not in given]
    with pytest.raises(RequestError, match=message):
        point(*usual, *overrides.split())
