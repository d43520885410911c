"""Calibration of shaped hosts: figures that come back, at whatever rate the links have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from sp_bench.calibrate import main
from sp_bench.calibrating.cluster_file import cluster_config
from sp_bench.cluster import Cluster
from sp_bench.labs.shaped import calibration
from sp_bench.labs.shaped.calibration import (
    UNSHAPED_BYTES_PER_S,
    ahead_bytes,
    cores_of_links,
    fit,
    link_rates,
    with_hosts,
)
from sp_bench.labs.shaped.description import Hosts
from sp_bench.labs.shaped.exchanges import round_of, spread
from sp_bench.labs.shaped.samples import SPREAD_BLOCKS, Exchanges
from sp_bench.machine import cores_here
from sp_bench.plan import DOWN, Attend, Chunk, Group, Pass, Steps
from sp_bench.plan.ops import BLOCKS
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.resources import conf_files
from sp_bench.simulate import simulate
from tests.support.calibration import SETTING, samples
from tests.support.clusters import problem
from tests.support.hosts import BURST_BYTES, described, on_hosts
from tests.support.typed import of_kind

MESSAGE_BYTES = (10_000, 100_000)
CORES = min(2, cores_here())
"""That two ranks can have."""
LINK_CORES, BYTE_CORE_S, MESSAGE_CORE_S = 0.01, 2e-9, 1e-5
"""Seconds of a core that a busy link takes, and each byte and message."""
ALL_TO_ALL_SHARE = 0.75
"""The share of the rate of messages that the library's all-to-alls get."""
CROWDING = 2.5
"""How many times as long a block takes on its share of the cores where two ranks compute."""


def exchanges(hosts: Hosts, *, latency_s: float, share: float, most_bytes_per_s: float) -> dict[float, list[Exchanges]]:
    """The samples that two ranks would have seen on hosts of known figures, of which one is always slower."""
    found = {}
    for rate in link_rates(hosts):
        each = min(share * rate / hosts.ranks_per_host, most_bytes_per_s)
        per_host, kept = hosts.ranks_per_host, {}
        burst = 0.95 * BURST_BYTES / per_host if rate != UNSHAPED_BYTES_PER_S else 0
        at_once = {size: min(burst, 0.75 * size) for size in MESSAGE_BYTES}
        times = {size: latency_s + (size - saved) / each for size, saved in at_once.items()}
        carried = {size: per_host * size / x for size, x in times.items()}
        for size in (min(times), max(times)):
            byte_core_s = LINK_CORES / carried[max(times)] + BYTE_CORE_S + MESSAGE_CORE_S / size
            kept[size] = 1 - byte_core_s * carried[size] * (2 / per_host) / CORES
        hosts_in_all = 2 // per_host
        all_to_all_s = {MESSAGE_BYTES[0]: (hosts_in_all - 1) * MESSAGE_BYTES[0] / each / ALL_TO_ALL_SHARE}
        found[rate] = [
            Exchanges(
                all_to_all_s={size: [x * factor] * 3 for size, x in all_to_all_s.items() if hosts_in_all > 1},
                idle_s={size: [x * factor] * 3 for size, x in times.items()},
                beside_s={size: [0.9 * factor * x, factor * x, 3 * factor * x] for size, x in times.items()},
                alone_blocks_per_s=[10.0 * CROWDING / CORES] * 3,
                crowded_blocks_per_s=[factor * x / 1.5 for x in (20.0, 10.0, 1.0)],
                rounds_bytes_per_s={size: [carried[size] / per_host] * 3 for size in kept},
                beside_blocks_per_s={
                    size: [factor * x / 1.5 * rest for x in (20.0, 10.0, 1.0)] for size, rest in kept.items()
                },
                first_of_two=[1 / (2 * 0.6)] * 3,
                beside_spread=[factor * x for x in (0.01, 0.02, 0.5)],
            )
            for factor in (0.5, 1.0)
        ]
    return found


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_figures_of_hosts_come_back(ranks_per_host: int) -> None:
    """And serve at other rates of the links."""
    hosts = described(ranks_per_host=ranks_per_host, hosts_per_leaf=4, uplink_bytes_per_s=4e7)
    seen = exchanges(hosts, latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    costs, links = samples()
    config = with_hosts(cluster_config("box", SETTING, costs, links, {"calibrated": "now"}), hosts, seen)
    found = Cluster.build(config)
    assert found.topology.inter
    calibrated = of_kind(Hosts, found.hosts)
    assert calibrated.payload_share == pytest.approx(0.9)
    assert calibrated.latency_s == pytest.approx(0.02)
    assert calibrated.flow_bytes_per_s == pytest.approx(1e8)
    assert found.device.transfer_slowdown == 0
    assert calibrated.link_cores == pytest.approx(LINK_CORES, rel=1e-3)
    assert calibrated.byte_core_s == pytest.approx(BYTE_CORE_S, rel=1e-3)
    assert calibrated.message_core_s == pytest.approx(MESSAGE_CORE_S, rel=1e-3)
    assert calibrated.all_to_all_share == (pytest.approx(ALL_TO_ALL_SHARE) if ranks_per_host == 1 else 1.0)
    size = max(MESSAGE_BYTES)  # the middle one of two
    assert calibrated.ahead_bytes == pytest.approx(size * math.log(1.5) / 1.645 / math.sqrt(2), rel=1e-3)
    alone = Cluster.build(cluster_config("box", SETTING, costs, links, {}))
    p = problem(1, tokens=max(SETTING.sizes), dtype="float32")
    p = replace(p, heads=SETTING.heads, kv_heads=SETTING.heads, head_dim=SETTING.head_dim)
    assert found.device.block_s(p, "forward") == pytest.approx(alone.device.block_s(p, "forward") * CROWDING, rel=1e-3)
    assert (calibrated.ranks_per_host, calibrated.hosts_per_leaf) == (ranks_per_host, 4)
    assert found.topology.inter.bytes_per_s == pytest.approx(0.9 * hosts.link_bytes_per_s)
    assert "fitted within 0%, and within 0% while" in config["sources"]["hosts.payload_share, hosts.latency_s"]


@pytest.mark.parametrize(("short", "long"), [(0.5, 0.0), (0.0, 0.5), (0.0, 0.0), (0.9, 0.001)])
def test_whatever_blocks_lost_the_figures_can_be_used(short: float, long: float) -> None:
    """By chance they lose nothing beside long messages and much beside short ones, or the other way round."""
    seen = exchanges(described(), latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    for rank in (rank for ranks in seen.values() for rank in ranks):
        for size, lost in zip(MESSAGE_BYTES, (short, long), strict=True):
            rank.beside_blocks_per_s[size] = [x * (1 - lost) for x in rank.crowded_blocks_per_s]
    costs, links = samples()
    config = with_hosts(cluster_config("box", SETTING, costs, links, {}), described(), seen)
    found = of_kind(Hosts, Cluster.build(config).hosts)
    assert min(found.byte_core_s, found.link_cores, found.message_core_s) >= 0
    assert (found.message_core_s > 0) == (short > long > 0)


@pytest.mark.parametrize("cores", [1, 2])
def test_turns_are_told_by_how_much_blocks_spread(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relative variance of a row of blocks with w seconds of work is turn_s / w; cores of one's own have none."""
    monkeypatch.setattr(calibration, "cores_here", lambda: cores)
    seen = exchanges(described(), latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    costs, links = samples()
    config = with_hosts(cluster_config("box", SETTING, costs, links, {}), described(), seen)
    work_s = 1 / 10.0  # of a block, by what both ranks together got done
    assert config["hosts"]["turn_s"] == pytest.approx(0.015 * SPREAD_BLOCKS * work_s if cores == 1 else 0.0)
    assert ("median of 12 variances" if cores == 1 else "its own core") in config["sources"]["hosts.turn_s"]


@pytest.mark.parametrize("cores", [1, 2])
def test_messages_wait_for_cores_that_ranks_crowd(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds more that they wait while all ranks compute, for each rank to a core beyond the first."""
    monkeypatch.setattr(calibration, "cores_here", lambda: cores)
    seen = exchanges(described(), latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    for ranks in seen.values():
        for rank in ranks:
            rank.idle_s = {size: [x - 0.015 for x in samples_s] for size, samples_s in rank.idle_s.items()}
    costs, links = samples()
    config = with_hosts(cluster_config("box", SETTING, costs, links, {}), described(), seen)
    found = Cluster.build({**config, "cores": cores})
    assert found.topology_of(2).inter
    calibrated = of_kind(Hosts, found.hosts)
    assert calibrated.latency_s == pytest.approx(0.005, rel=1e-3)
    assert calibrated.crowd_latency_s == pytest.approx(0.015 if cores == 1 else 0.0, rel=1e-3)
    latency_s = found.network(2).routes(np.array([0]), np.array([1])).latency_s
    assert latency_s == pytest.approx([0.02 if cores == 1 else 0.005], rel=1e-3)


def test_the_spread_of_blocks_is_that_of_several_in_a_row() -> None:
    assert SPREAD_BLOCKS == 4
    assert spread([1.0, 3.0] * 6) == [0.0]
    assert spread([1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [9.0]) == pytest.approx([16 / 8**2])
    assert spread([1.0] * 11) == []


def test_by_how_much_one_message_is_ahead_of_another() -> None:
    """Shares of normal logarithms come back from when the first of two had come."""
    shares = np.exp(0.25 * np.random.default_rng(0).standard_normal((20_000, 2)))
    first = 0.5 / (shares.max(axis=1) / shares.sum(axis=1))
    assert ahead_bytes(first.tolist(), 1000) == pytest.approx(250, rel=0.02)
    assert ahead_bytes([1.0, 1.0], 1000) == 0.0
    assert ahead_bytes([0.1], 1000) < 3000, "one that had come before it could by its link"


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_simulated_pairs_are_as_uneven_as_those_they_were_calibrated_by(spread: float) -> None:
    """Ranks of 24 hosts send to the next one and the one after it at once, each by a lane."""
    n = 24
    p = problem(n, tokens=1024)
    ring = Group(1, n, DOWN)
    q, own, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    steps = Steps()
    steps.do(*(Pass(f"lane {far}", own, own.at(far), ring, shift=-far) for far in (1, 2)))
    steps.do(*(Attend(q, own.at(far), o) for far in (1, 2)))
    plan = steps.plan("forward", n, inputs=(q, own), outputs=(o,))
    size = p.chunk_bytes(KV, wire=True)
    where = on_hosts(n, 1e6, 0.0)
    assert where.hosts
    where = replace(where, hosts=where.hosts.replace(ahead_bytes=spread * size))
    run = simulate(plan, p, where)
    ends = [sorted(span.end_s for span in run.spans(rank) if span.stream != BLOCKS) for rank in range(n)]
    assert ahead_bytes([first / last for first, last in ends], size) == pytest.approx(spread * size, rel=0.35)


def test_two_hosts_have_no_pairs() -> None:
    """Nor more than one hop."""
    costs, links = samples()
    hosts = described(ahead_bytes=5e4)
    seen = exchanges(hosts, latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    for rank in (rank for ranks in seen.values() for rank in ranks):
        rank.first_of_two = []
    config = with_hosts(cluster_config("box", SETTING, costs, links, {}), hosts, seen)
    assert config["hosts"]["ahead_bytes"] == 5e4
    assert "not measured" in config["sources"]["hosts.ahead_bytes"]
    assert len(round_of(2, 1, 1).ops) == 1
    assert [str(op) for op in round_of(8, 2, 3).ops] == [
        f"Pass[kv] kv#{hop} -> +1, kv#{hop + 1} <- -1" for hop in range(3)
    ]


def test_what_links_take_of_cores_is_by_byte_and_by_link() -> None:
    assert cores_of_links([(25e6, 0.085), (6.25e6, 0.0475)]) == pytest.approx((0.035, 2e-9))
    assert cores_of_links([(1e6, 0.01), (4e6, 0.04)]) == pytest.approx((0, 1e-8))
    assert cores_of_links([(1e6, 0.05), (4e6, 0.04)]) == pytest.approx((0.04, 0))
    assert cores_of_links([(1e6, 0.001), (4e6, 0.04)]) == pytest.approx((0, 1e-8))
    assert cores_of_links([(1e6, 0.0), (4e6, 0.0)]) == (0, 0)


def test_messages_faster_than_their_links_have_no_latency() -> None:
    """As short ones may seem to be."""
    medians_s = {(1e6, 1000.0): 0.5e-3, (1e6, 10_000.0): 9.0e-3, (1e6, 20_000.0): 18.0e-3}
    found = fit(medians_s)
    assert (found.latency_s, found.payload_share) == (0.0, 1.0)
    assert found.off == pytest.approx(1.0)
    slower = fit(medians_s, 0.5)
    assert (slower.latency_s, slower.payload_share) == (0.0, 0.5)


def test_cores_that_nothing_keeps_busy_still_have_a_rate() -> None:
    """A long message took no longer than a short one there."""
    hosts = described()
    seen = exchanges(hosts, latency_s=0.02, share=0.9, most_bytes_per_s=1e8)
    for rank in seen[UNSHAPED_BYTES_PER_S]:
        rank.beside_s = dict.fromkeys(MESSAGE_BYTES, [0.01] * 3)
    costs, links = samples()
    config = with_hosts(cluster_config("box", SETTING, costs, links, {}), hosts, seen)
    assert config["hosts"]["flow_bytes_per_s"] == pytest.approx(max(MESSAGE_BYTES) / 0.01)


@pytest.mark.usefixtures("can_be_made")
@pytest.mark.long
def test_hosts_are_calibrated(tmp_path: Path) -> None:
    """By the same command, into a file for the same hosts."""
    path = tmp_path / "cluster" / "box.yaml"
    assert (
        main(["cluster=shaped", "quick=true", "repetitions=1", "ranks=3", "head_dim=16", "heads=2", f"out={path}"]) == 0
    )
    config = yaml.safe_load(path.read_text())
    cluster, shaped = Cluster.build(config), yaml.safe_load(conf_files("cluster")["shaped"].read_text())["hosts"]
    measured = {
        "payload_share",
        "latency_s",
        "flow_bytes_per_s",
        "byte_core_s",
        "link_cores",
        "message_core_s",
        "turn_s",
        "ahead_bytes",
        "all_to_all_share",
        "crowd_latency_s",
    }
    assert cluster.topology.gpus_per_node == shaped["ranks_per_host"]
    assert {k: v for k, v in config["hosts"].items() if k not in measured} == {
        k: v for k, v in shaped.items() if k not in measured
    }
    assert 0 < of_kind(Hosts, cluster.hosts).payload_share <= 1
    assert all(f"hosts.{name}" in " ".join(config["sources"]) for name in measured)
