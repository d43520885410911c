"""Executions from one thread in plan order, by real ranks: without a GPU on gloo, with one on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sp_bench import account
from sp_bench.measure.devices import Devices
from sp_bench.measure.pool import RankPool
from sp_bench.plan.method import PHASES
from sp_bench.run import nccl
from sp_bench.run.nccl import NcclTransport, transport_for
from sp_bench.run.transport import AloneTransport, GlooTransport, Turn
from tests.run import device_jobs
from tests.support.attention_cases import BOUNDS, Case, of_one_batch_entry, relative
from tests.support.marks import NEEDS_A_GPU
from tests.support.problems import all_methods, splittable_problem
from tests.support.ranks import Ranks


def cases(n: int, dtype: str = "float32", wire: str = "") -> list[Case]:
    """Every method in every variant; from one to the next another layout and mask."""
    found = []
    for i, method in enumerate(all_methods(splittable_problem(n))):
        layout = ("striped", "contiguous", "zigzag")[i % 3]
        layout = layout if layout in method.layouts else method.layouts[0]
        options = tuple((k, v) for k, v in vars(method).items() if k != "layout")
        case = Case(
            n=n, method=method.name, options=options, layout=layout, causal=i % 4 != 3, heads=2 * n, kv_heads=n,
            dtype=dtype, wire_dtype=wire,
        )  # fmt: skip
        found.append(case)
    return found + of_one_batch_entry(found)


def assert_exact(wanted: Iterable[Case], answers: list[dict[Case, Any]]) -> None:
    for case in wanted:
        errors = [relative(shares) for shares in zip(*(answer[case] for answer in answers[: case.n]), strict=True)]
        assert max(errors) <= max(BOUNDS[case.dtype], BOUNDS[case.wire_dtype or case.dtype]), case


@pytest.mark.parametrize(
    ("n", "kind"), [(4, "gloo"), (4, "through the host"), (4, "a group for each lane"), (6, "a group for each lane")]
)
def test_plan_order_from_one_thread_does_not_deadlock(ranks: Ranks, n: int, kind: str) -> None:
    """Though it waits in each transfer: the first operation that has not ended can always go on.

    In batches, as NCCL takes them, each lane has a group of its own. The bytes counted are the plan's.
    """
    wanted = cases(n)
    answers = ranks.run(device_jobs.in_plan_order, wanted, kind)[:n]
    assert_exact(wanted, [{case: errors for case, (errors, _) in answer.items()} for answer in answers])
    for case in wanted:
        volumes = [account.volume(case.built.plan(case.problem, p, case.costs), case.problem) for p in PHASES]
        for rank, answer in enumerate(answers):
            assert Counter(answer[case][1]) == sum((Counter(v.of(rank)) for v in volumes), Counter()), case


def test_a_batch_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lane's group, receives and sends together, waited for; nothing that lies in another order is sent."""
    waited: list[int] = []

    class Work:
        def wait(self) -> None:
            waited.append(1)

    batches: list[list[Any]] = []
    monkeypatch.setattr(
        dist, "P2POp", lambda op, x, group, group_peer: (op.__name__, group, group_peer, tuple(x.shape))
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: batches.append(batch) or [Work()])
    transport = NcclTransport(None, lanes=["lane 0", "lane 1"])
    x = torch.zeros(2, 3)
    keys = [("kv", "kv", "k"), ("kv", "kv", "v")]
    transport.exchange(Turn(1, 0), [(5, (x, x))], [(7, (x, x))], keys)
    assert batches == [[("irecv", "lane 1", 5, (2, 3))] * 2 + [("isend", "lane 1", 7, (2, 3))] * 2]
    assert waited == [1]
    assert dict(transport.sent_bytes) == dict.fromkeys(keys, 24)
    with pytest.raises(ValueError, match=r"\(3, 2\) would be sent in the order of its strides \(1, 3\)"):
        transport.exchange(Turn(0, 1), [], [(7, (x.T,))], keys[:1])


def test_communicators_are_made_in_one_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)

    def new_group(ranks: list[int], **options: Any) -> str:
        made.append({"ranks": ranks, **options})
        return options["group_desc"]

    world = "all"
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(nccl, "_groups", {})
    monkeypatch.setattr(nccl, "_default_group", lambda: world)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    device = torch.device("cuda", 1)
    assert nccl.lane_groups(world, device, 2, None) == ["sp_bench lane 0", "sp_bench lane 1"]  # pyright: ignore
    assert nccl.lane_groups(world, device, 3, None)[2] == "sp_bench lane 2"  # pyright: ignore
    assert nccl.lane_groups(world, device, 1, None) == ["sp_bench lane 0"]  # pyright: ignore
    assert [m["group_desc"] for m in made] == ["sp_bench lane 0", "sp_bench lane 1", "sp_bench lane 2"]
    monkeypatch.setattr(nccl, "_default_group", lambda: "another default group")
    assert nccl.lane_groups(world, device, 1, timedelta(seconds=9)) == ["sp_bench lane 0"]  # pyright: ignore
    assert len(made) == 4, "communicators of a default group that is gone are gone too"
    assert made[3]["pg_options"]._timeout == made[3]["timeout"] == timedelta(seconds=9)
    for options in made:
        assert (options["backend"], options["ranks"], options["device_id"]) == ("nccl", [0, 1, 2], device)
        assert options["pg_options"].is_high_priority_stream
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: made.append({"joined": group, "on": device_ids}))
    assert nccl.lane_groups(world, device, 2, None) == [world, world], "a part of all ranks"  # pyright: ignore
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 0, 1])
    assert nccl.lane_groups(world, device, 1, None) == [world], "in another order"  # pyright: ignore
    assert made[4:] == [{"joined": world, "on": [1]}] * 2


def test_without_nccl_the_host_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    group, plans = object(), {}
    assert type(transport_for(None, torch.device("cuda", 0), plans)) is GlooTransport
    assert type(transport_for(group, torch.device("cpu"), plans)) is GlooTransport  # pyright: ignore
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    assert type(transport_for(group, torch.device("cuda", 0), plans)).__name__ == "HostTransport"  # pyright: ignore


def test_alone_a_rank_gets_what_it_sends() -> None:
    """As much as it is to get, and no more than that of what it sends."""
    transport = AloneTransport()
    into, sent = torch.full((2, 3), torch.nan), torch.arange(4.0)
    transport.exchange(Turn(0, 0), [(1, (into,))], [(1, (sent,))], [("o", "o", "out")])
    assert into.flatten().tolist() == [0, 1, 2, 3, 0, 0]
    assert dict(transport.sent_bytes) == {("o", "o", "out"): 16}


def test_lanes_are_few_enough_for_all_communicators_at_once() -> None:
    """All that can be under way at once must fit on a GPU together (run.nccl)."""
    plans = [
        method.plan(method.dealt(problem), phase, case_costs)
        for n in (4, 6, 9, 16)
        for problem in [splittable_problem(n)]
        for method in all_methods(problem)
        for phase in PHASES
        for case_costs in [Case(n=n, method=method.name).costs]
    ]
    assert max(len(plan.lanes) for plan in plans) <= 4


@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_A_GPU)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "a narrow wire"])
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_share_a_gpu(n: int, kind: str) -> None:
    """Streams, events and memory of a real device, through the host's memory. `reference` computes fp32 there."""
    dtype, wire = ("float32", "bfloat16") if kind == "a narrow wire" else (kind, "")
    wanted = cases(n, dtype, wire)
    with RankPool(n, timeout_s=300, devices=Devices(kind="cuda", shared=True)) as pool:
        assert_exact(wanted, pool.run(device_jobs.on_gpus, wanted))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NEEDS_A_GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_with_a_gpu_each(dtype: str) -> None:
    n = min(torch.cuda.device_count(), 8)
    wanted = cases(n, dtype)
    with RankPool(n, timeout_s=120, devices=Devices(kind="cuda")) as pool:
        assert_exact(wanted, pool.run(device_jobs.on_gpus, wanted))
