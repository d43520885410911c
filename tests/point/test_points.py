"""Points: what their id depends on, which tile is taken and why, what is told apart."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from sp_bench import records
from sp_bench.cli.compose import Composer
from sp_bench.cli.rows import busy_cores
from sp_bench.cli.words import overlap
from sp_bench.cluster import Cluster
from sp_bench.cluster.topology import Fabric
from sp_bench.errors import RequestError
from sp_bench.machine import at_most_all_cores
from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import ALL_PHASES, COMPUTE_ONLY, CORE_WINDOW, CORES, STEP, Row, Samples
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.point import Request, masks, resolve, run_points
from sp_bench.point import choose as choosing
from sp_bench.point.choose import DeviceMemoryError, choose
from sp_bench.point.measured_record import _ran_on, outcome_of
from sp_bench.point.simulated import simulate_point
from sp_bench.point.simulations import simulation_of
from sp_bench.point.timed import cores
from sp_bench.records import identity
from sp_bench.records.quantities import Breakdown, Setup
from sp_bench.simulate import Run, exactly, simulate
from sp_bench.simulate.graph import NEARLY
from sp_bench.workload import GateErrors
from tests.support.made_records import made
from tests.support.points import point
from tests.support.typed import Known, there

T = TypeVar("T")


def test_run_id_is_what_the_numbers_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    base = point("gpus=8", "seqlen=64k")
    assert base.run_id == point("gpus=8", "seqlen=65536").run_id != point("gpus=16", "seqlen=64k").run_id
    for same in ("results_dir=elsewhere", "logger=none", "timeout_s=9", "baseline=null", "alone=[3]", "trace=0"):
        assert point("gpus=8", "seqlen=64k", same).run_id == base.run_id, same
    for other in ("seed=1", "method.tile=[2,4]", "cluster.intra.latency_s=1.0e-6", "wire_dtype=float32"):
        assert point("gpus=8", "seqlen=64k", other).run_id != base.run_id, other
    local = ("cluster=local", "gpus=2", "seqlen=1k", "dtype=float32")
    measured = point(*local).run_id
    assert point(*local, "mode=simulate", "head_dim=64").run_id != measured
    simulated = ("cluster=local", "mode=simulate", "gpus=2", "seqlen=1k", "dtype=float32", "head_dim=64")
    assert point(*simulated, "cluster.cores=1").run_id != point(*simulated, "cluster.cores=2").run_id
    monkeypatch.setattr(identity, "machine", lambda: {"host": "another"})
    assert point(*local).run_id != measured
    assert point("gpus=8", "seqlen=64k").run_id == base.run_id, "a simulated number is the same everywhere"


def test_any_key_of_a_cluster_can_be_given() -> None:
    """Those that its file leaves out or has as null, too."""
    changes = ("cluster.device.fold_bytes_per_s=1e11", "cluster.fabric.nodes_per_leaf=4", "cluster.cores=3")
    cluster = point("gpus=16", "seqlen=64k", "cluster=h100_ndr400", *changes).cluster
    assert (cluster.device.fold_bytes_per_s, cluster.cores) == (1e11, 3)
    assert cluster.topology.fabric == Fabric(nodes_per_leaf=4)


def test_a_tile_that_does_not_fit_is_not_taken() -> None:
    all_of_them = "gpus=64", "seqlen=256k", "every_variant=true"
    free = choose(point(*all_of_them))
    peaks = {(row["tile_a"], row["tile_b"]): row["peak_mem_bytes"] for row in free.candidates or ()}
    taken = there(free.method.tile_shape(64))
    limit = peaks[taken] - 1
    tight = choose(point(*all_of_them, f"cluster.device.memory_bytes={limit}"))
    assert peaks[there(tight.method.tile_shape(64))] <= limit
    assert tight.total_s >= free.total_s
    refused = {(r["tile_a"], r["tile_b"]) for r in tight.candidates or () if "refused" in r}
    assert refused == {tile for tile, peak in peaks.items() if peak > limit}
    with pytest.raises(DeviceMemoryError, match="mesh holds at least .* GB on a rank"):
        choose(point("gpus=64", "seqlen=256k", "cluster.device.memory_bytes=1000"))


@pytest.mark.parametrize(
    "overrides",
    [
        "gpus=32 seqlen=64k",
        "gpus=24 seqlen=96k causal=false",
        "gpus=16 seqlen=16k kv_seqlen=256k kv_heads=8",
        "gpus=16 seqlen=64k kv_seqlen=1k causal=false method=usp",
        *(f"gpus=16 kv_heads=4 method={name}" for name in ("mesh", "double_ring", "all_gather", "usp", "startrail")),
    ],
)
def test_bounds_are_bounds(overrides: str) -> None:
    """No variant is simulated faster than the bound that it would have been left out by."""
    choice = choose(point(*overrides.split()))
    rows = choice.candidates or []
    assert len(rows) > 1
    for row in rows:
        assert row["step_ms"] is None or row["step_ms"] >= row["bound_ms"] * (1 - 1e-9)
    taken = choice.method.variant(choice.problem.n)
    assert choice.total_s * 1e3 == pytest.approx(min(row["step_ms"] for row in rows if row["step_ms"]))
    assert choice.total_s * 1e3 in [row["step_ms"] for row in rows if row["variant"] == taken]
    assert choice.problem == choice.method.assigned(choice.problem), "the problem is as the variant assigns it out"


def watched(monkeypatch: pytest.MonkeyPatch, of: Callable[[Run, Cluster], T]) -> list[T]:
    """Something of each simulation that choosing a variant takes, as they come."""
    found: list[T] = []

    def simulated(plan: Plan, problem: Problem, cluster: Cluster, **how: bool) -> Run:
        run = simulate(plan, problem, cluster, **how)
        found.append(of(run, cluster))
        return run

    def with_all_ranks(run: Run, problem: Problem, cluster: Cluster, most_s: float) -> Run:
        exact = exactly(run, problem, cluster, most_s)
        found.extend([of(exact, cluster)] if exact.graph is not run.graph else [])
        return exact

    monkeypatch.setattr(choosing, "simulate", simulated)
    monkeypatch.setattr(choosing, "exactly", with_all_ranks)
    return found


def test_noise_is_drawn_for_the_chosen_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants are compared without noise, where few ranks stand for all. One that is asked for is simulated once."""
    noisy = watched(monkeypatch, lambda run, cluster: cluster.stragglers.jitter > 0)
    asked = ("method=usp", "gpus=16", "seqlen=64k")
    plain, found = choose(point(*asked)), choose(point(*asked, "stragglers.jitter=0.05"))
    assert noisy.count(True) == len(found.runs) == 2
    assert (found.method, found.problem, found.candidates) == (plain.method, plain.problem, plain.candidates)
    assert found.total_s != plain.total_s
    noisy.clear()
    alone = choose(point(*asked, "method.ulysses=2", "method.layout=striped", "stragglers.jitter=0.05"))
    assert noisy == [True, True] and alone.candidates is None


@pytest.mark.parametrize(
    "asked",
    [("method=ring", "gpus=64", "seqlen=256k"), ("method=mesh", "gpus=64", "seqlen=1M")],
    ids=["layouts", "tiles"],
)
def test_few_ranks_are_simulated_to_rank_variants(asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of a node at most for each of its GPUs. All ranks of a variant only if they differ and it is chosen."""
    kinds = watched(monkeypatch, lambda run, cluster: run.graph.quotient.ranks.size)
    found = choose(point(*asked))
    assert len(kinds) >= 4 and sum(each > 8 for each in kinds) == len(found.runs) == 2
    ranked_ms = min(row["step_ms"] for row in found.candidates or [] if row["step_ms"])
    assert found.exact and found.total_s * 1e3 == pytest.approx(ranked_ms, rel=NEARLY)


STRIPED = "method.layout=striped"
"""A layout that is the same for all phases: auto may choose another for each."""


@pytest.mark.parametrize(
    "method", [f"ring {STRIPED}", "ulysses", f"mesh method.tile=[4,4] {STRIPED}", f"all_gather {STRIPED}"]
)
def test_a_simulated_backward_is_that_of_both(method: str) -> None:
    only, both, forward = (
        simulate_point(point(f"phase={phase}", "gpus=16", "seqlen=64k", *f"method={method}".split()))[0]
        for phase in ("backward", "forward_backward", "forward")
    )
    assert only.forward_ms_median is None
    assert only.step_ms_median == only.backward_ms_median == pytest.approx(both.backward_ms_median)
    for name in ("comm_bytes_per_gpu", "comm_bytes_expected", "comm_bytes_lower_bound", "bound_ms"):
        assert getattr(only, name) == pytest.approx(getattr(both, name) - getattr(forward, name)), name
    assert Known(only).peak_mem_bytes_expected <= Known(both).peak_mem_bytes_expected
    assert (only.status, only.workload) == ("ok", "attention")


def test_an_error_in_one_point_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [point("gpus=8", "seqlen=64k", f"method={name}") for name in ("ring", "mesh")]
    monkeypatch.setattr(
        "sp_bench.point.simulated.check_all", lambda plans, _: 1 / 0 if "rings" in plans["forward"].lanes else None
    )
    outcomes = run_points(requests, folder=tmp_path, reuse=False)
    assert [outcome.record.status for outcome in outcomes] == ["ok", "failed"]
    assert outcomes[1].record.error == "ZeroDivisionError: division by zero"
    assert len(records.read_all(tmp_path)) == 2


def test_a_simulated_point_that_was_refused_is_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_small = point("gpus=8", "seqlen=64k", "method=ring", "cluster.device.memory_bytes=1000")
    too_large = point("gpus=3072", "seqlen=6M", "method=zigzag", "method.layout=zigzag")
    short_of_memory = point("gpus=4", "seqlen=8k", "method=ring")
    asked = [too_small, too_large, short_of_memory]
    simulated = list[str]()

    def ours(request: Request) -> Any:
        simulated.append(request.run_id)
        if request is short_of_memory:
            raise MemoryError
        return simulation_of(request)

    monkeypatch.setattr("sp_bench.point.simulation_of", ours)
    first = run_points(asked, folder=tmp_path, reuse=True)
    assert [outcome.record.status for outcome in first] == ["oom", "unsupported", "failed"]
    again = run_points(asked, folder=tmp_path, reuse=True)
    assert [outcome.reused for outcome in again] == [True, True, False], "another time there may be more memory"
    assert [outcome.record.error for outcome in again] == [outcome.record.error for outcome in first]
    assert simulated == [request.run_id for request in (*asked, short_of_memory)]


def test_a_record_tells_the_variant_and_the_busiest_rank(tmp_path: Path) -> None:
    requests = [point("gpus=8", "seqlen=64k", "method=startrail", "method.team=2", "method.layout=striped")]
    requests += [point("gpus=8", "seqlen=64k", "causal=false", "method=ulysses")]
    fused = ("method.fuse=true", "method.layout=zigzag")
    requests += [point("gpus=8", "seqlen=64k", *fused, "method=all_gather", "method.stride=32")]
    requests += [point("gpus=8", "seqlen=64k", *fused, "method=zigzag")]
    outcomes = run_points(requests, folder=tmp_path, reuse=False)
    startrail, ulysses, gather, ring = (outcome.record for outcome in outcomes)
    assert (startrail.variant, ulysses.variant, ring.variant) == ("C=2", None, "1x8")
    assert gather.variant == "stride 32 fused", "a ring has nothing to fuse"
    assert startrail.candidates is ulysses.candidates is None
    busiest = Known(startrail).comm_bytes_busiest_gpu
    assert busiest > Known(startrail).comm_bytes_per_gpu == startrail.comm_bytes_expected
    assert ulysses.comm_bytes_busiest_gpu == ulysses.comm_bytes_per_gpu == ulysses.comm_bytes_lower_bound
    assert records.read_all(tmp_path)[0].schema_version == records.SCHEMA_VERSION


def test_each_rank_s_time_stands_beside_the_record(tmp_path: Path) -> None:
    slow = "stragglers.ranks={3: 1.5}"
    (outcome,) = run_points([point("gpus=8", "seqlen=64k", "method=ring", slow)], folder=tmp_path, reuse=False)
    ranks = json.loads((tmp_path / f"{outcome.record.run_id}.ranks.json").read_text())
    assert {name: len(times) for name, times in ranks.items()} == {
        f"{phase}_{what}_ms": 8 for phase in ("forward", "backward") for what in ("busy", "exposed", "idle")
    }
    for phase, total in (
        ("forward", Known(outcome.record).forward_ms_median),
        ("backward", Known(outcome.record).backward_ms_median),
    ):
        busy, exposed, idle = (np.array(ranks[f"{phase}_{what}_ms"]) for what in ("busy", "exposed", "idle"))
        np.testing.assert_allclose(busy + exposed + idle, total)
        assert busy.argmax() == 3
    assert len(records.read_all(tmp_path)) == 1


def test_outcomes_are_in_the_order_asked_though_some_are_there_already(tmp_path: Path) -> None:
    ring, mesh, pass_q = (point("gpus=8", "seqlen=64k", f"method={name}") for name in ("ring", "mesh", "pass_q"))
    run_points([mesh], folder=tmp_path, reuse=True)
    outcomes = run_points([ring, mesh, pass_q], folder=tmp_path, reuse=True)
    assert [(o.record.method, o.reused) for o in outcomes] == [("ring", False), ("mesh", True), ("pass_q", False)]


def record(low: float, high: float, iters: int = 9) -> records.Record:
    return made(mode="measure", step_ms_median=low, step_ms_ci95_low=low, step_ms_ci95_high=high, iters=iters)


def test_overlapping_intervals_are_not_ranked() -> None:
    assert overlap(record(1.0, 2.0), record(1.9, 3.0))
    assert not overlap(record(1.0, 2.0), record(2.1, 3.0))
    assert overlap(record(1.0, 1.0, iters=1), record(9.0, 9.0, iters=1)), "one iteration says nothing"


@pytest.mark.parametrize(
    ("overall", "worst_head", "wrong"),
    [
        ({"out": 1e-7}, {"out": 2e-6}, ""),
        ({"out": 3e-6}, {"out": 3e-6}, "out is off by 3.0e-06 (at most 2e-06)"),
        ({"dq": 1e-6}, {"dq": 9e-6}, "dq is off by 9.0e-06 (at most 8e-06)"),
        ({"dk": float("nan")}, {}, "dk is off by nan (at most 2e-06)"),
    ],
)
def test_the_gate(overall: dict[str, float], worst_head: dict[str, float], wrong: str) -> None:
    errors = GateErrors(overall=overall, worst_head=worst_head)
    assert errors.wrong("float32") == RankResult(gate=errors).wrong("float32") == wrong


@pytest.mark.parametrize(
    ("keys", "dk", "says"),
    [
        (
            "method=ring dtype=bfloat16",
            1.1e-2,
            "; sums are rounded to bfloat16 at each hop: .* wire_dtype=float32 works",
        ),
        ("method=ring dtype=bfloat16", 0.5, ""),
        ("method=ring dtype=bfloat16 wire_dtype=float32", 1.1e-2, ""),
        ("method=ring dtype=float32", 3e-6, ""),
        ("method=ulysses dtype=bfloat16", 1.1e-2, ""),
        ("method=tokenring phase=forward dtype=bfloat16", 1.1e-2, ""),
    ],
)
def test_where_sums_are_rounded_on_their_way_the_gate_says_what_may_work(keys: str, dk: float, says: str) -> None:
    """Larger errors than roundings make, and those of plans that send no sums, have another reason."""
    request = point(*keys.split(), "gpus=4", "cluster=local", "device=cpu", "seqlen=1k")
    ranks = [RankResult(gate=GateErrors(overall={"out": 1e-9, "dk": dk}))] * 4
    found = outcome_of(request, choose(request), ranks, {"host": [0, 1, 2, 3]}, "now").record
    assert found.status == "incorrect"
    assert re.fullmatch(rf"the correctness gate: dk is off by \S+ \(at most \S+\){says}", found.error or "")


@pytest.mark.parametrize(
    "result",
    [
        RankResult(gate=GateErrors(overall={"dk": 1e-3}), finite=False),
        RankResult(gate=GateErrors(overall={"dk": 1.1e-2}, worst_head={"dk": 0.9})),
        RankResult(gate=GateErrors(overall={"dk": 1.1e-2}, lost={"dk": 1})),
    ],
)
def test_it_says_so_of_no_other_failure(result: RankResult) -> None:
    request = point("method=ring", "dtype=bfloat16", "gpus=4", "cluster=local", "device=cpu", "seqlen=1k")
    found = outcome_of(request, choose(request), [result] * 4, {"host": [0, 1, 2, 3]}, "now").record
    assert found.status == "incorrect" and "wire_dtype" not in (found.error or "")


def test_results_that_are_not_finite_are_wrong() -> None:
    assert RankResult(finite=False).wrong("float32") == "a timed result is not finite"


def test_a_record_has_the_least_of_all_ranks_shares_and_says_what_was_not_compared() -> None:
    """Ranks' GPUs may differ: transfers take what the least of them gives."""
    request = point("method=ring", "gpus=2", "cluster=local", "device=cpu", "seqlen=1k")
    timed = GateErrors(seqlen=64, uncompared="memory ran out on 1 of 2 ranks")
    ranks = [RankResult(kernel="k", sm_margin=m, lane_ctas=ctas, timed=timed) for m, ctas in ((16, 32), (8, 16))]
    setup, notes = _ran_on(request, Setup(), ranks)
    assert (setup.sm_margin, setup.lane_ctas) == (8, 16)
    assert notes[-1] == "no rows of what was timed were compared with exact ones: memory ran out on 1 of 2 ranks"
    setup, notes = _ran_on(request, Setup(), [RankResult()] * 2)
    assert setup.sm_margin is setup.lane_ctas is None and not any("compared" in note for note in notes)


def test_a_record_of_graphs_says_whether_nccl_registers_buffers() -> None:
    """It does of captured transfers, unless told otherwise."""
    request = point("method=ring", "gpus=2", "cluster=h100_ndr400", "mode=simulate", "cuda_graph=true")
    for device, value in (({}, "1"), ({"NCCL_GRAPH_REGISTER": "0"}, "0")):
        setup, _ = _ran_on(request, Setup(transport="nccl, CUDA graph"), [RankResult(device=device)] * 2)
        assert setup.transport == f"nccl, CUDA graph, NCCL_GRAPH_REGISTER={value}"


def test_cores_are_counted_once_for_each_machine() -> None:
    """Three ranks on two of them; no transfers were timed alone, and of a GPU nothing is known."""
    core_s = [[1.0, 3.0], [1.1, 3.1], [10.0, 20.0]]  # the second rank tells a tick later
    compute_only_s = [[0.5, 0.5], [0.6, 0.4], [7.0, 7.0]]
    window_s = [[2.0, 4.0], [2.5, 4.5], [6.0, 12.0]]
    rows = [
        Row(rank, iteration, ALL_PHASES, part, seconds[rank][iteration])
        for part, seconds in ((CORES[STEP], core_s), (CORES[COMPUTE_ONLY], compute_only_s), (CORE_WINDOW, window_s))
        for rank in range(3)
        for iteration in range(2)
    ]
    found = cores(Breakdown(), Samples.of(rows), ["a", "a", "b"])
    assert found.core_ms_mean == pytest.approx(17e3)
    assert found.core_window_ms_mean == pytest.approx(6e3)
    assert found.compute_only_core_ms_mean == pytest.approx(7.5e3)
    assert found.communication_only_core_ms_mean is None
    assert cores(Breakdown(), Samples.of([]), ["a"]).core_ms_mean is None


@pytest.mark.parametrize(
    ("window_ms", "core_ms", "transfers_ms", "cell"),
    [
        (2000.0, 3720.0, 740.0, "1.86 (for blocks alone 1.20, for transfers alone 0.37)"),
        (2000.0, 3720.0, 40.0, "1.86"),
        (2000.0, 90.0, 40.0, "-"),
        (20.0, 3720.0, 740.0, "-"),
    ],
)
def test_busy_cores_are_shown_where_ticks_can_tell(
    window_ms: float, core_ms: float, transfers_ms: float, cell: str
) -> None:
    """By the time that they were counted in, whatever the median of the steps is."""
    alone = {"compute_only_core_ms_mean": 2400.0, "communication_only_core_ms_mean": transfers_ms}
    times = {"core_window_ms_mean": window_ms, "core_ms_mean": core_ms, **alone}
    assert busy_cores(made(step_ms_median=1500.0, iters=5, **times)) == cell


def test_no_more_cores_are_busy_than_there_are() -> None:
    """The mean of the core time over the median of the steps was 2.42 on two cores where iterations differ."""
    window_s = np.array([1.0, 1.0, 1.0, 4.0, 5.0])
    parts = (CORES[STEP], 2 * window_s), (CORE_WINDOW, window_s)
    rows = [Row(0, i, ALL_PHASES, part, float(s[i])) for part, s in parts for i in range(len(window_s))]
    found = cores(Breakdown(), Samples.of(rows), ["a"])
    means = {"core_ms_mean": found.core_ms_mean, "core_window_ms_mean": found.core_window_ms_mean}
    assert busy_cores(made(step_ms_median=1000.0, iters=5, **means)) == "2.00"


def test_ticks_count_no_more_than_all_cores() -> None:
    all_cores = os.cpu_count() or 1
    assert at_most_all_cores(0.3 * all_cores + 0.02, 0.3) == pytest.approx(0.3 * all_cores)
    assert at_most_all_cores(0.1, 0.3) == 0.1


def test_a_measured_point_has_its_busy_cores(tmp_path: Path) -> None:
    point = ["method=ring", "gpus=1", "cluster=local", "device=cpu", "seqlen=512", "heads=2", "head_dim=32"]
    with Composer() as composer:
        request = resolve(composer.compose([*point, "dtype=float32", "iters=3", "logger=none"]))
    found = run_points([request], folder=tmp_path, reuse=False)[0].record
    assert found.core_ms_mean is not None
    assert found.core_window_ms_mean
    assert found.core_ms_mean <= found.core_window_ms_mean * (os.cpu_count() or 1) * (1 + 1e-9)


def test_a_kernel_that_refuses() -> None:
    with pytest.raises(RequestError, match=r"kernel.nam: there is no such key"):
        point("kernel.nam=3")


def test_the_config_is_read_and_documents_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's fields, the run_id and the problem come from the same reading."""
    drawn: list[int] = []
    draw = masks.lengths_of
    monkeypatch.setattr(masks, "lengths_of", lambda data, seqlen, seed: drawn.append(seed) or draw(data, seqlen, seed))
    request = point("method=usp", "gpus=8", "seqlen=64k", "mask=document", "data=short", "seed=3")
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    assert outcome.record.status == "ok" and outcome.record.documents
    assert drawn == [3]
