"""Submitting asks nothing of the machine that submits: not for GPUs, nor memory, nor packages that jobs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sp_bench import extras, machine
from sp_bench.peers import peer, user
from sp_bench.point import mode, refusals, request
from sp_bench.records import identity
from sp_bench.slurm.points import planned
from sp_bench.slurm.sweep import main

OF_GPUS = ["sweep=mesh_table3", "slurm=containers", "gpus=16", "seqlen=32k", "logger=none"]
ASKED = {
    "GPUs of a cluster": [],
    "device": ["device=cuda"],
    "transport": ["transport=symmetric_memory", "cuda_graph=true", "gpus=8"],
    "GPUs of nodes like this one": ["cluster=local", "transport=nccl", "registered_buffers=true"],
    "CPUs": ["cluster=local", "device=cpu", "dtype=float32", "heads=8"],
    "either": ["cluster=local", "heads=8"],
    "training": ["model=tiny", "workload=train", "cluster=local", "heads=16", "kv_heads=16"],
    "a package": ["method=peer", "impl=yunchang"],
    "a package for GPUs": ["method=peer", "impl=transformer_engine"],
    "torch's own": ["method=peer", "impl=torch_context_parallel"],
    "a function": ["method=peer", "impl=a_module_of_the_nodes:fn"],
}
WITHOUT = "import sys; sys.modules['torch'] = None; from sp_bench.slurm.sweep import main; sys.exit(main(sys.argv[1:]))"
"""A sweep where importing torch raises ImportError."""


def words(changes: list[str]) -> list[str]:
    keys = {change.partition("=")[0] for change in changes}
    return [word for word in OF_GPUS if word.partition("=")[0] not in keys] + changes


def probe(*args: object, **kwargs: object) -> Any:
    raise AssertionError("this machine was asked for what it has")


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in {
        mode: ("gpus_here", "torch_has_cuda"),
        machine: ("gpus_here", "gpus_and_driver", "torch_has_cuda", "free_bytes", "busy_s"),
        request: ("require", "cores_here", "refuse_hosts"),
        refusals: ("free_bytes", "cores_here"),
        extras: ("find_spec",),
        identity: ("gpu_software",),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, probe)
    for module in (peer, user):
        monkeypatch.setattr(module.importlib.util, "find_spec", probe)
    monkeypatch.setattr(peer.importlib.metadata, "version", probe)


@pytest.mark.parametrize("changes", ASKED.values(), ids=ASKED)
@pytest.mark.usefixtures("no_probes")
def test_every_kind_of_point_is_planned_without_a_look_at_this_machine(changes: list[str]) -> None:
    given = [word for word in words(changes) if word.partition("=")[0] not in ("sweep", "slurm")]
    tasks, refused = planned("mesh_table3", given)
    assert tasks
    assert not [record.error for _, record in refused]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["gpus=6", "method=ulysses"], "gpus=6: ulysses splits heads=32 evenly"),
        (["device=cpu"], "ranks of srun are on CPUs"),
        (["cluster=local", "device=cpu", "transport=nccl"], "is between GPUs, and the point's ranks are on CPUs"),
        (["cluster=local", "device=cpu", "method=peer", "impl=transformer_engine"], "takes tensors of GPUs only"),
        (["method=peer", "impl=yunchan"], "there is no such implementation"),
    ],
)
def test_what_no_node_could_serve_is_refused_all_the_same(changes: list[str], says: str) -> None:
    given = [word for word in words(changes) if word.partition("=")[0] not in ("sweep", "slurm")]
    tasks, refused = planned("mesh_table3", given)
    assert not tasks
    assert all(says in (record.error or "") for _, record in refused)


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_login_node_without_torch_prints_the_scripts() -> None:
    done = without_torch(*words(["seqlen=32k,64k", "gpus=16,32"]), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("slurm.sweep: 2 job arrays, 8 tasks, 16 points; up to 4 nodes a task; ")
    assert done.stdout.count("#!/bin/bash") == 2
    assert "--gres=gpu:8" in done.stdout


@pytest.fixture
def own(tmp_path: Path) -> Path:
    files = {
        "cluster/acme.yaml": "defaults: [h100_ndr400, _self_]\nname: acme\n",
        "sweep/mine.yaml": "axes:\n  method: [ring, mesh]\nfixed:\n  gpus: 16\n  seqlen: 32k\n  cluster: acme\n",
        "slurm/box.yaml": 'gpus_per_node: 8\ntime: "00:10:00"\naccount: of_acme\n',
    }
    for name, text in files.items():
        path = tmp_path / "my_conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "my_conf"


def test_a_folder_of_ones_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sweep, its cluster and its settings of SLURM."""
    assert main(["--config-dir", str(own), "sweep=mine", "slurm=box", "logger=none", "--dry-run"]) == 0
    assert "#SBATCH --account=of_acme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config-dir", "/nowhere", "sweep=mesh_table3"], "--config-dir /nowhere: is not a folder"),
        (["sweep=mesh_table3", "cluster=acme"], "cluster=acme: there is no such cluster"),
        (["sweep=mesh_table3", "--config-dir"], "--config-dir: needs a folder"),
    ],
)
def test_bad_folders(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", *arguments]) == 2
    assert says in capsys.readouterr().err
