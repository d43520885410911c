"""Clusters with round numbers, and problems to simulate on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sp_bench.cluster import Cluster
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.plan import Problem
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from tests.support.problems import mask_of

TABLE = {
    "figures": "assumed",
    "head_dim": 64,
    "dtypes": {"bfloat16": 1.0, "float32": 0.5},
    **{f"{phase}_{mask}": {512: 100, 1024: 200} for phase in PHASES for mask in ("full", "causal")},
}


def cluster(*, gpus_per_node: int | None = None, bytes_per_s: float = 1e9, launch_s: float = 0.0, **other) -> Cluster:
    """A cluster with round numbers; folds cost nothing unless memory_bytes_per_s says so."""
    return Cluster.build(
        {
            "name": "test",
            "gpus_per_node": gpus_per_node,
            "intra": {"bytes_per_s": bytes_per_s, "latency_s": 1e-5},
            "inter": {"bytes_per_s": bytes_per_s / 4, "latency_s": 3e-5},
            "device": {
                "name": "test",
                "rates": {"kernel": TABLE},
                "peak_tflops": {},
                "memory_bytes_per_s": 1e30,
                "launch_s": launch_s,
                **other,
            },
        }
    )


def problem(
    n: int, *, tokens: int = 1024, causal: bool = False, layout: str = "auto", dtype: str = "bfloat16"
) -> Problem:
    return Problem(
        n=n,
        seqlen=tokens * n,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mask=mask_of(causal),
        dtype=dtype,
        layout=mask_of(causal).layout(layout),
    )


def block_s(p: Problem, *, flops_per_pair: int = 4, rate: float = 200e12) -> float:
    return flops_per_pair * p.queries.most**2 * p.heads * p.head_dim / rate


NETWORKS: dict[str, dict[str, Any]] = {
    "one node": {"gpus_per_node": None, "intra": {"bytes_per_s": 1e9, "latency_s": 1e-5}},
    "nodes": {"gpus_per_node": 4},
    "shared NICs": {"gpus_per_node": 4, "inter": {"bytes_per_s": 3e8, "latency_s": 3e-5, "nics_per_node": 1}},
    "two NICs": {"gpus_per_node": 4, "inter": {"bytes_per_s": 3e8, "latency_s": 3e-5, "nics_per_node": 2}},
    "capped flows": {
        "gpus_per_node": 4,
        "inter": {"bytes_per_s": 3e8, "latency_s": 3e-5, "nics_per_node": 1, "flow_bytes_per_s": 1e8},
    },
    "full mesh": {"gpus_per_node": 4, "intra": {"kind": "full_mesh", "bytes_per_s": 1e9, "latency_s": 1e-5}},
    "fat tree": {"gpus_per_node": 2, "fabric": {"nodes_per_leaf": 2, "oversubscription": 3.0, "latency_s": 1e-5}},
    "PCIe": {
        "gpus_per_node": 4,
        "intra": {
            "kind": "pcie_tree",
            "bytes_per_s": 1e9,
            "latency_s": 1e-5,
            "gpus_per_switch": 2,
            "uplink_bytes_per_s": 1e9,
        },
    },
    "cyclic": {"gpus_per_node": 4, "placement": "cyclic"},
    "shared cores": {"gpus_per_node": 4},
}


def on_network(name: str, **stragglers: Any) -> Cluster:
    default = {
        "intra": {"bytes_per_s": 1e9, "latency_s": 1e-5},
        "inter": {"bytes_per_s": 2.5e8, "latency_s": 3e-5},
    }
    base = cluster()
    topology = type(base.topology).build(default | NETWORKS[name], "cluster")
    cores = 3 if name == "shared cores" else None
    return replace(base, topology=topology, cores=cores, stragglers=Stragglers(**stragglers))


def split_problem(n: int, layout: str = "striped", *, causal: bool = False) -> Problem:
    return Problem(
        n=n, seqlen=512 * n, heads=2 * n, kv_heads=n, head_dim=64, mask=mask_of(causal), layout=LAYOUTS[layout]
    )
