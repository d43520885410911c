"""Simulated training steps: what runs beside what, what fits, and what is sent."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sp_bench import account
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.lower.transports import NCCL
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import Method
from sp_bench.point.choose import choose
from sp_bench.point.training import longest, simulate_training
from sp_bench.simulate import simulate
from sp_bench.simulate.beside import alone_s, beside, ring_traffic
from sp_bench.simulate.graph import build_graph
from sp_bench.workload import Train
from tests.support.typed import Known, of_kind
from tests.workload.requests import point

LLAMA = ("model=llama3_8b", "cluster=h100_ndr400", "dtype=bfloat16")


def step(*overrides: str) -> Known:
    return Known(simulate_training(point(*LLAMA, *overrides)))


@pytest.mark.parametrize("method", ["ring", "mesh", "ulysses"])
def test_a_step_is_its_parts(method: str) -> None:
    record = step(f"method={method}", "gpus=16", "seqlen=256k")
    assert (record.status, record.sharded, record.workload) == ("ok", True, "train")
    times = (record.forward_ms_median, record.backward_ms_median, record.update_ms_median)
    assert record.step_ms_median == pytest.approx(sum(times))
    parts = (record.attention_ms, record.dense_ms, record.loss_ms, record.gradient_sync_ms, record.optimizer_ms)
    assert record.step_ms_median == pytest.approx(sum(parts))
    assert record.exposed_comm_ms == pytest.approx(record.attention_exposed_ms + record.gradient_sync_ms)
    assert record.bound_ms <= record.step_ms_median
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    kinds = ("parameters", "gradients", "optimizer", "activations", "gathered", "loss", "attention")
    assert record.peak_mem_bytes_max == sum(getattr(record, f"{kind}_bytes") for kind in kinds)
    assert record.parameters_bytes == pytest.approx(4 * record.parameters / 16, rel=1e-6)
    flops = 6 * 7.5e9 * 2**18 + 3.5 * 32 * 2 * 2.0**36 * 4096
    assert record.mfu == pytest.approx(flops / (record.step_ms_median / 1e3) / 16 / 989.4e12, rel=0.01)


def test_recomputation_trades_time_for_memory() -> None:
    none, attention, full = (step("method=ring", "gpus=16", "seqlen=128k", f"train.recompute={r}") for r in RECOMPUTE)
    assert none.step_ms_median < attention.step_ms_median < full.step_ms_median
    assert none.activations_bytes > attention.activations_bytes > full.activations_bytes
    assert full.comm_bytes_per_gpu > attention.comm_bytes_per_gpu == none.comm_bytes_per_gpu


RECOMPUTE = ("none", "attention", "full")


def cluster_and_graph(nodes: int) -> tuple:
    """Ring on nodes of 4 GPUs."""
    request = point("model=none", "workload=attention", "method=ring", f"gpus={4 * nodes}", "cluster=h100_ndr400",
                    "cluster.gpus_per_node=4", "seqlen=64k", "dtype=bfloat16", "head_dim=128")  # fmt: skip
    method = of_kind(Method, request.method)
    problem = method.assigned(request.problem)
    plan = method.plan(problem, "forward", COMPUTE_BOUND)
    return request.cluster, problem, plan, build_graph(plan, problem, request.cluster, use_symmetry=False)


@pytest.mark.parametrize("nodes", [1, 2])
def test_beside_nothing_an_attention_takes_as_long_as_alone(nodes: int) -> None:
    cluster, problem, plan, graph = cluster_and_graph(nodes)
    alone = simulate(plan, problem, cluster)
    found = beside([graph], [cluster.network(problem.n)], 0.0, 1, 0.25)
    assert found.attention_s == pytest.approx(0.25 + alone.makespan_s)
    assert found.collective_s == 0
    np.testing.assert_allclose(found.busy_s, alone.busy_s)


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_shares_links_slows_both_and_no_more_than_one_after_the_other(nodes: int) -> None:
    cluster, problem, plan, graph = cluster_and_graph(nodes)
    network = cluster.network(problem.n)
    alone, sent = simulate(plan, problem, cluster).makespan_s, 2e9
    gather = alone_s([network], problem.n, sent, problem.n - 1)
    found = beside([graph], [network], sent, problem.n - 1, 0.0)
    assert alone <= found.attention_s <= alone + gather
    assert gather <= found.collective_s <= alone + gather
    assert found.attention_s > alone * 1.01 or found.collective_s > gather * 1.01


def test_a_ring_leaves_a_node_from_every_gpu() -> None:
    """So that it takes its bytes over the sum of the node's NICs, and its latencies."""
    cluster: Cluster = cluster_and_graph(2)[0]
    network = cluster.network(8)
    sent = [(target.tolist(), size.tolist()) for target, size in ring_traffic(network, 8, 8.0)]
    assert sent == [([1, 2, 3, 0, 5, 6, 7, 4], [6.0] * 8), ([4, 5, 6, 7, 0, 1, 2, 3], [2.0] * 8)]
    latency_s = 7 * (0.75 * 5e-6 + 0.25 * 20e-6)
    assert alone_s([network], 8, 8e9, 7) == pytest.approx(latency_s + max(6e9 / 3.7e11, 2e9 / 4.7e10))


def test_what_does_not_fit_is_refused_with_what_is_missing() -> None:
    with pytest.raises(
        RequestError, match=r"a rank needs .* GB and NVIDIA H100 SXM has 80: .* GB are missing. In GB: act"
    ):
        step("method=ring", "gpus=8", "seqlen=8M")
    with pytest.raises(RequestError, match="optimizer 64.2.*train.parameters=sharded on more GPUs would work"):
        step("method=ring", "gpus=8", "seqlen=8k", "train.parameters=replicated")
    full = ("method=ring", "gpus=8", "seqlen=16M", "train.recompute=full")
    works = "In GB: activations .*; a shorter seqlen, more GPUs, or train.offload=true would work"
    with pytest.raises(RequestError, match=works):
        step(*full)
    with pytest.raises(RequestError, match="In GB: .*; a shorter seqlen, or more GPUs, would work"):
        step(*full, "train.offload=true")


def test_a_measured_step_that_does_not_fit_is_refused_before_a_rank_starts() -> None:
    with pytest.raises(RequestError, match=r"GiB and this machine has .* free: .* are missing. In GiB: optimizer"):
        point("model=llama3_8b", "model.layers=3200", "method=ring", "gpus=2", "dtype=float32", "head_dim=128")


@pytest.mark.long
def test_max_that_is_refused_is_a_row(tmp_path) -> None:
    """The shortest sequence of a rank doesn't fit one GPU, as the states of 8B parameters don't."""
    command = [sys.executable, "-m", "sp_bench", "-m", *LLAMA, "method=ring", "gpus=1,8", "seqlen=max", "trace=0"]
    command += ["baseline=null", "logger=none", f"results_dir={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ring, 1 GPUs, seqlen 128: unsupported: seqlen=128 on gpus=1: a rank needs" in done.stdout


def test_memory_has_the_buffers_of_the_transport() -> None:
    """gloo needs buffers to reduce and scatter by its collectives that NCCL doesn't."""
    request = point("mode=simulate", "method=all_gather", "method.collectives=library", "gpus=4", "cluster=cpu_local",
                    "dtype=float32", "head_dim=64", "seqlen=4k",
                    "cluster.device.matmul_tflops={float32: 0.03}")  # fmt: skip
    choice = choose(request)
    gloo, nccl = (
        account.peak_bytes(choice.plans.values(), choice.problem, kind) for kind in (request.cluster.transport, NCCL)
    )
    assert simulate_training(request).attention_bytes == gloo
    assert gloo > nccl


def test_max_is_the_longest_that_fits() -> None:
    request = point(*LLAMA, "method=ring", "gpus=8", "seqlen=max")
    seqlen = request.problem.seqlen
    assert seqlen % (8 * 128) == 0
    assert Known(simulate_training(request)).peak_mem_bytes_max <= 80e9
    assert longest(request) == seqlen
    with pytest.raises(RequestError, match="GB are missing"):
        step("method=ring", "gpus=8", f"seqlen={seqlen + 8 * 128}")


def test_max_is_for_simulated_training() -> None:
    for overrides in (("model=none", "workload=attention", "cluster=h100_ndr400", "dtype=bfloat16"), ("mode=measure",)):
        with pytest.raises(RequestError, match="seqlen=max: is the longest sequence whose simulated training step"):
            point(*overrides, "gpus=8", "method=ring", "seqlen=max", "head_dim=128" if overrides[1:] else "head_dim=64")


def test_parameters_are_split_where_they_do_not_fit() -> None:
    for model, gpus, sharded in (("llama_1b", 8, False), ("llama3_8b", 8, True), ("llama_1b", 1, False)):
        method = "method=ring" if gpus > 1 else "method=reference"
        request = point(f"model={model}", *LLAMA[1:], method, f"gpus={gpus}", "seqlen=8k")
        assert of_kind(Train, request.workload).sharded is sharded


def test_a_device_without_figures_of_matrix_products_is_refused() -> None:
    with pytest.raises(RequestError, match="dtype=float16: there are no figures of matrix products for it on CPU"):
        simulate_training(point("mode=simulate", "gpus=2", "method=ring", "dtype=float16", "head_dim=64"))


def test_slow_ranks_are_refused() -> None:
    with pytest.raises(RequestError, match="stragglers: slow ranks are simulated for the attention only"):
        step("method=ring", "gpus=8", "seqlen=64k", "stragglers.ranks={3:1.5}")


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from sp_bench.point import resolve, run_points; from sp_bench.point.training import *;"
        "from sp_bench.cli.compose import Composer;"
        "request = resolve(Composer().compose(['model=llama3_8b', 'gpus=8', 'seqlen=64k', 'method=ring']));"
        "assert simulate_training(request).status == 'ok'; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def split(*overrides: str) -> Known:
    return Known(simulate_training(point("model=llama_1b", *LLAMA[1:], "method=ring", "seqlen=64k", *overrides)))


def test_with_tensor_parallelism_a_gpu_has_a_part_of_the_heads_and_matrices() -> None:
    whole, record = split("gpus=4"), split("gpus=8", "train.tensor_parallel=2")
    assert (record.gpus, record.heads, record.tensor_parallel) == (8, 16, 2)
    assert record.parameters == whole.parameters
    norms = 4 * (22 * 2 + 1) * 2048
    assert record.parameters_bytes == pytest.approx((whole.parameters_bytes + norms) / 2, abs=4)
    parts = (record.attention_ms, record.dense_ms, record.loss_ms, record.gradient_sync_ms, record.optimizer_ms)
    assert record.step_ms_median == pytest.approx(sum(parts) + record.tensor_sum_ms)
    assert record.exposed_comm_ms == pytest.approx(
        record.attention_exposed_ms + record.gradient_sync_ms + record.tensor_sum_ms
    )
    assert record.mfu == pytest.approx(whole.mfu * whole.step_ms_median / record.step_ms_median / 2, rel=1e-3)
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    assert record.bound_ms <= record.step_ms_median


def test_sums_over_tensor_parallel_gpus_are_rings_of_the_hidden_state() -> None:
    """Six in each layer with recomputation, one of the embedding and one of the head's input gradient."""
    record = split("gpus=8", "train.tensor_parallel=4")
    one = 2 * (2**16 / 2) * 2048 * 2 * 3 / 4
    assert record.tensor_sum_ms == pytest.approx((22 * 6 + 2) * 1e3 * (one / 3.7e11 + 6 * 5e-6), rel=1e-3)
    none = split("gpus=8", "train.tensor_parallel=4", "train.recompute=none")
    assert none.tensor_sum_ms == pytest.approx(record.tensor_sum_ms * (22 * 4 + 2) / (22 * 6 + 2))


def test_the_attentions_of_tensor_parallel_gpus_share_links() -> None:
    """One NIC for a node carries the transfers of all eight, at least two of each in a layer."""
    nodes = ("gpus=16", "cluster.gpus_per_node=8", "train.tensor_parallel=8", "heads=16", "seqlen=16k")
    own, one = split(*nodes), split(*nodes, "cluster.inter.nics_per_node=1")
    sent = 2 * 2**13 * 2048 / 8 * 2  # K and V of half the tokens
    waited = [record.attention_exposed_ms for record in (own, one)]
    assert waited[1] - waited[0] > 22 * 1e3 * 2 * (8 - 1) * sent / 4.7e10
    assert one.comm_bytes_per_gpu == own.comm_bytes_per_gpu


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.tensor_parallel=3",), "train.tensor_parallel=3: must divide gpus=8"),
        (("train.tensor_parallel=8", "kv_heads=4"), "train.tensor_parallel=8: must divide kv_heads=4"),
        (("train.tensor_parallel=8", "model.ffn=5500"), "train.tensor_parallel=8: must divide ffn=5500"),
        (("train.tensor_parallel=0",), "train.tensor_parallel=0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        split("gpus=8", *overrides)


def test_tensor_parallelism_is_not_measured() -> None:
    with pytest.raises(RequestError, match="train.tensor_parallel=2: is simulated only"):
        point("gpus=2", "method=ring", "train.tensor_parallel=2", "dtype=float32", "mode=measure", "cluster=local")


def test_data_parallel_groups_sum_gradients_over_all_ranks() -> None:
    """The attention is that of a group of its own; parameters are split over both groups."""
    alone, record = split("gpus=8", "train.parameters=sharded"), split("gpus=16", *SHARDED)
    assert (record.gpus, record.nodes, record.data_parallel, record.turns) == (16, 2, 2, 1)
    assert record.attention_ms == pytest.approx(alone.attention_ms, rel=0.02)
    assert record.parameters_bytes == pytest.approx(alone.parameters_bytes / 2, rel=1e-3)
    assert record.tokens_per_s == pytest.approx(2 * 2**16 / (record.step_ms_median / 1e3))
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected > alone.comm_bytes_per_gpu
    assert record.mfu == pytest.approx(alone.mfu * alone.step_ms_median / record.step_ms_median, rel=1e-6)
    assert record.comm_bytes_by_link["nic"] > 0 and not alone.comm_bytes_by_link.get("nic")
    # Replicated: the all-reduce of all gradients is over the ranks of both groups.
    whole = split("gpus=16", "train.data_parallel=2", "train.parameters=replicated")
    sent = 2 * 15 / 16 * 4 * whole.parameters
    assert whole.gradient_sync_ms >= 1e3 * sent / 8 / 4.7e10
    assert whole.comm_bytes_per_gpu - sent == pytest.approx(
        split("gpus=8", "train.parameters=replicated").comm_bytes_per_gpu - sent * 16 / 15 * 7 / 8
    )


SHARDED = ("train.parameters=sharded", "train.data_parallel=2")


def test_a_collective_over_all_groups_takes_the_slowest_links() -> None:
    """Gathers of a node's own group cross no NIC; those of two groups on two nodes do, an eighth of the ring a NIC."""
    long = ("seqlen=8k", *SHARDED)
    fast, slow = split("gpus=16", *long), split("gpus=16", *long, "cluster.inter.bytes_per_s=1e9")
    shard = slow.parameters_bytes / 4
    sent = 15 * shard * (2 + 4 + 2)  # gathered twice in bf16, reduced once in fp32
    assert slow.gradient_sync_ms > 0.9 * 1e3 * (sent / 8 / 1e9 - slow.attention_ms / 1e3 - slow.dense_ms / 1e3)
    assert slow.step_ms_median > 2 * fast.step_ms_median
    assert slow.bound_by == "nic" and slow.bound_ms <= slow.step_ms_median


def test_a_step_of_several_turns_is_one_turn_so_many_times() -> None:
    one, four = (split("gpus=16", *SHARDED, *more) for more in ((), ("train.batch_tokens=512k",)))
    assert four.turns == 4
    assert four.forward_ms_median == pytest.approx(4 * one.forward_ms_median)
    assert four.backward_ms_median == pytest.approx(4 * one.backward_ms_median)
    assert four.update_ms_median == pytest.approx(one.update_ms_median)
    assert four.tokens_per_s > one.tokens_per_s and four.mfu > one.mfu
    assert four.peak_mem_bytes_max == one.peak_mem_bytes_max
    assert four.bound_ms <= four.step_ms_median
    parts = (four.attention_ms, four.dense_ms, four.loss_ms, four.gradient_sync_ms, four.optimizer_ms)
    assert four.step_ms_median == pytest.approx(sum(parts))


def test_float8_products_are_twice_as_fast_less_their_casts() -> None:
    """At the rate of float8; each operand is read twice and written once on top, by two kernels."""
    wide, narrow = split("gpus=8"), split("gpus=8", "train.linears=float8")
    assert narrow.attention_ms == pytest.approx(wide.attention_ms) and narrow.loss_ms == pytest.approx(wide.loss_ms)
    tokens, matrices = 2**16 / 8, [(2048, 2048)] * 4 + [(2048, 5504)] * 2 + [(5504, 2048)]
    flops = 4 * 2 * tokens * sum(a * b for a, b in matrices)  # forward, recomputed, backward
    cast = sum(3 * (tokens + b) * a + tokens * b for a, b in matrices) * 5
    launched = 2 * (2 + 2 + 3) * len(matrices) * 5e-6
    saved_s = 22 * (flops * (1 / 794.5e12 - 1 / 1589e12) - cast / 2.98e12 - launched)
    assert wide.dense_ms - narrow.dense_ms == pytest.approx(1e3 * saved_s, rel=1e-6)
    with pytest.raises(RequestError, match=r"dtype=float8: there are no figures of matrix products .*A100"):
        split("gpus=8", "cluster=a100_hdr200", "train.linears=float8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("gpus=8", "train.data_parallel=3"), "data_parallel=3: must divide gpus=8; 1, 2, 4, 8 would work"),
        (
            ("gpus=8", "train.tensor_parallel=2", "train.data_parallel=8"),
            "data_parallel=8: must divide gpus=8 / train.tensor_parallel=2; 1, 2, 4 would work",
        ),
        (
            ("gpus=8", "train.data_parallel=2", "train.batch_tokens=100k"),
            "batch_tokens=102400: must be a multiple of 131072",
        ),
        (("gpus=24", "train.data_parallel=2"), "has groups of 12 GPUs, and nodes of h100_ndr400 have 8"),
    ],
)
def test_groups_that_cannot_be_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        split(*overrides)


@pytest.mark.parametrize("key", ["data_parallel=2", "batch_tokens=64", "linears=float8"])
def test_what_is_simulated_only_is_not_measured(key: str) -> None:
    with pytest.raises(RequestError, match=f"train.{key}: is simulated only"):
        point("gpus=2", "method=ring", f"train.{key}", "dtype=float32", "mode=measure", "cluster=local")


def test_ranks_that_share_cores_take_longer_and_wait_for_collectives() -> None:
    """8 ranks on 2 cores: what all compute at once takes four times as long as on 2 ranks with as many tokens each."""

    def on_cores(gpus: int, parameters: str) -> Known:
        return Known(simulate_training(
            point("mode=simulate", "method=ring", f"gpus={gpus}", "cluster=shaped", "cluster.cores=2", "dtype=float32",
                  "cluster.device.matmul_tflops={float32: 0.03}", f"seqlen={512 * gpus}", "head_dim=64",
                  f"train.parameters={parameters}")
        ))  # fmt: skip

    two, eight, sharded = on_cores(2, "replicated"), on_cores(8, "replicated"), on_cores(8, "sharded")
    assert eight.dense_ms == pytest.approx(4 * two.dense_ms)
    assert eight.loss_ms == pytest.approx(4 * two.loss_ms)
    assert sharded.sharded and not eight.sharded
    assert sharded.attention_ms == pytest.approx(eight.attention_ms), "nothing runs beside it"
    assert sharded.gradient_sync_ms > 0
    hosts = eight.config["cluster"]["hosts"]
    sent_s = 7 / 4 * eight.gradients_bytes / (hosts["payload_share"] * hosts["link_bytes_per_s"])
    # Cores are idle meanwhile: its messages have the latency of idle hosts.
    assert eight.gradient_sync_ms == pytest.approx(1e3 * (sent_s + 14 * hosts["latency_s"]), rel=0.01)
    for record in (two, eight, sharded):
        parts = (record.attention_ms, record.dense_ms, record.loss_ms, record.gradient_sync_ms, record.optimizer_ms)
        assert record.step_ms_median == pytest.approx(sum(parts))
