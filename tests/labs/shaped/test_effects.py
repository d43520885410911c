"""Effects of shaped hosts on a simulation: cores that messages take, and cores and links that are shared unevenly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp_bench.cluster import Cluster
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.labs.shaped.description import MOST_UNEVEN_RANKS, Hosts
from sp_bench.labs.shaped.effects import Shares
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.ops import ReduceScatter, Transfer
from sp_bench.plan.tensors import KV, O
from sp_bench.plan.transfers import messages
from sp_bench.simulate import Run, simulate
from tests.support.clusters import block_s, problem
from tests.support.hosts import on_hosts
from tests.support.typed import of_kind

TOKENS = 2**15
"""Blocks so large that the latencies of hops are nothing."""


def ring(n: int, where: Cluster) -> tuple[Run, float]:
    """Blocks of 32k tokens round a ring, and the bytes of a hop."""
    p = problem(n, tokens=TOKENS)
    return simulate(build("ring", {}).plan(p, "forward", COMPUTE_BOUND), p, where), p.chunk_bytes(KV, wire=True)


@pytest.mark.parametrize(("n", "cores"), [(8, 2), (8, 1), (2, 2), (4, 24)])
def test_what_transfers_take_of_the_cores_blocks_lose(n: int, cores: int) -> None:
    """Bound by blocks, all of the cores' time goes to either; where there are cores to spare, blocks lose nothing."""
    block = block_s(problem(n, tokens=TOKENS))
    hop_bytes = problem(n, tokens=TOKENS).chunk_bytes(KV, wire=True)
    byte_core_s, message_core_s = 0.2 * block / hop_bytes, 0.025 * block
    run, _ = ring(n, on_hosts(cores, 20 * hop_bytes / block, byte_core_s, message_core_s=message_core_s))
    hop_core_s = byte_core_s * hop_bytes + 2 * message_core_s  # K and V
    taken_s = n * (n * block + (n - 1) * hop_core_s)
    assert run.makespan_s == pytest.approx(max(taken_s / cores, n * block), rel=1e-6)
    assert run.work_s == pytest.approx(np.full(n, n * block))


def test_a_link_takes_of_the_cores_by_what_it_carries_and_by_being_busy() -> None:
    hosts = of_kind(Hosts, on_hosts(2, 1e6, 3e-9, link_cores=0.005).hosts)
    assert hosts.core_s_per_byte == pytest.approx(3e-9 + 0.005 / 1e6)


def test_transfers_go_before_blocks() -> None:
    """Bound by transfers, these take as long as if blocks needed no cores, and the last block has the cores alone."""
    block = block_s(problem(8, tokens=TOKENS))
    hop_bytes = problem(8, tokens=TOKENS).chunk_bytes(KV, wire=True)
    hop_s = 20 * block
    run, _ = ring(8, on_hosts(2, hop_bytes / hop_s, 0.1 * hop_s / hop_bytes))
    assert run.makespan_s == pytest.approx(7 * hop_s + 4 * block, rel=1e-6)


def test_cores_limit_what_links_carry() -> None:
    """Eight links that would each take half a core from two have half their rate, and leave nothing for blocks."""
    block = block_s(problem(8, tokens=TOKENS))
    hop_bytes = problem(8, tokens=TOKENS).chunk_bytes(KV, wire=True)
    bytes_per_s = 1e3 * hop_bytes / block
    run, _ = ring(8, on_hosts(2, bytes_per_s, 0.5 / bytes_per_s))
    fast, _ = ring(8, on_hosts(2, bytes_per_s / 2, 0.5 / bytes_per_s))
    assert run.makespan_s == pytest.approx(fast.makespan_s, rel=1e-9)


@pytest.mark.parametrize("cores", [2, 24])
def test_messages_take_of_the_cores_whatever_their_bytes(cores: int) -> None:
    """And nothing else does: 4 ranks on 2 cores, or each with one and the messages with the others."""
    block = block_s(problem(4, tokens=TOKENS))
    hop_bytes = problem(4, tokens=TOKENS).chunk_bytes(KV, wire=True)
    run, _ = ring(4, on_hosts(cores, 20 * hop_bytes / block, 0.0, message_core_s=0.1 * block))
    taken_s = 4 * (4 * block + 3 * 2 * 0.1 * block)
    assert run.makespan_s == pytest.approx(max(taken_s / cores, 4 * block), rel=1e-6)


def test_messages_inside_a_host_take_nothing() -> None:
    free, _ = ring(2, on_hosts(1, 1e9, 0.0, per_host=2))
    costly, _ = ring(2, on_hosts(1, 1e9, 1e-6, message_core_s=1.0, per_host=2))
    assert costly.makespan_s == free.makespan_s


def test_messages_inside_a_host_are_in_no_queue() -> None:
    p, where = problem(2, tokens=1024), on_hosts(2, 1e6, 0.0, per_host=2)
    assert where.hosts
    queues = replace(where, hosts=where.hosts.replace(ahead_bytes=1e9))
    plan = build("tokenring", {}).plan(p, "backward", where.profile(p))
    assert simulate(plan, p, queues).makespan_s == pytest.approx(simulate(plan, p, where).makespan_s, rel=1e-12)


@pytest.mark.parametrize("collectives", ["library", "messages"])
def test_an_all_to_all_of_the_library_gets_its_share(collectives: str) -> None:
    """gloo's, of links between hosts; messages get all of them."""
    p, where = problem(4, tokens=TOKENS), on_hosts(4, 1e6, 0.0)
    assert where.hosts
    slower = replace(where, hosts=where.hosts.replace(all_to_all_share=0.5))
    method = build("ulysses", {"collectives": collectives})
    plan, p = method.plan(p, "forward", where.profile(p)), method.assigned(p)
    all_s, half_s = (simulate(plan, p, each).makespan_s for each in (where, slower))
    sent = [sum(each.values()) for _, op in plan if isinstance(op, Transfer) for each in messages(op, p, 0)]
    assert half_s - all_s == pytest.approx(sum(sent) / 1e6 * (collectives == "library"), rel=1e-6, abs=1e-9)


def test_a_reduce_scatter_is_an_all_to_all_and_a_gather_is_not() -> None:
    """Nor is anything that stays inside a host."""
    for per_host, expected in ((1, 1.0), (4, 0.0)):
        p, where = problem(4, tokens=TOKENS), on_hosts(4, 1e6, 0.0, per_host=per_host)
        assert where.hosts
        slower = replace(where, hosts=where.hosts.replace(all_to_all_share=0.5))
        plan = build("all_gather", {"stride": p.kv_heads, "collectives": "library"}).plan(p, "backward", COMPUTE_BOUND)
        all_s, half_s = (simulate(plan, p, each).makespan_s for each in (where, slower))
        (reduced,) = (op for _, op in plan if isinstance(op, ReduceScatter))
        sent = sum(sum(each.values()) for each in messages(reduced, p, 0))
        assert half_s - all_s == pytest.approx(expected * sent / 1e6, rel=1e-6, abs=1e-9)


def in_turns(cores: int, turn_s: float, seed: int = 0) -> Cluster:
    """Hosts with slow links, whose ranks get the cores in such turns."""
    where = on_hosts(cores, 1e6, 0.0)
    assert where.hosts
    return replace(where, hosts=where.hosts.replace(turn_s=turn_s), stragglers=where.stragglers.replace(seed=seed))


def first_block(n: int, where: Cluster) -> tuple[np.ndarray, Run]:
    """When each rank ends its first block, which all begin at once, (n,); the next ones come much later."""
    found, _ = ring(n, where)
    row = found.graph.rows_of(blocks=True)[0]
    return found.finish_s.reshape(-1, found.graph.quotient.ranks.size)[row], found


def test_blocks_that_begin_together_end_apart_where_cores_are_handed_over() -> None:
    """The cores do the same work in the same time, until fewer ranks than cores have any left."""
    n, cores = 8, 2
    block = block_s(problem(n, tokens=TOKENS))
    _, even = first_block(n, in_turns(cores, 0.0))
    ends_s = []
    for seed in range(8):
        end_s, uneven = first_block(n, in_turns(cores, 0.1 * block, seed))
        assert uneven.work_s == pytest.approx(even.work_s)
        assert n * block / cores * (1 - 1e-9) <= end_s.max() <= 1.15 * n * block / cores
        ends_s.append(end_s)
    # Shares have a standard deviation of 0.32; what is left of longer ones goes faster when others are done.
    assert 0.1 < np.std(ends_s) / (n * block / cores) < 0.32
    np.testing.assert_array_equal(first_block(n, in_turns(cores, 0.1 * block, 7))[0], ends_s[7])
    assert len({end_s.max() for end_s in ends_s}) > 1


def test_longer_blocks_end_less_apart() -> None:
    block = block_s(problem(8, tokens=TOKENS))
    spreads = []
    for turns in (10, 1000):
        ends_s = [first_block(8, in_turns(2, block / turns, seed))[0] for seed in range(8)]
        spreads.append(np.mean([end_s.std() / end_s.mean() for end_s in ends_s]))
    assert spreads[1] == pytest.approx(spreads[0] / 10, rel=0.3)


@pytest.mark.parametrize(("n", "cores"), [(4, 4), (4, 24), (2 * MOST_UNEVEN_RANKS, 2)])
def test_nobody_waits_for_a_turn_on_cores_of_their_own_nor_where_ranks_are_too_many(n: int, cores: int) -> None:
    block = block_s(problem(n, tokens=TOKENS))
    even, _ = ring(n, in_turns(cores, 0.0))
    uneven, _ = ring(n, in_turns(cores, block))
    assert uneven.makespan_s == even.makespan_s
    assert uneven.graph.quotient.ranks.size < n


def queued(name: str, n: int, ahead_bytes: float, seed: int = 0) -> Run:
    """A method on hosts whose links let some messages go ahead of others by so many bytes."""
    p, where = problem(n, tokens=1024), on_hosts(n, 1e6, 0.0)
    assert where.hosts
    where = replace(where, hosts=where.hosts.replace(ahead_bytes=ahead_bytes), stragglers=Stragglers(seed=seed))
    return simulate(build(name, {}).plan(p, "forward", where.profile(p)), p, where)


def test_messages_that_share_a_link_go_ahead_of_one_another() -> None:
    """TokenRing sends Q and O at once: both are there when the slower one is. A ring has each link for itself."""
    o_bytes = problem(8, tokens=1024).chunk_bytes(O, wire=True)
    even = queued("tokenring", 8, 0.0)
    some_s, more_s = ([queued("tokenring", 8, x * o_bytes, seed).makespan_s for seed in range(4)] for x in (0.3, 0.6))
    assert 1 < np.mean(some_s) / even.makespan_s < np.mean(more_s) / even.makespan_s < 1.5
    assert len(set(some_s)) == 4
    assert queued("tokenring", 8, 0.3 * o_bytes, 3).makespan_s == some_s[3]
    assert queued("ring", 8, 0.6 * o_bytes).makespan_s == pytest.approx(queued("ring", 8, 0.0).makespan_s, rel=1e-9)
    many = 2 * MOST_UNEVEN_RANKS
    assert queued("tokenring", many, o_bytes).makespan_s == queued("tokenring", many, 0.0).makespan_s


def test_all_to_alls_of_one_rank_take_nothing() -> None:
    p, where = problem(4, tokens=TOKENS), on_hosts(4, 1e6, 0.0)
    alone = build("usp", {"ulysses": 1})
    whole = simulate(alone.plan(alone.assigned(p), "forward", where.profile(p)), alone.assigned(p), where)
    ring = simulate(build("ring", {}).plan(p, "forward", where.profile(p)), p, where)
    assert whole.makespan_s == pytest.approx(ring.makespan_s, rel=1e-9)


def test_shares_of_longer_messages_differ_less() -> None:
    shares = Shares(1000.0, 0, "forward")
    for size, deviation in ((500.0, 1.0), (1000.0, 1.0), (10_000.0, 0.1)):
        drawn = shares(np.full(20_000, size))
        assert np.std(np.log(drawn)) == pytest.approx(deviation, rel=0.03)
        assert np.mean(drawn) == pytest.approx(1.0, abs=0.03)
    assert Shares(0.0, 0, "forward")(np.ones(3)) == 1.0


@pytest.mark.parametrize("name", ["ring", "mesh", "ulysses", "tokenring", "startrail"])
@pytest.mark.parametrize("per_host", [1, 2])
def test_alike_ranks_that_send_stand_for_one_another_on_shared_cores_too(name: str, per_host: int) -> None:
    p = problem(4, tokens=TOKENS)
    hop_bytes, block = p.chunk_bytes(KV, wire=True), block_s(p)
    core_s = {"byte_core_s": 0.1 * block / hop_bytes, "message_core_s": 0.01 * block}
    where = on_hosts(2, 2 * hop_bytes / block, **core_s, link_cores=0.05, per_host=per_host)
    method = build(name, {}).candidates(p)[0]
    plan, assigned = method.plan(p, "forward", where.profile(p)), method.assigned(p)
    one, all_of_them = (simulate(plan, assigned, where, use_symmetry=x) for x in (True, False))
    assert one.makespan_s == pytest.approx(all_of_them.makespan_s, rel=1e-9)
    assert one.ended_s == pytest.approx(all_of_them.ended_s, rel=1e-9)
    hosts = of_kind(Hosts, where.hosts).replace(link_cores=0.0, **dict.fromkeys(core_s, 0.0))
    free = simulate(plan, assigned, replace(where, hosts=hosts))
    # Blocks of ulysses are beside no transfer, but for the byte that links owe.
    assert (free.makespan_s < one.makespan_s * (1 - 1e-6)) == (name != "ulysses")
