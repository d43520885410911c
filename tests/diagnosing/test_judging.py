"""Findings on machines that aren't here, from what their tools print: each fault is found, and a sound one has none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sp_bench.diagnosing import software
from sp_bench.diagnosing.findings import Finding, as_text, counts, finding
from sp_bench.diagnosing.hosts import judge_allocation, judge_hosts
from sp_bench.diagnosing.judged import judge_kernels, judge_links, judge_uses
from sp_bench.diagnosing.nccl_log import judge_nccl, read_log
from sp_bench.diagnosing.nvidia_smi import gpus_state, judge_gpus
from sp_bench.diagnosing.rank_jobs import KernelRow, PairRate
from sp_bench.diagnosing.seen import Port, cores_near, rdma_ports
from sp_bench.diagnosing.settings import RULES, Rule, judge_settings
from sp_bench.launch import Launch
from sp_bench.resources import ROOT
from tests.diagnosing.fakes import NO_DEVICE, fake_nvidia_smi, gpus, host_of, nccl_log, rank_of


def bad(found: Sequence[Finding]) -> dict[str, tuple[str, str]]:
    """(status, found) of the rows that are not ok, by check."""
    return {row.check: (row.status, row.found) for row in found if row.status != "ok"}


def test_a_fix_stands_beside_what_is_wrong_and_only_there() -> None:
    assert finding("a", "b", "c", "ok", "unused").fix == ""
    with pytest.raises(AssertionError):
        finding("a", "b", "c", "warn")
    text = as_text([finding("a", "one", "1"), finding("a", "other", "2", "fail", "mend it")])
    assert text == "a\n  ok    one    1\n  fail  other  2\n        fix: mend it\n1 ok, 0 warn, 1 fail"


@pytest.mark.parametrize("driver", [570, 525])
def test_nvidia_smi_of_two_ages(driver: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_nvidia_smi(tmp_path, gpus(2), driver=driver)}:/bin:/usr/bin")
    assert gpus_state() == gpus(2)


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_state() == []
    assert judge_gpus("node0", [], []) == []


def test_sound_gpus() -> None:
    found = judge_gpus("node0", gpus(8), gpus(8))
    assert bad(found) == {}
    assert found[0].found == "8 x NVIDIA H100 80GB HBM3, driver 570.86.15"
    assert found[1].found == "SM clock 1980 to 1980 MHz, 413 to 413 W"


@pytest.mark.parametrize(
    ("changes", "check", "status", "text"),
    [
        ({"mig__mode__current": "Enabled"}, "MIG", "fail", "GPU 1: MIG is enabled"),
        ({"compute_mode": "Exclusive_Process"}, "compute mode", "warn", "Exclusive_Process"),
        ({"memory__used": "40000"}, "memory", "warn", "40000 MiB are in use"),
        ({"ecc__errors__uncorrected__volatile__total": "3"}, "ECC", "warn", "3 uncorrected"),
        ({"power__limit": "500.00"}, "power limit", "warn", "500 W, by default 700 W"),
        ({"name": "NVIDIA H100 PCIe"}, "GPUs", "warn", "NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe"),
    ],
)
def test_gpus_that_are_set_wrong(changes: dict[str, str], check: str, status: str, text: str) -> None:
    found = bad(judge_gpus("node0", gpus(2, **changes), []))
    assert list(found) == [f"node0: {check}"]
    assert found[f"node0: {check}"][0] == status and text in found[f"node0: {check}"][1]


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"reasons": "0x0000000000000040", "clocks__sm": "1200"}, "clocks", "1200 of 1980 MHz: hardware thermal slow"),
        ({"reasons": "0x0000000000000002", "clocks__sm": "1410"}, "clocks", "1410 of 1980 MHz: clocks set by a user"),
        ({"temperature__gpu": "91"}, "temperature", "91 degrees C"),
        ({"pcie__link__width__current": "8"}, "PCIe", "PCIe gen 5 x8 of gen 5 x16"),
    ],
)
def test_gpus_that_slow_down_under_load(changes: dict[str, str], check: str, text: str) -> None:
    found = bad(judge_gpus("node0", gpus(2), gpus(2, **changes)))
    assert list(found) == [f"node0: {check}"]
    assert text in found[f"node0: {check}"][1]


def test_a_power_cap_under_full_load_is_no_fault() -> None:
    """Every GPU is at its power limit in a large matrix product."""
    assert bad(judge_gpus("node0", gpus(2), gpus(2, reasons="0x0000000000000004"))) == {}


def test_nccl_on_one_host() -> None:
    logs = [read_log(nccl_log(rank, 8)) for rank in range(8)]
    assert logs[0].version == (2, 27, 3) and logs[0].channels == ((8, 16, 32, 32),)
    found = judge_nccl(logs, ["node0"] * 8)
    assert bad(found) == {}
    assert {row.check: row.found for row in found} == {
        "version": "2.27.3", "network": "IB", "channels": "8 collective, 16 NVLS, 32 p2p, 32 p2p to each peer",
        "inside hosts": "P2P/CUMEM (32 channels)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "check", "text"),
    [
        ({"inside": "SHM/direct/direct"}, "inside hosts", "SHM/direct/direct (56 channels)"),
        ({"across": "NET/IB/0"}, "across hosts", "NET/IB (8 channels)"),
        ({"across": "NET/Socket/0", "network": "Socket"}, "between hosts", "TCP sockets, not RDMA"),
        ({"per_peer": 4}, "channels", "4 p2p to each peer"),
        ({"version": "2.21.5"}, "version", "2.21.5"),
    ],
)
def test_nccl_on_two_hosts(options: dict[str, object], check: str, text: str) -> None:
    logs = [read_log(nccl_log(rank, 16, **options)) for rank in range(16)]  # pyright: ignore[reportArgumentType]
    hosts = [f"node{rank // 8}" for rank in range(16)]
    found = bad(judge_nccl(logs, hosts))
    assert set(found) == {check} and text in found[check][1]
    assert bad(judge_nccl([read_log(nccl_log(rank, 16)) for rank in range(16)], hosts)) == {}


def test_hosts_with_another_nccl() -> None:
    logs = [read_log(nccl_log(rank, 2, version=version)) for rank, version in enumerate(("2.27.3", "2.28.9"))]
    assert bad(judge_nccl(logs, ["a", "b"]))["version"] == ("fail", "2.27.3, 2.28.9")


def test_nccl_that_never_ran() -> None:
    assert judge_nccl([read_log("")], ["node0"]) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.variable)
def test_variables_that_hurt(rule: Rule) -> None:
    tried = {value: rule.hurts(value) for value in ("0", "1", "32", "INFO", "Socket", "lo", "DETAIL", "Ring", "eth0")}
    assert any(tried.values()) and not all(tried.values())
    value = next(value for value, hurts in tried.items() if hurts)
    found = judge_settings(
        [rank_of(0, environment={rule.variable: value}), rank_of(1, environment={rule.variable: value})]
    )
    assert bad(found)[rule.variable][0] == rule.status and value in found[0].found


def test_variables_that_differ() -> None:
    ranks = [
        rank_of(rank, node=1, environment={"NCCL_IB_HCA": f"mlx5_{rank}", "CUDA_VISIBLE_DEVICES": str(rank)})
        for rank in range(2)
    ]
    assert bad(judge_settings(ranks)) == {"NCCL_IB_HCA": ("fail", "differs between ranks: mlx5_0, mlx5_1")}


def test_a_sound_allocation() -> None:
    ranks = [rank_of(rank) for rank in range(16)]
    launch = Launch.planned(16)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    found = judge_allocation(launch, ranks, environment, 7200.0)
    assert bad(found) == {}
    assert found[0].found == "16 ranks on 2 hosts, started by srun"


def test_allocations_that_are_wrong() -> None:
    eight, job = [rank_of(rank) for rank in range(8)], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert set(bad(judge_allocation(None, eight, job, 600.0))) == {"SLURM", "time"}
    assert set(bad(judge_allocation(None, [rank_of(0, cores=1)], {}, None))) == {"cores"}
    one_each = [rank_of(rank, gpus=1) for rank in range(8)]
    assert "nccl#1066" in bad(judge_allocation(None, one_each, {}, None))["binding"][1]
    uneven = [rank_of(rank) for rank in range(8)] + [rank_of(8)]
    assert bad(judge_allocation(None, uneven, {}, None))["ranks by host"][1] == "node0: 8, node1: 1"
    without = [rank_of(0, device={"device": "CPU"}, gpus=0)]
    assert "no such device" in bad(judge_allocation(None, without, {"CUDA_VISIBLE_DEVICES": "0,1"}, None))["GPUs"][1]
    refused = [rank_of(0), rank_of(1, device={"error": NO_DEVICE})]
    assert bad(judge_allocation(None, refused, {}, None))["devices"] == ("fail", f"ranks 1: {NO_DEVICE}")
    mixed = [rank_of(0), rank_of(1, device={"device": "NVIDIA A100-SXM4-80GB", "cuda": "12.9"})]
    assert "A100" in bad(judge_allocation(None, mixed, {}, None))["devices"][1]


def test_cores_that_are_not_at_a_ranks_gpu(tmp_path: Path) -> None:
    """As where SLURM takes sockets in turn: ranks are told by number, and how to place them."""
    ranks = [rank_of(rank, near_cores=0 if rank % 2 else 12) for rank in range(4)]
    found = judge_allocation(None, ranks, {}, None)
    assert bad(found)["cores and GPUs"] == (
        "warn", "no core of rank 1, 3 is at its GPU's socket: each copy and launch crosses to it",
    )  # fmt: skip
    (fix,) = (row.fix for row in found if row.check == "cores and GPUs")
    assert "--distribution=block:block" in fix and "--cpus-per-task=8" in fix
    assert "cores and GPUs" not in bad(judge_allocation(None, [rank_of(0, near_cores=None)], {}, None))
    gpu = tmp_path / "0000:1b:00.0"
    gpu.mkdir()
    assert cores_near(gpu.name, tmp_path) is None, "the kernel doesn't say"
    (gpu / "local_cpulist").write_text("0-3,8,10-11\n")
    assert cores_near(gpu.name, tmp_path) == {0, 1, 2, 3, 8, 10, 11}


@pytest.mark.parametrize("name", ["array.sbatch", "golden"])
def test_scripts_give_ranks_cores_at_their_gpus(name: str) -> None:
    slurm = ROOT / "slurm" / name if name != "golden" else ROOT / "tests/slurm/golden/modules.sbatch"
    text = slurm.read_text()
    assert "#SBATCH --cpus-per-task=" in text
    steps = [line for line in text.replace("\\\n", "").splitlines() if line.startswith("srun ")]
    options = ("--cpus-per-task=", "--distribution=block:block", "--cpu-bind=cores", "--gpu-bind=none")
    assert steps and all(option in step for step in steps for option in options)


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"load": 60.0}, "load", "60.0 processes on 96 cores"),
        ({"governor": "powersave"}, "clocks", "governor powersave"),
        ({"shm_bytes": 64 * 2**20}, "/dev/shm", "64 MiB free in /dev/shm for 8 GPUs"),
        ({"shm_bytes": None}, "/dev/shm", "no /dev/shm for 8 GPUs"),
        ({"ports": (Port(name="mlx5_0:1", state="DOWN", rate="40 Gb/sec (4X QDR)"),)}, "NICs", "no port is active"),
    ],
)
def test_hosts_that_are_set_wrong(changes: dict[str, Any], check: str, text: str) -> None:
    ranks = [rank_of(rank) for rank in range(8)]
    host = host_of(**changes)
    found = bad(judge_hosts([host], ranks, host.load))
    assert list(found) == [f"node0: {check}"] and text in found[f"node0: {check}"][1]
    assert bad(judge_hosts([host_of()], ranks, 1.0)) == {}


def test_network_cards(tmp_path: Path) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
    ports = rdma_ports(tmp_path)
    assert [(port.name, port.state) for port in ports] == [("mlx5_0:1", "ACTIVE"), ("mlx5_1:1", "DOWN")]
    found = bad(judge_hosts([host_of(ports=ports, locked_bytes=8 * 2**20)], [rank_of(0)], 0.0))
    assert found["node0: NICs"][1] == "1 ports active (400 Gb/sec (4X NDR)), mlx5_1:1 not"
    assert "8 MiB of locked memory" in found["node0: limits"][1]


def kernel(name: str, refusal: str = "", *, hopeless: bool = False) -> KernelRow:
    return KernelRow(name=name, refusal=refusal, for_other_devices=hopeless, install=f"pip install {name}")


def test_kernels() -> None:
    """A faster one that could be installed is a warning, a slower one is none, a wrong one is a failure."""
    rows = [kernel("fa4", "for Blackwell", hopeless=True), kernel("fa3", "not installed"), kernel("cudnn")]
    rows += [kernel("fa2", "not installed"), kernel("aten")]
    found = judge_kernels([rows, rows], {"cudnn": "", "aten": "dq is off by 1e-1 (at most 1e-02)"}, "bfloat16", 128)
    assert {row.check: row.status for row in found} == {
        "fa3 bfloat16": "warn", "cudnn bfloat16": "ok", "fa2 bfloat16": "ok", "aten bfloat16": "fail",
        "kernel=auto": "ok",
    }  # fmt: skip
    assert found[0].fix == "pip install fa3" and found[-1].found == "is cudnn"
    none = judge_kernels([[kernel("cudnn")]], {"cudnn": "out is off"}, "bfloat16", 128)
    assert counts(none)["fail"] == 2


def test_links_against_the_cluster_file_and_each_other() -> None:
    ranks = [rank_of(rank, node=2) for rank in range(4)]
    pairs = [
        PairRate(a=a, b=b, bytes_per_s=3.6e11 if a // 2 == b // 2 else 4.5e10, latency_s=1e-5)
        for a in range(4) for b in range(a + 1, 4)
    ]  # fmt: skip
    found = judge_links(pairs, ranks)
    assert bad(found) == {}
    assert [row.found for row in found] == [
        "2 pairs, 360 to 360 GB/s each way, 10 us", "4 pairs, 45 to 45 GB/s each way, 10 us"
    ]  # fmt: skip
    slow = [PairRate(a=0, b=1, bytes_per_s=2e10, latency_s=1e-5), *pairs[1:]]
    assert "1 below 50% of cluster=h100_ndr400 (370 GB/s): 0-1" in bad(judge_links(slow, ranks))["inside hosts"][1]
    cpus = [rank_of(rank, device={"device": "CPU"}) for rank in range(4)]
    rates = [1e9] * 5 + [1e8]
    pairs = [PairRate(a=0, b=1 + i % 3, bytes_per_s=rate, latency_s=1e-4) for i, rate in enumerate(rates)]
    assert "1 below 50% of the median (1 GB/s)" in bad(judge_links(pairs, cpus))["inside hosts"][1]


def test_what_can_be_run() -> None:
    found = judge_uses([rank_of(rank) for rank in range(8)], launched=False)
    assert found[0].found == "gpus=1 to 8 on GPUs: python -m sp_bench gpus=8 cluster=h100_ndr400"
    unknown = [rank_of(0, device={"device": "NVIDIA Q7", "cuda": "12.9"})]
    assert bad(judge_uses(unknown, launched=True)) == {"cluster file": ("warn", "none has NVIDIA Q7")}


def test_software(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "extra run" not in bad(software.judge_software(0))
    assert bad(software.judge_software(8)).get("torch", ("", ""))[0] == ("" if software.torch_has_cuda() else "fail")
    there = metadata.version

    def old_torch(name: str) -> str:
        if name == "wandb":
            raise metadata.PackageNotFoundError(name)
        return "2.4.0" if name == "torch" else there(name)

    monkeypatch.setattr(software.metadata, "version", old_torch)
    found = software.judge_software(8)
    assert bad(found)["extra run"] == ("fail", "torch 2.4.0, not >=2.8: points can be simulated only")
    assert not software.measures(found)
    assert next(row.found for row in found if row.check == "extra wandb") == "not installed (no wandb)"
