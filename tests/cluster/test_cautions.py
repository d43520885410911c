"""Cluster files of machines that differ by several times say so in each answer."""

from __future__ import annotations

import pytest

from sp_bench.cluster import Cluster
from sp_bench.cluster.topology import PcieTree
from sp_bench.point.simulated import simulate_point
from sp_bench.resources import conf_content, conf_files
from tests.workload.requests import point

SHAPE = ("model=none", "workload=attention", "method=ring", "heads=8", "head_dim=128", "dtype=bfloat16", "seqlen=16k")


def test_files_of_pcie_machines_have_a_caution_and_no_others() -> None:
    files = conf_files("cluster")
    clusters = {name: Cluster.build(conf_content(path, files)) for name, path in files.items() if name != "local"}
    pcie = {name for name, one in clusters.items() if isinstance(one.topology.intra, PcieTree)}
    assert pcie and {name for name, one in clusters.items() if one.caution} == pcie


@pytest.mark.parametrize("cluster", ["l20_pcie", "h100_ndr400"])
def test_each_simulated_answer_says_it(cluster: str) -> None:
    record, _ = simulate_point(point(*SHAPE, "gpus=4", f"cluster={cluster}", "mode=simulate"))
    said = [note for note in record.notes or () if "differ by several times" in note]
    assert len(said) == (cluster == "l20_pcie")
    assert all("python -m sp_bench.calibrate" in note for note in said)
