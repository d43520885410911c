"""Routes against ones written out by hand and by plain rules, and what the flow simulator makes of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.cluster.topology import Network, Topology
from sp_bench.errors import RequestError
from sp_bench.simulate.flows import solve
from sp_bench.simulate.task_graph import TaskGraph
from tests.support.topologies import FULL_MESH, NICS, PCIE, SOCKETS, SWITCH, Config, config

MIRROR = {"out": "in", "in": "out"}

Label = tuple[str, int]


def label(network: Network, link: int) -> Label:
    """The class of a link, and its place in its block."""
    name = list(network.first_link)[network.link_class[link]]
    return name, int(link) - network.first_link[name]


def labels(network: Network, source: int, target: int) -> list[Label]:
    row = network.routes(np.array([source]), np.array([target])).links[0]
    return [label(network, link) for link in row if link >= 0]


def route(text: str) -> list[Label]:
    """A route as tests write it: 'port out 0, port in 1'."""
    return [(part.rpartition(" ")[0], int(part.rpartition(" ")[2])) for part in text.split(", ") if part]


def by_rules(c: Config, a: int, b: int) -> list[Label]:
    """The route from GPU a to GPU b, one rule after another."""
    g, intra, fabric = c["gpus_per_node"], c["intra"], c.get("fabric")
    tree = intra["kind"] == "pcie_tree"

    def inside(x: int, y: int) -> list[Label]:
        """Between the PCIe switches of two GPUs of a node."""
        up, down = x // intra["gpus_per_switch"], y // intra["gpus_per_switch"]
        if up == down:
            return []
        sockets = []
        if "gpus_per_socket" in intra and x // intra["gpus_per_socket"] != y // intra["gpus_per_socket"]:
            sockets = [("socket out", x // intra["gpus_per_socket"]), ("socket in", y // intra["gpus_per_socket"])]
        return [("uplink out", up), *sockets, ("uplink in", down)]

    if a == b:
        return []
    if a // g == b // g:
        if intra["kind"] == "full_mesh":
            return [("pair", (a // g) * g * g + (a % g) * g + b % g)]
        return [("port out", a), *(inside(a, b) if tree else []), ("port in", b)]
    nics = c["inter"].get("nics_per_node") or g
    out, into = [x // g * nics + (x % g) // (g // nics) for x in (a, b)]
    path = [("nic out", out), ("nic in", into)]
    if fabric:
        up, down = [x // g // fabric["nodes_per_leaf"] for x in (a, b)]
        if up != down:
            path[1:1] = [("leaf out", up), ("leaf in", down)]
    if tree:
        first_a, first_b = [x - x % g % (g // nics) for x in (a, b)]
        path = [("port out", a), *inside(a, first_a), *path, *inside(first_b, b), ("port in", b)]
    return path


def node_of_link(c: Config, name: str, place: int) -> int:
    g, intra = c["gpus_per_node"], c["intra"]
    of_a_node = {
        "port": g,
        "pair": g * g,
        "uplink": g // intra.get("gpus_per_switch", 1),
        "socket": g // intra.get("gpus_per_socket", g),
        "nic": c["inter"].get("nics_per_node") or g,
    }
    return place // of_a_node[name.split(" ")[0]]


@st.composite
def networks(draw: st.DrawFn) -> tuple[Config, Network]:
    """Up to 5 nodes of every kind, the last one perhaps not full."""
    intra = draw(st.sampled_from([SWITCH, FULL_MESH, PCIE, SOCKETS, {**PCIE, "gpus_per_switch": 4}]))
    g = draw(st.sampled_from([4, 8]))
    c = config(g, intra, {**NICS, "nics_per_node": draw(st.sampled_from([None, 1, 2, 4]))})
    if draw(st.booleans()):
        c["fabric"] = {"nodes_per_leaf": draw(st.integers(1, 3)), "oversubscription": 2, "latency_s": 1e-4}
    n = draw(st.integers(1, 5 * g))
    others = st.permutations(range(5 * g)).map(lambda gpus: gpus[:n])
    c["placement"] = draw(st.one_of(st.sampled_from(["block", "cyclic"]), others))
    return c, Topology.build(c).network(n)


def all_pairs(network: Network) -> tuple[np.ndarray, np.ndarray]:
    ranks = np.arange(network.gpu.size)
    return np.repeat(ranks, ranks.size), np.tile(ranks, ranks.size)


ONE_NIC = {**NICS, "nics_per_node": 1}
LEAVES = {"nodes_per_leaf": 2, "oversubscription": 4, "latency_s": 1e-4}


@pytest.mark.parametrize(
    ("c", "source", "target", "expected"),
    [
        (config(), 5, 5, ""),
        (config(), 0, 5, "port out 0, port in 5"),
        (config(), 3, 12, "nic out 3, nic in 12"),
        (config(inter={**NICS, "nics_per_node": 2}), 3, 12, "nic out 0, nic in 3"),
        (config(None), 3, 12, "port out 3, port in 12"),
        (config(None, inter=None), 3, 12, "port out 3, port in 12"),
        (config(4, FULL_MESH), 1, 3, "pair 7"),
        (config(4, FULL_MESH), 6, 5, "pair 25"),
        (config(4, FULL_MESH), 6, 3, "nic out 6, nic in 3"),
        (config(8, SOCKETS), 0, 1, "port out 0, port in 1"),
        (config(8, SOCKETS), 1, 2, "port out 1, uplink out 0, uplink in 1, port in 2"),
        (
            config(8, SOCKETS),
            9,
            14,
            "port out 9, uplink out 4, socket out 2, socket in 3, uplink in 7, port in 14",
        ),
        (config(8, PCIE), 9, 14, "port out 9, uplink out 4, uplink in 7, port in 14"),
        (config(8, SOCKETS), 1, 10, "port out 1, nic out 1, nic in 10, port in 10"),
        (config(8, SOCKETS, ONE_NIC), 0, 8, "port out 0, nic out 0, nic in 1, port in 8"),
        (
            config(8, SOCKETS, ONE_NIC),
            5,
            10,
            "port out 5, uplink out 2, socket out 1, socket in 0, uplink in 0, nic out 0, "
            "nic in 1, uplink out 4, uplink in 5, port in 10",
        ),
        (config(4, fabric=LEAVES), 1, 2, "port out 1, port in 2"),
        (config(4, fabric=LEAVES), 1, 6, "nic out 1, nic in 6"),
        (config(4, fabric=LEAVES), 1, 14, "nic out 1, leaf out 0, leaf in 1, nic in 14"),
    ],
)
def test_routes_written_out(c: Config, source: int, target: int, expected: str) -> None:
    assert labels(Topology.build(c).network(16), source, target) == route(expected)


@given(networks())
def test_routes_follow_the_rules(drawn: tuple[Config, Network]) -> None:
    c, network = drawn
    source, target = all_pairs(network)
    routes = network.routes(source, target)
    for row, s, t in zip(routes.links, source, target, strict=True):
        expected = by_rules(c, int(network.gpu[s]), int(network.gpu[t]))
        assert [label(network, link) for link in row if link >= 0] == expected
    assert routes.inter.tolist() == (network.node_of(source) != network.node_of(target)).tolist()
    extra_s = [1e-4 * any(label(network, link)[0] == "leaf out" for link in row[row >= 0]) for row in routes.links]
    assert routes.latency_s == pytest.approx(np.where(routes.inter, 1e-3, 1e-5) * (source != target) + extra_s)


@given(networks())
def test_routes_stay_on_the_nodes_and_leaves_of_their_ends(drawn: tuple[Config, Network]) -> None:
    c, network = drawn
    for source, target in zip(*all_pairs(network), strict=True):
        ends = {int(network.node_of(source)), int(network.node_of(target))}
        for name, place in labels(network, source, target):
            if name.startswith("leaf"):
                assert place in {node // c["fabric"]["nodes_per_leaf"] for node in ends}
            else:
                assert node_of_link(c, name, place) in ends


@given(networks())
@pytest.mark.long
def test_the_way_back_is_the_mirror(drawn: tuple[Config, Network]) -> None:
    c, network = drawn

    def mirrored(name: str, place: int) -> Label:
        if name == "pair":
            g = c["gpus_per_node"]
            node, source, target = place // g**2, place // g % g, place % g
            return name, node * g**2 + target * g + source
        kind, _, way = name.partition(" ")
        return f"{kind} {MIRROR[way]}", place

    loads = Counter()
    for source, target in zip(*all_pairs(network), strict=True):
        there, back = labels(network, source, target), labels(network, target, source)
        assert back == [mirrored(*link) for link in reversed(there)]
        loads.update(there)
    assert all(loads[mirrored(*link)] == load for link, load in loads.items())


@given(st.sampled_from([SWITCH, FULL_MESH, PCIE, SOCKETS]), st.sampled_from([None, 1, 2, 8]), st.integers(1, 3))
def test_all_to_all_loads_all_links_of_a_class_alike(intra: Config, nics: int | None, leaves: int) -> None:
    if "gpus_per_switch" in intra:
        nics = None  # a NIC that GPUs of other switches share is nearer to some of them
    fabric = {"nodes_per_leaf": 2}
    network = Topology.build(config(8, intra, {**NICS, "nics_per_node": nics}, fabric=fabric)).network(16 * leaves)
    loads = Counter(network.routes(*all_pairs(network)).links.ravel().tolist())
    by_class: dict[str, list[int]] = {}
    for link in range(network.link_bytes_per_s.size):
        name, place = label(network, link)
        if name != "pair" or place // 8 % 8 != place % 8:
            by_class.setdefault(name, []).append(loads[link])
    assert all(len(set(found)) == 1 for found in by_class.values())
    assert by_class.get("leaf out", [0])[0] == (2 * 8) * (16 * leaves - 16)


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_a_switch_and_a_nic_for_each_gpu_are_four_links_a_gpu(g: int, nodes: int, data: st.DataObject) -> None:
    """In blocks: ports out, ports in, NICs out, NICs in."""
    n = g * nodes
    source = np.array(data.draw(st.permutations(range(n))))
    target = np.roll(source, data.draw(st.integers(1, n)))
    network = Topology.build(config(g)).network(n)
    routes = network.routes(source, target)
    for s, t, links, latency_s in zip(source, target, routes.links.tolist(), routes.latency_s, strict=True):
        if s == t:
            expected, seconds = [-1, -1], 0.0
        elif s // g == t // g:
            expected, seconds = [s, n + t], 1e-5
        else:
            expected, seconds = [2 * n + s, 3 * n + t], 1e-3
        assert (links, latency_s) == (expected, seconds)
    assert network.link_bytes_per_s.tolist() == [8e9] * 2 * n + [1e9] * 2 * n


@pytest.mark.parametrize(
    ("placement", "gpus", "nodes"),
    [
        ("block", [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1]),
        ("cyclic", [0, 4, 1, 5, 2, 6], [0, 1, 0, 1, 0, 1]),
        ([7, 0, 5, 2, 11, 1, 3], [7, 0, 5, 2, 11, 1], [1, 0, 1, 0, 2, 0]),
    ],
)
def test_placement(placement: Any, gpus: list[int], nodes: list[int]) -> None:
    topology = Topology.build(config(4, placement=placement))
    assert topology.place(6).tolist() == gpus
    assert topology.network(6).node_of(np.arange(6)).tolist() == nodes


@given(st.integers(1, 9), st.integers(1, 60))
def test_cyclic_placement_fills_no_more_nodes_than_block(g: int, n: int) -> None:
    gpus = Topology.build(config(g, placement="cyclic")).place(n)
    assert np.unique(gpus).size == n
    assert gpus.max() // g + 1 == math.ceil(n / g)
    on_node = np.bincount(gpus // g)
    assert on_node.max() - on_node.min() <= 1


def rates(c: Config, n: int, flows: list[tuple[int, int]]) -> list[float]:
    """Bytes per second of flows of equal size that start together, over the whole time of each."""
    network, n_bytes = Topology.build(c).network(n), 1e9
    routes = network.routes(*np.array(flows).T)
    crossed = routes.links >= 0
    graph = TaskGraph(
        delay_s=np.zeros(len(flows)),
        flow_bytes=np.full(len(flows), n_bytes),
        path_start=np.concatenate(([0], np.cumsum(crossed.sum(axis=1)))),
        path_links=routes.links[crossed],
        path_loads=np.ones(crossed.sum()),
        dep_start=np.zeros(len(flows) + 1, int),
        dep_tasks=np.zeros(0, int),
        rate_cap=routes.rate_cap,
        weight=np.ones(len(flows)),
        link_bytes_per_s=network.link_bytes_per_s,
    )
    return (n_bytes / solve(graph, "python").finish_s).tolist()


CAPPED = config(8, {**SWITCH, "flow_bytes_per_s": 3e9}, {**NICS, "flow_bytes_per_s": 0.25e9})
FAT_TREE = config(2, fabric={"nodes_per_leaf": 2, "oversubscription": 4})


@pytest.mark.parametrize(
    ("c", "n", "flows", "expected"),
    [
        pytest.param(config(), 8, [(0, 1)], 8e9, id="a port alone"),
        pytest.param(config(), 8, [(0, 1), (0, 2)], 4e9, id="one port out"),
        pytest.param(config(), 8, [(1, 0), (2, 0)], 4e9, id="one port in"),
        pytest.param(config(), 8, [(0, 1), (1, 0)], 8e9, id="both directions"),
        pytest.param(config(5, FULL_MESH), 5, [(0, 1), (0, 2), (3, 2), (1, 0)], 2e9, id="four cables"),
        pytest.param(config(5, FULL_MESH), 5, [(0, 1), (0, 1)], 1e9, id="one cable"),
        pytest.param(config(8, PCIE), 8, [(0, 1), (1, 0), (2, 3)], 8e9, id="PIX"),
        pytest.param(config(8, PCIE), 8, [(0, 2), (1, 3)], 4e9, id="PXB, one uplink"),
        pytest.param(config(8, PCIE), 8, [(0, 2), (2, 4), (4, 6)], 8e9, id="PXB, three uplinks"),
        pytest.param(config(8, SOCKETS), 8, [(0, 4), (2, 6)], 2e9, id="SYS"),
        pytest.param(config(8, SWITCH, ONE_NIC), 16, [(r, 8 + r) for r in range(8)], 1e9 / 8, id="one NIC"),
        pytest.param(config(), 16, [(r, 8 + r) for r in range(8)], 1e9, id="eight NICs"),
        pytest.param(config(), 16, [(0, 8), (0, 1)], [1e9, 8e9], id="a NIC is not a port of the switch"),
        pytest.param(
            config(8, {**PCIE, "bytes_per_s": 1e9}), 16, [(0, 8), (0, 1)], [0.5e9] * 2, id="a NIC is on the PCIe"
        ),
        pytest.param(FAT_TREE, 8, [(r, (r + 4) % 8) for r in range(8)], 0.25e9, id="4:1 across leaves"),
        pytest.param(FAT_TREE, 8, [(r, r ^ 2) for r in range(8)], 1e9, id="4:1 inside leaves"),
        pytest.param(FAT_TREE, 8, [(0, 4)], 1e9, id="4:1 alone"),
        pytest.param(CAPPED, 16, [(0, 1)], 3e9, id="a cap inside"),
        pytest.param(CAPPED, 16, [(0, 8)], 0.25e9, id="a cap across"),
        pytest.param(CAPPED, 16, [(0, 1), (0, 2), (0, 3), (0, 4)], 2e9, id="a cap that does not bind"),
    ],
)
def test_shares(c: Config, n: int, flows: list[tuple[int, int]], expected: float | list[float]) -> None:
    if isinstance(expected, float):
        expected = [expected] * len(flows)
    assert rates(c, n, flows) == pytest.approx(expected)


@given(networks())
def test_alone_is_what_the_simulator_gives_a_lone_flow(drawn: tuple[Config, Network]) -> None:
    c, network = drawn
    n = network.gpu.size
    alone = network.alone_bytes_per_s(network.routes(np.zeros(n, int), np.arange(n)))
    assert alone[0] == math.inf
    if n > 1:
        assert rates(c, n, [(0, n - 1)]) == pytest.approx(alone[-1:])


def changed(c: Config, **changes: Any) -> Config:
    """A config with other values at dotted keys; __ stands for the dot."""
    c = {key: dict(value) if isinstance(value, dict) else value for key, value in c.items()}
    for key, value in changes.items():
        part, _, inner = key.partition("__")
        if inner:
            c[part][inner] = value
        else:
            c[part] = value
    return c


FULL = config(8, SOCKETS, {**NICS, "nics_per_node": 4}, fabric={"nodes_per_leaf": 4, "oversubscription": 2.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 0}, "cluster.network.gpus_per_node=0: must be a whole number of at least 1"),
        ({"gpus_per_node": None}, "gpus_per_node=null: must be a number beside .*gpus_per_node=8 would work"),
        ({"intra": 3}, "cluster.network.intra=3: must be a section of keys"),
        ({"intra__kind": "swich"}, "cluster.network.intra.kind=swich: .* did you mean switch"),
        ({"intra__kind": ["switch"]}, "cluster.network.intra.kind=.*: there is no such kind"),
        ({"intra__kind": "switch"}, "cluster.network.intra.gpus_per_switch: there is no such key"),
        ({"intra__uplink": 1e9}, "intra.uplink: there is no such key; did you mean .*uplink_bytes_per_s"),
        ({"intra__uplink_bytes_per_s": None}, "intra.uplink_bytes_per_s=null: must be a finite number above 0"),
        ({"intra__latency_s": -1.0}, "intra.latency_s=-1.0: must be a finite number of at least 0"),
        ({"intra__flow_bytes_per_s": 0}, "intra.flow_bytes_per_s=0: must be a finite number above 0"),
        ({"intra__gpus_per_switch": 3}, r"gpus_per_switch=3: must divide gpus_per_node=8; 1, 2, 4, 8 would work"),
        ({"intra__gpus_per_socket": 3}, "gpus_per_socket=3: must divide gpus_per_node=8"),
        (
            {"intra__gpus_per_socket": 2, "intra__gpus_per_switch": 4},
            "gpus_per_switch=4: must divide gpus_per_socket=2",
        ),
        ({"intra__gpus_per_socket": None}, "gpus_per_socket=None: goes with socket_bytes_per_s"),
        ({"intra__socket_bytes_per_s": None}, "gpus_per_socket=4: goes with socket_bytes_per_s, which is None"),
        ({"inter__nics_per_node": 3}, "network.inter.nics_per_node=3: must divide gpus_per_node=8; 1, 2, 4, 8 would"),
        ({"inter__nics_per_node": 16}, "network.inter.nics_per_node=16: must divide gpus_per_node=8"),
        ({"inter__nic_per_node": 1}, "did you mean cluster.network.inter.nics_per_node"),
        ({"inter__bytes_per_s": math.inf}, "inter.bytes_per_s=inf: must be a finite number above 0"),
        ({"inter": None}, "cluster.network.fabric: joins NICs"),
        ({"fabric__oversubscription": 0.5}, "fabric.oversubscription=0.5: must be a finite number of at least 1"),
        ({"fabric__nodes_per_leaf": 2.5}, "fabric.nodes_per_leaf=2.5: must be a whole number of at least 1"),
        ({"fabrik": None}, "cluster.network.fabrik: there is no such key; did you mean cluster.network.fabric"),
        ({"placement": "random"}, "cluster.network.placement=random: must be block, cyclic, or a list"),
        ({"placement": [0, 1, 1]}, "must be block, cyclic, or a list of different GPUs"),
        ({"placement": [0, -1]}, "must be block, cyclic, or a list of different GPUs"),
        ({"placement": 3}, "must be block, cyclic, or a list of different GPUs"),
    ],
)
def test_refusals(changes: Config, message: str) -> None:
    Topology.build(FULL)
    with pytest.raises(RequestError, match=message):
        Topology.build(changed(FULL, **changes))


@pytest.mark.parametrize(
    "needs_a_node",
    [
        {"intra": FULL_MESH},
        {"intra": PCIE},
        {"inter": ONE_NIC},
        {"fabric": LEAVES},
        {"placement": [1, 0]},
    ],
)
def test_what_needs_gpus_per_node(needs_a_node: Config) -> None:
    Topology.build(config(None))
    with pytest.raises(RequestError, match="gpus_per_node=null: must be a number"):
        Topology.build(changed(config(None), **needs_a_node))


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(RequestError, match="gpus=9: the cluster is one node of 8, without NICs; gpus=8 would work"):
        Topology.build(config(inter=None)).network(9)
    with pytest.raises(RequestError, match="gpus=3: the cluster's placement lists 2 GPUs; gpus=2 would work"):
        Topology.build(config(placement=[3, 1])).network(3)
    with pytest.raises(RequestError, match="links; at most 20,000,000 are simulated"):
        Topology.build(config(placement=[0, 10**9])).network(2)
