"""Cluster files of machines that differ by several times say so in each answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.__main__ import main as run
from sp_bench.advise.__main__ import main as advise
from sp_bench.cluster import Cluster
from sp_bench.cluster.tiers import PcieTree
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


WORKLOADS = {
    "train": (
        "model=qwen3_8b", "method=ring", "seqlen=16k", "cluster.device.matmul_tflops={bfloat16:100}",
        "cluster.device.memory_bytes=2e11",
    ),
    "decode": ("model=none", "workload=decode", "method=helix", "heads=8", "head_dim=128", "seqlen=16k"),
    "prefill": (
        "model=none", "workload=prefill", "method=ring", "heads=8", "head_dim=128", "seqlen=16k",
        "cluster.device.matmul_tflops={bfloat16:100}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS)
def test_records_of_all_workloads_say_it(workload: str) -> None:
    asked = (*WORKLOADS[workload], "dtype=bfloat16", "gpus=4", "cluster=l20_pcie", "mode=simulate")
    record, _ = simulate_point(point(*asked))
    assert record.status == "ok"
    assert any("differ by several times" in note for note in record.notes or ()), record.notes


JOB = ("model=qwen3_8b", "batch_tokens=64k", "cluster.device.matmul_tflops={bfloat16:100}")
ANSWERS = {
    "table": (run, (*SHAPE, "gpus=4", "mode=simulate", "logger=none")),
    "advise": (advise, ("gpus=2", "seqlen=8k", "heads=8", "head_dim=128", "changes=false")),
    "advise a job": (advise, (*JOB, "gpus=2", "seqlen=16k", "cluster.device.memory_bytes=2e11")),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_printed_says_it(answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, asked = ANSWERS[answer]
    folder = (f"results_dir={tmp_path}",) if answer == "table" else ()
    for cluster in ("l20_pcie", "a100_hdr200") if answer == "table" else ("l20_pcie",):  # the others take seconds
        assert main([*asked, *folder, f"cluster={cluster}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        says = "differ by several times" in said and "python -m sp_bench.calibrate" in said
        assert says == (cluster == "l20_pcie"), said
