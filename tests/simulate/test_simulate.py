"""simulate: the task graphs of plans against closed forms and an independent execution of the rules of time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.lower import GLOO, NCCL, lower
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan import Attend, AttendBackward, Fold, Group, Pass, Plan, Problem
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import BLOCKS
from sp_bench.plan.schedule import Segment, segments
from sp_bench.plan.tensors import DKV, KV, Q
from sp_bench.simulate import WAITING, operations, simulate
from sp_bench.simulate.operations import work_s
from tests.support.clusters import block_s, cluster, problem
from tests.support.problems import Planned, plans


def test_ring_bound_by_transfers() -> None:
    """n - 1 hops of latency + KV / bandwidth, then the last block."""
    p = problem(16)
    run = simulate(build("ring", {}).plan(p, "forward", cluster().profile(p)), p, cluster())
    hop_s = 1e-5 + p.chunk_bytes(KV, wire=True) / 1e9
    assert hop_s > block_s(p)
    assert run.makespan_s == pytest.approx(15 * hop_s + block_s(p), rel=1e-9)
    assert run.busy_s == pytest.approx(np.full(16, 16 * block_s(p)))


@given(plans(max_n=6), st.sampled_from([1, 3]))
def test_ranks_compute_as_long_as_is_simulated(planned: Planned, slow: float) -> None:
    """Their time bounds a step from below, without its transfers."""
    plan, problem = planned.plan, planned.problem
    on = cluster()
    on = replace(on, stragglers=on.stragglers.replace(ranks={0: slow}))
    run = simulate(plan, problem, on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "AT_ONCE", 3)
        computed_s = work_s(plan, problem, on, np.arange(plan.n))
    assert computed_s == pytest.approx(run.work_s)
    assert computed_s.max() <= run.makespan_s * (1 + 1e-9)


def test_lanes_on_cores_begin_early() -> None:
    """The latency of a hop passes while V of the one before comes, or as much of it as that takes."""
    p = problem(16)
    kv = p.chunk_bytes(KV, wire=True)
    for bytes_per_s in (1e8, 1e9, 1e11):
        where = replace(cluster(bytes_per_s=bytes_per_s, launch_s=0.0), cores=16)
        run = simulate(build("ring", {}).plan(p, "forward", where.profile(p)), p, where)
        left_s = max(1e-5 - kv / 2 / bytes_per_s, 0)
        hops_s = 1e-5 + 14 * left_s + 15 * kv / bytes_per_s
        if bytes_per_s < 1e11:
            assert run.makespan_s == pytest.approx(hops_s + block_s(p), rel=1e-9)
        starts, ends = zip(*((s.start_s, s.end_s) for s in run.spans(3) if s.stream != BLOCKS), strict=True)
        assert all(start >= end for start, end in zip(starts[1:], ends[:-1], strict=True))
        assert len(starts) == 15


def test_what_a_lane_begins_early_waits_for_elsewhere_comes_before_its_latency() -> None:
    """Two hops fit in a block: each begins when a block has left its buffer, and that long after is under way."""
    p = problem(4, tokens=8192)
    where = replace(cluster(bytes_per_s=1e12), cores=4)
    run = simulate(build("ring", {}).plan(p, "forward", where.profile(p)), p, where)
    hop_s = 1e-5 + p.chunk_bytes(KV, wire=True) / 1e12
    assert hop_s < block_s(p)
    last = [span.end_s for span in run.spans(0) if span.stream != BLOCKS][-1]
    assert last == pytest.approx(2 * block_s(p) + hop_s, rel=1e-9)


def test_what_is_sent_to_a_rank_that_has_posted_its_receive_goes_before_that_rank_is_ready() -> None:
    """StarTrail: some have no KV to swap, and send their O as soon as it is computed; on GPUs both ends wait."""
    p, hops = problem(8, tokens=512), {"team": 2, "collectives": "messages"}
    for cores in (None, 8):
        where = replace(cluster(bytes_per_s=1e7), cores=cores)
        run = simulate(build("startrail", hops).plan(p, "forward", where.profile(p)), p, where)
        spans = [run.spans(rank) for rank in (0, 1)]
        sent = [max(span.start_s for span in mine if span.label.startswith("o#1")) for mine in spans]
        computed = [[span.end_s for span in mine if span.stream == BLOCKS][-2] for mine in spans]
        assert computed[0] < computed[1] == pytest.approx(sent[1])
        assert sent[0] == pytest.approx(computed[1] if cores is None else computed[0])


def test_ring_bound_by_blocks() -> None:
    """n blocks and nothing else, forward and (2.5 times as long) backward, where the last dKV hop is left over."""
    p, fast = problem(16, tokens=8192), cluster(bytes_per_s=1e12)
    forward = simulate(build("ring", {}).plan(p, "forward", fast.profile(p)), p, fast)
    assert forward.makespan_s == pytest.approx(16 * block_s(p), rel=1e-9)
    backward = simulate(build("ring", {}).plan(p, "backward", fast.profile(p)), p, fast)
    hop_s = 1e-5 + p.chunk_bytes(DKV, wire=True) / 1e12  # casts cost nothing at this memory rate
    assert backward.makespan_s == pytest.approx(16 * block_s(p, flops_per_pair=10) + hop_s, rel=1e-9)


def test_a_node_boundary_is_the_slow_hop() -> None:
    p, two_nodes = problem(8), cluster(gpus_per_node=4)
    run = simulate(build("ring", {}).plan(p, "forward", two_nodes.profile(p)), p, two_nodes)
    hop_s = 3e-5 + p.chunk_bytes(KV, wire=True) / 0.25e9
    assert run.makespan_s == pytest.approx(7 * hop_s + block_s(p), rel=1e-9)


def test_lanes_share_a_port_fairly() -> None:
    """Ring backward, bound by transfers: KV and dKV cross the same port, so it takes their bytes together."""
    p = problem(32, tokens=512)
    slow = cluster(bytes_per_s=1e7)
    run = simulate(build("ring", {}).plan(p, "backward", slow.profile(p)), p, slow)
    both = 31 * (p.chunk_bytes(KV, wire=True) + p.chunk_bytes(DKV, wire=True))
    assert both / 1e7 < run.makespan_s < 1.05 * both / 1e7


def test_contiguous_causal_is_as_slow_as_its_last_rank() -> None:
    p, fast = problem(8, causal=True, layout="contiguous"), cluster(bytes_per_s=1e12)
    run = simulate(build("ring", {"layout": "contiguous"}).plan(p, "forward", fast.profile(p)), p, fast)
    half = block_s(p) * (p.queries.most + 1) / (2 * p.queries.most)
    assert run.busy_s == pytest.approx(np.arange(8) * block_s(p) + half)


def link_between(rank: int, other: int, on: Cluster) -> Any:
    nodes = np.array([rank, other]) // (on.topology.gpus_per_node or 10**9)
    return on.topology.intra if nodes[0] == nodes[1] else on.topology.inter


def rules_of_time(plan: Plan, p: Problem, on: Cluster) -> float:
    """The makespan by the rules in DESIGN, operation by operation and rank by rank, for plans with one lane.

    With one lane no two flows ever share a port, so that a transfer takes latency + bytes / bandwidth. On cores, of the
    latency of one that may begin early no more is left than the one before takes for all but its first tensor, and who
    receives may have posted that before (Lowering.preposted, which tests/run holds lanes to).
    """
    lowering, cost = lower(plan, p, GLOO if on.cores else NCCL), on.device.block_s(p, plan.phase)
    early, ahead = lowering.pipelined, lowering.preposted
    end = np.zeros((len(plan.ops), p.n))

    def posted(index: int, otherwise: np.ndarray) -> np.ndarray:
        """When each rank has posted its receive."""
        if index not in ahead:
            return otherwise
        _, after, waits = ahead[index]
        return np.max(
            [np.zeros(p.n), *(end[other] for other in (after, *dict(waits).values()) if other is not None)], 0
        )

    free = {stream: np.zeros(p.n) for stream in (BLOCKS, *plan.lanes)}
    for index, op in plan:
        mine, elsewhere = free[op.stream], np.zeros(p.n)
        for _, other in lowering.waits[index]:
            elsewhere = np.maximum(elsewhere, end[other])
        ready = np.maximum(mine, elsewhere)
        if isinstance(op, Pass):
            assert op.send
            taken, before = np.empty(p.n), plan.ops[early[index]] if index in early else None
            there = posted(index, mine if before else ready)
            for rank in range(p.n):
                target, rest_s = op.target(rank), 0.0
                link = link_between(rank, target, on)
                if before is not None:
                    assert isinstance(before, Pass)
                    rest = sum(p.field_bytes(field, wire=True) for field in before.tensor.fields[1:])
                    rest_s = rest / link_between(rank, before.target(rank), on).bytes_per_s
                beside_s = min(link.latency_s, rest_s)
                if before is not None:
                    begun = max(mine[rank], there[target], elsewhere[rank] + beside_s)
                else:
                    begun = max(ready[rank], there[target])
                hop_s = link.latency_s + p.chunk_bytes(op.send.tensor, wire=True) / link.bytes_per_s
                taken[rank] = begun - beside_s + hop_s
            end[index] = np.maximum(taken, [taken[op.source(rank)] for rank in range(p.n)])
        else:
            assert isinstance(op, Attend | AttendBackward | Fold)
            for rank in range(p.n):
                took_s = 0.0 if isinstance(op, Fold) else cost[p.blocks.of(op.q.owner(rank), op.kv.owner(rank))]
                end[index, rank] = ready[rank] + took_s
        free[op.stream] = end[index]
    return float(end.max())


@given(st.data())
def test_graphs_follow_the_rules_of_time(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 4, 6, 12, 16]))
    tile = data.draw(st.sampled_from(tiles(n)))
    layout = data.draw(st.sampled_from(["contiguous", "striped", "zigzag"]))
    p = problem(n, causal=data.draw(st.booleans()), layout=layout, dtype="float32")
    on = cluster(gpus_per_node=data.draw(st.sampled_from([None, 2, 4])), bytes_per_s=data.draw(st.floats(1e8, 1e12)))
    on = replace(on, cores=data.draw(st.sampled_from([None, n])))
    phase = data.draw(st.sampled_from(PHASES))
    plan = build("mesh", {"tile": tile, "layout": layout}).plan(p, phase, on.profile(p))
    assert simulate(plan, p, on).makespan_s == pytest.approx(rules_of_time(plan, p, on), rel=1e-9)


@given(st.data())
def test_segments_hold_every_block_once_and_end_where_others_wait(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 4, 6, 12, 16]))
    p = problem(n)
    method = data.draw(st.sampled_from([build("ring", {}), *build("mesh", {}).candidates(p)]))
    plan = method.plan(p, data.draw(st.sampled_from(PHASES)), cluster().profile(p))
    lowering = lower(plan, method.assigned(p))
    found = segments(plan, lowering.waits)
    ops = [index for segment in found.values() for index in segment.ops]
    assert ops == [index for index, op in plan if not isinstance(op, Pass)]
    last_of = {segment.ops[-1] for segment in found.values()}
    for index, _ in plan:
        assert all(other in last_of for stream, other in lowering.waits[index] if stream == BLOCKS)
    assert all(isinstance(segment, Segment) and segment.ops for segment in found.values())


def test_many_blocks_are_few_tasks() -> None:
    """64 x 64 blocks on a rank, but at most a few hundred segments."""
    p = Problem(n=4096, seqlen=4096 * 256, heads=4, kv_heads=4, head_dim=64, layout=CAUSAL.layout("auto"))
    plan = build("mesh", {"tile": (64, 64)}).plan(p, "forward", cluster().profile(p))
    assert len(plan.ops) > 4096
    assert len(segments(plan, lower(plan, p).waits)) < 400


def test_folds_and_casts_cost_memory_traffic() -> None:
    """Ring in bf16: the first block is cast, every other one folded (part + 2 accumulators), the result cast."""
    p, on = problem(4), cluster(bytes_per_s=1e15, memory_bytes_per_s=1e9)
    run = simulate(build("ring", {}).plan(p, "forward", on.profile(p)), p, on)
    rows = p.queries.most * p.heads
    first = rows * 64 * (2 + 4)
    others = 3 * rows * (64 * (2 + 2 * 4) + (4 + 2 * 4))
    result = rows * 64 * (4 + 2)
    assert run.busy_s[0] == pytest.approx(4 * block_s(p) + (first + others + result) / 1e9)


@pytest.mark.parametrize("batch", [1, 2])
def test_an_all_to_all_costs_copies_of_what_is_not_in_place(batch: int) -> None:
    """Q is packed but for the rank's own heads; of one batch entry it is received in place, but for its own tokens."""
    on, method = cluster(bytes_per_s=1e15, memory_bytes_per_s=1e9), build("ulysses", {})
    p = method.assigned(replace(problem(4), batch=batch))
    run = simulate(method.plan(p, "forward", on.profile(p)), p, on)
    took_s = (run.finish_s - run.start_s).reshape(-1, run.graph.quotient.ranks.size)
    *messages, unpacked = run.graph.items[0].rows
    q_bytes = batch * p.queries.most * p.heads * 64 * 2
    assert len(messages) == 3
    assert took_s[messages] == pytest.approx(1e-5 + 2 * q_bytes * 3 / 4 / 1e9)
    assert took_s[unpacked] == pytest.approx(2 * q_bytes * (1 / 4 if batch == 1 else 1) / 1e9)


def test_rates_are_interpolated_in_log_tokens_and_flat_outside() -> None:
    def seconds(tokens: int) -> float:
        return float(cluster().device.block_s(problem(1, tokens=tokens), "forward")[0])

    def rate(tokens: int) -> float:
        return block_s(problem(1, tokens=tokens), rate=1.0) / seconds(tokens) / 1e12

    assert rate(64) == pytest.approx(100)
    assert rate(724) == pytest.approx(100 + 100 * (math.log2(724) - 9))
    assert rate(4096) == pytest.approx(200)


def test_profile_counts_blocks_that_hide_a_hop() -> None:
    p, on = problem(16), cluster(gpus_per_node=4)
    costs = on.profile(p)
    one = block_s(p)
    hop_s = 1e-5 + p.chunk_bytes(Q, wire=True) / 1e9
    assert costs.hiding_blocks(p, Q, Group(1, 4), "forward") == math.ceil(hop_s / one)
    hop_s = 3e-5 + p.chunk_bytes(KV, wire=True) / 0.25e9
    assert costs.hiding_blocks(p, KV, Group(4, 4), "forward") == math.ceil(hop_s / one)
    assert costs.hiding_blocks(p, Q, Group(1, 8), "forward") > costs.hiding_blocks(p, Q, Group(1, 4), "forward")


def test_spans_cover_what_a_rank_does() -> None:
    p = problem(6)
    run = simulate(build("mesh", {"tile": (2, 3)}).plan(p, "forward", cluster().profile(p)), p, cluster())
    for rank in range(6):
        spans = run.spans(rank)
        busy_s = sum(span.end_s - span.start_s for span in spans if span.stream == BLOCKS)
        assert busy_s == pytest.approx(run.busy_s[rank])
        assert sum(span.stream == "rings" for span in spans) == 1 + 2 + 1


@pytest.mark.parametrize(
    ("method", "options"),
    [("ring", {}), ("mesh", {"tile": (2, 4)}), ("startrail", {"team": 2, "collectives": "messages"})],
)
def test_waits_are_what_blocks_lack_and_what_others_send(method: str, options: dict[str, object]) -> None:
    """On a network of two speeds, where ranks at the edge of a node wait for others than those inside."""
    p, on = problem(8), cluster(gpus_per_node=4, bytes_per_s=2e9)
    plan = build(method, options).plan(p, "forward", on.profile(p))
    run = simulate(plan, p, on, use_symmetry=False)
    sends = {rank: [span for span in run.spans(rank) if span.stream != BLOCKS] for rank in range(8)}
    transfers = [op for op in plan.ops if isinstance(op, Pass)]
    assert run.ended_s[run.last_rank] == run.makespan_s
    for rank in range(8):
        waits = run.waits(rank)
        waiting_s = sum(span.end_s - span.start_s for span in waits if span.stream == WAITING)
        assert waiting_s == pytest.approx(run.exposed_s[rank], abs=1e-12)
        arrivals = [span for span in waits if span.stream != WAITING]
        assert len(arrivals) == len(transfers)
        for number, (op, span) in enumerate(zip(transfers, arrivals, strict=True)):
            assert span == sends[int(op.source(rank))][number]


def test_the_rank_shown_receives_from_another_node() -> None:
    """A ring across nodes waits for the links between them, which fill the lane of the rank behind such a link."""
    p, on = problem(8), cluster(gpus_per_node=4, bytes_per_s=2e8)
    run = simulate(build("ring", {}).plan(p, "forward", on.profile(p)), p, on)
    assert run.shown_rank in (0, 4)
    arrivals = [span for span in run.waits(run.shown_rank) if span.stream != WAITING]
    assert sum(span.end_s - span.start_s for span in arrivals) > 0.9 * run.makespan_s


@pytest.mark.long
def test_too_large_a_graph_is_refused() -> None:
    p = Problem(n=8192, seqlen=8192, heads=1, kv_heads=1, head_dim=8, layout=CAUSAL.layout("auto"))
    with pytest.raises(RequestError, match="gpus=8192: this plan has 134,209,536 transfers"):
        simulate(build("ring", {}).plan(p, "forward", cluster().profile(p)), p, cluster())
