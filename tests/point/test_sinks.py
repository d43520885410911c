"""Points with sinks: what they cost, what they are told apart by, and what refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.point import run_points
from sp_bench.point.simulated import simulate_point
from sp_bench.point.training import simulate_training
from sp_bench.records import Record
from sp_bench.records.checking import problems_of
from sp_bench.workload.train import Train
from tests.support.points import point
from tests.support.typed import Known, of_kind

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
        ("sinks=true model=flux_like phase=forward", "sinks=true: are of .*: workload=dit has none"),
        ("sinks=maybe model=llama3_8b", "sinks=maybe: must be true or false"),
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


TRAINED = ("model=llama3_8b", "gpus=8", "seqlen=64k", "train.parameters=sharded", "method=ring", "cluster=h100_ndr400")


def test_a_training_step_has_a_parameter_for_each_head_of_a_layer() -> None:
    """Gathered and reduced with the others: 4 of 32 heads are a rank's, in bf16 and fp32, and in the optimizer."""
    with_sinks, without = (Known(simulated_step(f"sinks={each}")) for each in ("true", "false"))
    assert with_sinks.parameters == without.parameters + 32 * 32
    shard, layers = 32 // 8, 32
    assert with_sinks.comm_bytes_per_gpu - without.comm_bytes_per_gpu == 7 * layers * shard * (2 + 2 + 4)
    assert with_sinks.comm_bytes_per_gpu == with_sinks.comm_bytes_expected
    # A parameter, its gradient and two moments in fp32, and two layers gathered in bf16.
    assert with_sinks.peak_mem_bytes_max - without.peak_mem_bytes_max == 16 * layers * shard + 2 * 2 * 32
    assert with_sinks.step_ms_median == pytest.approx(without.step_ms_median, rel=1e-4)
    note = "a pass over outputs, by which sinks enter them, and one for their gradient are not simulated"
    assert note in with_sinks.notes and note not in without.notes
    assert with_sinks.record.validation_error is None and "no sinks" in with_sinks.validation


def test_gpus_that_share_heads_have_their_own_sinks() -> None:
    with_sinks, without = (
        Known(simulated_step("train.tensor_parallel=2", f"sinks={each}")) for each in ("true", "false")
    )
    assert with_sinks.parameters == without.parameters + 32 * 32
    assert with_sinks.comm_bytes_per_gpu - without.comm_bytes_per_gpu == 3 * 32 * 4 * (2 + 2 + 4)


def simulated_step(*overrides: str) -> Record:
    return simulate_training(point(*TRAINED, *overrides))


def test_gpt_oss_has_sinks() -> None:
    """As in its configuration: in every layer, windowed or not."""
    request = point("model=gpt_oss_20b", "gpus=16", "seqlen=32k", "method=ring", "cluster=h100_ndr400")
    assert request.asked().sinks and of_kind(Train, request.workload).model.sinks
    assert not point("model=llama3_8b", "gpus=16", "seqlen=32k", "method=ring").asked().sinks
    of_attention = point("model=gpt_oss_20b", "gpus=16", "seqlen=32k", "method=ring", "workload=attention")
    assert of_attention.asked().sinks


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_measured_training_steps_with_sinks(dtype: str, tmp_path: Path) -> None:
    """The gate, the rows of the last layer's attention, and the bytes, with whole parameters and shards of them."""
    usual = ("cluster=local", "gpus=2", "seqlen=100", "model=tiny", "iters=1", "warmup=0", "parts=false")
    each = (
        "method=ring train.recompute=none model.full_every=2 mask=window window=[20,0]",
        "method=ulysses train.parameters=sharded",
        "method=mesh train.recompute=full seed=3",
    )
    requests = [point(*usual, "sinks=true", f"dtype={dtype}", *one.split()) for one in each]
    for outcome in run_points(requests, folder=tmp_path, reuse=False):
        assert (outcome.record.status, outcome.record.error) == ("ok", None)
        record = Known(outcome.record)
        assert max(record.err_timed_out, record.err_timed_dq) < (2e-2 if dtype == "bfloat16" else 2e-6)
        assert record.err_timed_dq > 0 and record.sinks
        assert not problems_of(tmp_path / f"{record.run_id}.json")


def test_a_measured_training_step_sums_their_gradients(tmp_path: Path) -> None:
    """By a ring of 3, with all others: 4 heads in each of 2 layers."""
    usual = (
        "cluster=local",
        "gpus=3",
        "seqlen=90",
        "model=tiny",
        "iters=1",
        "warmup=0",
        "parts=false",
        "dtype=float32",
    )
    requests = [point(*usual, f"sinks={each}", "method=ring") for each in ("true", "false")]
    with_sinks, without = (Known(x.record) for x in run_points(requests, folder=tmp_path, reuse=False))
    assert with_sinks.parameters - without.parameters == 2 * 4
    assert with_sinks.comm_bytes_per_gpu - without.comm_bytes_per_gpu == pytest.approx(2 * 2 / 3 * 2 * 4 * 4, abs=1)
