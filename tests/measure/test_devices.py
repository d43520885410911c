"""Devices that ranks compute on: found, told to them, refused where there are none; and ranks executed alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_executor
from sp_bench import machine, records
from sp_bench.__main__ import main
from sp_bench.cli.columns import make_console
from sp_bench.cli.compose import Composer
from sp_bench.cli.report import print_points, print_sweep
from sp_bench.cluster.device import same_model
from sp_bench.errors import RequestError
from sp_bench.launch import Launch
from sp_bench.machine import CPUS, Devices
from sp_bench.measure import devices
from sp_bench.measure.devices import device_here, group_backend, local_rank, set_up_device
from sp_bench.measure.pool import RankError, RankPool
from sp_bench.measure.result import RankResult
from sp_bench.point import Outcome, Request, mode, resolve, run_points
from sp_bench.point.mode import nccl_settings
from tests.support.typed import Known

ALONE = ("seqlen=1k", "heads=2", "head_dim=128", "iters=3", "warmup=1")
SMALL = ("seqlen=1k", "heads=2", "head_dim=16", "dtype=float32", "iters=3", "warmup=1")


def point(*overrides: str, launch: Launch | None = None) -> Request:
    with Composer() as composer:
        return resolve(composer.compose(overrides), launch)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as anybody sees who doesn't use them."""
    monkeypatch.setattr(mode, "gpus_here", lambda: 8)
    monkeypatch.setattr(mode, "torch_has_cuda", lambda: True)


def test_gpus_are_those_that_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    assert machine.gpus_here({}, tmp_path) == 4
    assert machine.gpus_here({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path) == 2
    assert machine.gpus_here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert machine.gpus_here({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, tmp_path) == 4


@pytest.mark.parametrize(("cuda", "has"), [("'12.8'", True), ('"13.0"', True), ("None", False)])
def test_whether_torch_has_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, has: bool) -> None:
    """As its version says, without an import."""
    (tmp_path / "version.py").write_text(
        f"__version__ = '9'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    )
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert machine.torch_has_cuda() is has


def test_torch_here_is_what_its_version_says() -> None:
    assert machine.torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ("device=cuda cluster=local gpus=4", "this machine has 2 GPUs, and its ranks need 4, one each; device=cpu, or"),
        ("device=cuda cluster=shaped gpus=2", "the hosts of cluster=shaped have CPUs only"),
        (
            "device=cpu mode=alone cluster=local gpus=2 method=peer impl=torch_context_parallel",
            "only plans can be executed without a rank's peers",
        ),
        ("nccl={x: 1}", "nccl=x: must be the name of a variable of NCCL, in capitals, without NCCL_"),
        ("nccl=4", "nccl=4: must be a table"),
        ("mode=alone alone=[256]", "alone=[256]: rank 256 is not among 256 ranks; ranks from 0 to 255 would work"),
        ("mode=alone alone=0", "alone=0: must be a list of ranks; alone=[0] would work"),
        ("mode=alone alone=[]", "alone=[]: must be a list of ranks"),
        ("mode=alone alone=[-1]", "alone=[-1]: must be a list of ranks"),
        ("mode=alone alone=[1,1,0]", "alone=[1, 1, 0]: names a rank twice; alone=[0, 1] would work"),
        ("mode=alone stragglers.jitter=0.1", "stragglers: can be simulated, not made"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, overrides: str, rule: str) -> None:
    monkeypatch.setattr(mode, "gpus_here", lambda: 2)
    monkeypatch.setattr(mode, "torch_has_cuda", lambda: True)
    with pytest.raises(RequestError) as caught:
        point(*re.findall(r"\S+=(?:\{.*?\}|\S+)", overrides))
    assert rule in str(caught.value)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "gpus_here", lambda: 8)
    monkeypatch.setattr(mode, "torch_has_cuda", lambda: False)
    with pytest.raises(RequestError, match="device=cuda: this torch was built without CUDA"):
        point("device=cuda", "gpus=8")
    found = point("gpus=8")
    assert (found.mode, found.why) == ("simulate", "this machine has 8 GPUs, but this torch was built without CUDA")


def test_where_there_are_gpus_points_are_measured_on_them(eight_gpus: None) -> None:
    for overrides in ((), ("device=cuda",), ("cluster=local",)):
        found = point("gpus=8", "nccl={NCHANNELS_PER_NET_PEER: 4}", *overrides)
        assert (found.mode, found.devices) == ("measure", Devices(kind="cuda", nccl={"NCHANNELS_PER_NET_PEER": "4"}))
    assert point("gpus=16").mode == "simulate"
    assert point("gpus=8", "cluster=local", "device=cpu", *SMALL).devices == CPUS
    assert point("gpus=8", "mode=simulate").devices == CPUS


def test_run_ids_tell_devices_and_settings_apart(eight_gpus: None) -> None:
    local = ("gpus=2", "cluster=local", *SMALL)
    ids = [point(*local, *more).run_id for more in ((), ("device=cpu",), ("nccl={ALGO: Ring}",))]
    assert len(set(ids)) == 3
    assert point(*local, "device=cuda").run_id == ids[0], "as auto decides"
    simulated = [point("gpus=16", *more).run_id for more in ((), ("nccl={ALGO: Ring}",), ("device=cpu",))]
    assert len(set(simulated)) == 1, "no model knows them"


def test_a_launch_may_show_each_process_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "torch_has_cuda", lambda: True)
    launch = replace(Launch.planned(8), ranks_here=8, future=False)
    monkeypatch.setattr(mode, "gpus_here", lambda: 1)
    assert point("gpus=8", launch=launch).devices.kind == "cuda"
    monkeypatch.setattr(mode, "gpus_here", lambda: 0)
    with pytest.raises(RequestError, match="ranks of srun are on CPUs: this machine has 0 GPUs"):
        point("gpus=8", launch=launch)
    with pytest.raises(RequestError, match="it takes one process, and srun has started 8"):
        point("gpus=8", "mode=alone", "device=cpu", launch=launch)


def test_the_number_of_a_rank_on_its_host() -> None:
    assert local_rank({"RANK": "11", "LOCAL_RANK": "3", "SLURM_LOCALID": "0"}) == 3
    assert local_rank({"LOCAL_RANK": "3", "SLURM_LOCALID": "5"}) == 5, "exported, by whomever"
    assert local_rank({"SLURM_LOCALID": "5"}) == 5
    assert local_rank({}) == 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A torch with GPUs, which notes which one is taken."""
    found: dict[str, Any] = {"count": 8}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found["count"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.update(taken=index))
    for name in ("devices", "index", "group_timeout", "refused"):
        monkeypatch.setattr(devices._Process, name, getattr(devices._Process, name))
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    return found


@pytest.mark.parametrize(("count", "number", "index"), [(8, 5, 5), (1, 5, 0), (1, 0, 0)])
def test_a_rank_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any], count: int, number: int, index: int
) -> None:
    """The one of its number, or the only one that it is shown; settings are there before anything joins."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(devices.os, "environ", environment)
    cuda["count"] = count
    set_up_device(Devices(kind="cuda", nccl={"ALGO": "Ring"}), number, timedelta(seconds=9))
    assert cuda["taken"] == index
    assert device_here() == torch.device("cuda", index)
    assert environment == {"NCCL_ALGO": "Ring", **devices.SETTINGS}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    set_up_device(Devices(kind="cuda", nccl={"LAUNCH_ORDER_IMPLICIT": "0"}), number, timedelta(seconds=9))
    assert environment == {
        "NCCL_ALGO": "Ring", "NCCL_LAUNCH_ORDER_IMPLICIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }, "what the user has set"  # fmt: skip


def test_peers_find_nccl_in_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside gloo, where ranks have GPUs of their own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert group_backend(Devices(kind="cuda")) == "cpu:gloo,cuda:nccl"
    assert group_backend(CPUS) == group_backend(Devices(kind="cuda", shared=True)) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert group_backend(Devices(kind="cuda")) == "gloo", "so that a rank can say what it lacks"


def test_a_peer_is_measured_on_gpus(eight_gpus: None) -> None:
    found = point("method=peer", "impl=torch_context_parallel", "gpus=8", "cluster=local")
    assert (found.mode, found.devices.kind) == ("measure", "cuda")
    assert "with torch's own flash attention" in " ".join(found.notes)


def test_ranks_share_gpus_only_where_told_to(monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any]) -> None:
    monkeypatch.setattr(devices.os, "environ", {})
    cuda["count"] = 2
    set_up_device(Devices(kind="cuda"), 2, timedelta(seconds=9))
    with pytest.raises(RequestError, match="rank 2 of its host has no GPU: torch finds 2 there; 2 ranks on each host"):
        device_here()
    monkeypatch.setattr(devices._Process, "refused", None)
    set_up_device(Devices(kind="cuda", shared=True), 3, timedelta(seconds=9))
    assert device_here() == torch.device("cuda", 1)


def test_a_rank_without_a_gpu_says_so() -> None:
    """And its pool names it, with what would work."""
    if torch.cuda.is_available():
        return
    with RankPool(2, devices=Devices(kind="cuda")) as pool, pytest.raises(RankError) as caught:
        pool.run("sp_bench.measure.devices:device_here")
    assert isinstance(caught.value.cause, RequestError)
    assert "device=cuda: torch finds no GPU on this host; device=cpu would work" in str(caught.value)


def test_settings_are_checked() -> None:
    assert nccl_settings(None) == {}
    assert nccl_settings({"NCHANNELS_PER_NET_PEER": 4, "ALGO": "Ring"}) == {
        "ALGO": "Ring",
        "NCHANNELS_PER_NET_PEER": "4",
    }
    for wrong in ({"NCCL_ALGO": 1}, {"algo": 1}, {"ALGO": True}, {"ALGO": [1]}):
        with pytest.raises(RequestError, match="nccl"):
            nccl_settings(wrong)


@pytest.mark.parametrize(
    ("found", "figures", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM", True),
        ("NVIDIA H100 PCIe", "NVIDIA H100 SXM", False),
        ("NVIDIA H100 NVL", "NVIDIA H100 SXM", False),
        ("NVIDIA H200", "NVIDIA H100 SXM", False),
        ("NVIDIA H20", "NVIDIA H200 SXM", False),
        ("CPU", "NVIDIA H100 SXM", False),
        ("CPU", "CPU", False),
    ],
)
def test_a_peak_is_that_of_the_device_s_own_model(found: str, figures: str, same: bool) -> None:
    assert same_model(found, figures) is same


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("alone")
    request = point("method=mesh", "gpus=64", "mode=alone", "device=cpu", "alone=[0,63]", "method.tile=[8,8]", *ALONE)
    finished: list[Outcome] = []
    run_points([request], folder=folder, reuse=False, finished=finished.append)
    assert records.read_all(folder)[0].run_id == request.run_id
    return finished[0]


def test_ranks_alone_have_the_volume_of_the_plan_and_no_step(alone: Outcome) -> None:
    record, samples = alone.record, alone.samples
    assert samples
    assert (record.status, record.mode, record.cluster, record.gpus) == ("ok", "alone", "h100_ndr400", 64)
    assert record.alone_ranks == [0, 63]
    for none in ("step_ms_median", "forward_ms_median", "tokens_per_s", "iters_per_s", "tflops_per_gpu", "mfu"):
        assert getattr(record, none) is None, none
    assert record.exposed_comm_ms is record.rank_imbalance is record.err_out is record.nodes is None
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    assert record.device_name == "CPU"
    assert record.kernels_ms and record.folds_ms and record.interpreter_ms and record.compute_only_ms_median
    assert record.compute_ms and record.alone_ms_median
    assert set(samples.rank) == {0, 63} and set(samples.iteration) == {0, 1, 2}
    blocks, kernels, folds, caller = (samples.by_rank(part) for part in ("blocks", "kernels", "folds", "caller"))
    assert blocks.shape == (2, 3) and (kernels + folds <= blocks).all() and (blocks <= caller).all()
    known = Known(record)
    assert 0 < known.peak_mem_bytes_min <= known.peak_mem_bytes_max <= known.peak_mem_bytes_expected
    assert any(note.startswith("ranks 0, 63 of 64, alone") for note in record.notes or ())
    assert json.dumps(record.provenance)


def test_a_backward_alone(tmp_path: Path) -> None:
    """That of Ulysses, whose backward needs what its forward keeps."""
    options = (
        "method=ulysses",
        "gpus=8",
        "mode=alone",
        "device=cpu",
        "alone=[5]",
        "seqlen=1k",
        "heads=8",
        "iters=2",
        "warmup=0",
    )
    request = point(*options, "phase=backward")
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    record = outcome.record
    assert (record.status, record.mode, record.phase) == ("ok", "alone", "backward")
    assert record.alone_ms_median and record.comm_bytes_per_gpu == record.comm_bytes_expected


def test_ranks_alone_are_shown_as_that(alone: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    print_points(make_console(), [alone], Path(), every=True)
    print_sweep(make_console(), [alone])
    shown = capsys.readouterr().out
    assert "ranks 0, 63 of 64 GPUs, alone on h100_ndr400" in shown
    assert "measured, ranks alone" in shown and "mode alone" in shown
    assert "alone, with copies" in shown and "tokens/s, " not in shown and "TFLOP/s" not in shown
    assert "not of a step" in shown


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mode, "gpus_here", lambda: 0)
    assert main(["gpus=64", "mode=alone", "logger=none"]) == 2
    assert "mode=alone: this machine has 0 GPUs; device=cpu would work" in capsys.readouterr().err


@pytest.mark.long
def test_the_gpu_s_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses without a GPU; that it can do what it is for, ranks on CPUs show."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_executor.main([]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
    for name, value in {"HEADS": 4, "HEAD_DIM": 16, "DTYPE": "bfloat16"}.items():
        monkeypatch.setattr(gpu_executor, name, value)
    monkeypatch.setattr(gpu_executor, "METHODS", gpu_executor.METHODS[:4])
    monkeypatch.setattr(gpu_executor, "Devices", lambda **_: CPUS)
    monkeypatch.setattr(gpu_executor, "SHARED_BY", (2,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(gpu_executor, "choose", lambda *_: None)
    assert gpu_executor.main(["kernel=aten_cpu"]) == 0
    _, exact, _ = capsys.readouterr().out.split("\n\n", 2)
    assert len(exact.splitlines()) == 2 + 8 and exact.count("| 2 | float32 | aten_cpu |") == 4


@pytest.mark.long
def test_what_fails_on_the_gpu_is_said_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 4, "HEAD_DIM": 16, "DTYPE": "float32"}.items():
        monkeypatch.setattr(gpu_executor, name, value)
    kernels = ("aten_cpu", "cudnn", "reference")
    specs = [gpu_executor.spec("ring", {}, 2, 128, kernel=kernel) for kernel in kernels]
    first, failed, last = gpu_executor.measured(2, CPUS, specs)
    assert isinstance(first, RankResult) and isinstance(last, RankResult) and not first.wrong("float32")
    assert isinstance(failed, str) and "kernel=cudnn: it runs on cuda only, not on cpu" in failed
    monkeypatch.setattr(gpu_executor, "Devices", lambda **_: CPUS)
    monkeypatch.setattr(gpu_executor, "METHODS", gpu_executor.METHODS[:1])
    assert all(isinstance(found, dict) for found in gpu_executor.exactness(2, "aten_cpu"))
    monkeypatch.setattr(RankResult, "wrong", lambda self, dtype: f"wrong in {dtype}")
    wrong = [f"ring, 2 ranks, {wire} on the wire: wrong in float32" for wire in ("float32", "float32")]
    assert [*gpu_executor.exactness(2, "aten_cpu")] == wrong
