"""Calibration: a quick one gives a cluster file that loads, simulates, and says what was measured."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from sp_bench.__main__ import main as bench
from sp_bench.calibrate import main
from sp_bench.calibrating.clock import CLOCKS
from sp_bench.calibrating.cluster_file import block_flops, cluster_config, device_sources
from sp_bench.calibrating.gpu_file import measured_links
from sp_bench.calibrating.kernels import describe_gpu, measure_kernels
from sp_bench.calibrating.links import MOST_MESSAGES
from sp_bench.calibrating.pairs import PairRate
from sp_bench.calibrating.setting import Costs, Gpu, Setting
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.machine import Devices
from sp_bench.measure.pool import RankPool
from sp_bench.plan import Problem
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.regions import RegionKind
from sp_bench.resources import conf_files
from tests.calibrating.jobs import messages_of_10_ms
from tests.support.calibration import LAUNCH_S, SETTING, samples
from tests.support.problems import mask_of
from tests.support.ranks import WORLD, Ranks


def block_s(cluster: Cluster, tokens: int, phase: str, *, causal: bool, dtype: str = "float32", **shape: Any) -> float:
    p = Problem(
        n=1,
        seqlen=tokens,
        mask=mask_of(causal),
        dtype=dtype,
        kv_heads=shape["heads"],
        layout=LAYOUTS["contiguous"],
        **shape,
    )
    return float(cluster.device.block_s(p, phase)[p.blocks.of(0, 0)])


def test_medians_come_back_from_the_table() -> None:
    costs, links = samples()
    cluster = Cluster.build(cluster_config("known", SETTING, costs, links, {"calibrated": "now"}))
    for (_, case, q, kv), times in costs.blocks_s.items():
        phase, _, mask = case.partition("_")
        if q == kv:
            found = block_s(cluster, q, phase, causal=mask == "causal", heads=2, head_dim=16)
            assert found == pytest.approx(np.median(times), rel=1e-3)
    assert cluster.device.launch_s == LAUNCH_S
    assert cluster.device.fold_bytes_per_s == pytest.approx(10 / 1e-6, rel=1e-3)
    assert cluster.device.memory_bytes_per_s == pytest.approx(8 / 2e-6, rel=1e-3)
    # Of each repetition the slowest rank counts: 0.1, 0.2, 0.9 ms and 0.3, 1.2, 1.2 ms.
    assert cluster.topology.intra.latency_s == pytest.approx(2e-4)
    assert cluster.topology.intra.bytes_per_s == pytest.approx(1000 / 1e-3)
    assert cluster.device.transfer_slowdown == pytest.approx(0.5)


def test_blocks_that_are_all_launch_still_have_a_rate() -> None:
    costs, links = samples()
    costs.launch_s = [1.0]
    config = cluster_config("slow", SETTING, costs, links, {})
    assert all(rate > 0 for rate in config["device"]["rates"]["aten_cpu_float32"]["forward_full"].values())
    Cluster.build(config)


@pytest.mark.long
def test_messages_last_long_enough_for_the_slowest_rank(ranks: Ranks) -> None:
    """9 * 81 ms are 73 messages of 10 ms, on all ranks; no fewer than are asked for, and no endless number."""
    for seconds, number in ((0.081, 73), (0.0001, 20), (10.0, MOST_MESSAGES)):
        assert ranks.run(messages_of_10_ms, seconds, 20) == [number] * WORLD


def test_flops_of_a_block() -> None:
    assert block_flops("forward_full", 64, 128, SETTING) == 4 * 64 * 128 * 2 * 16
    assert block_flops("backward_causal", 64, 64, SETTING) == 10 * 64 * 65 // 2 * 2 * 16


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a quick calibration wrote, in a folder for --config-dir."""
    path = tmp_path_factory.mktemp("conf") / "cluster" / "here.yaml"
    assert main(["quick=true", "device=cpu", f"out={path}", "head_dim=16", "heads=2", "ranks=2"]) == 0
    return path


def rates(config: dict[str, Any]) -> list[float]:
    tables = config["device"]["rates"].values()
    return [
        rate for table in tables for name in table if name.endswith(("full", "causal")) for rate in table[name].values()
    ]


@pytest.mark.long
def test_a_quick_calibration_is_a_cluster(quick: Path) -> None:
    config = yaml.safe_load(quick.read_text())
    cluster = Cluster.build(config)
    assert (cluster.name, cluster.this_machine, cluster.topology.gpus_per_node) == ("here", True, None)
    assert cluster.cores and cluster.topology.inter is None
    assert set(config["device"]["rates"]) == {"aten_cpu_float32", "aten_cpu_bfloat16"}
    assert len(rates(config)) == 2 * 2 * (4 + 2)
    assert all(0 < rate < 10 for rate in rates(config))
    assert 0 < cluster.device.launch_s < 0.1
    assert 1e6 < cluster.device.fold_bytes_per_s < 1e13
    assert 1e6 < cluster.device.memory_bytes_per_s < 1e13
    assert 1e4 < cluster.topology.intra.bytes_per_s < 1e13
    assert 0 < cluster.topology.intra.latency_s < 1
    for dtype in ("float32", "bfloat16"):
        assert 0 < block_s(cluster, 128, "forward", causal=True, dtype=dtype, heads=2, head_dim=16) < 10


@pytest.mark.long
def test_a_calibration_says_where_it_comes_from(quick: Path) -> None:
    sources = yaml.safe_load(quick.read_text())["sources"]
    assert "python -m sp_bench.calibrate quick=true device=cpu head_dim=16" in sources["calibrated"]
    assert "git commit" in sources["calibrated"] and str(quick) not in quick.read_text()
    assert "torch" in sources["machine"] and "cores" in sources["machine"]
    assert "medians of 3" in sources["rates"] and "spread" in sources["rates"]


@pytest.mark.long
def test_it_can_be_simulated_at_once(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = "cluster=here mode=simulate method=ring gpus=2 seqlen=256 heads=2 head_dim=16 dtype=float32 logger=none"
    assert bench(["--config-dir", str(quick.parent.parent), *point.split(), f"results_dir={tmp_path}"]) == 0
    assert "SIMULATED" in capsys.readouterr().out


@pytest.mark.long
def test_by_default_it_is_the_users_own_file_which_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["name=mine", "quick=true", "device=cpu", "head_dim=16", "heads=2", "ranks=2"]) == 0
    path = tmp_path / "sp_bench" / "cluster" / "mine.yaml"
    assert f"{path}: python -m sp_bench cluster=mine gpus=2 would use it" in capsys.readouterr().out
    point = "cluster=mine mode=simulate method=ring gpus=2 seqlen=256 heads=2 head_dim=16 dtype=float32 logger=none"
    assert bench([*point.split(), f"results_dir={tmp_path / 'results'}"]) == 0
    assert "2 GPUs on mine" in capsys.readouterr().out


@pytest.mark.long
def test_its_own_file_is_written_again_and_no_other(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = quick.with_name("other.yaml")
    other.write_text("name: other\n")
    assert main(["quick=true", f"out={other}"]) == 2
    assert "this command didn't write it" in capsys.readouterr().err
    assert other.read_text() == "name: other\n"
    assert main(["name=local"]) == 2
    assert "name=local: the suite has a cluster of that name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("device=tpu", "device=tpu: there is no such device; .*cpu, cuda"),
        ("nam=x", "nam: there is no such key; did you mean name"),
        ("quick", "quick: is not of the form key=value"),
        ("quick=maybe", "quick=maybe: must be true or false"),
        ("heads=0", "heads=0: must be a whole number of at least 1"),
        ("head_dim=x", "head_dim=x: must be a whole number"),
        ("repetitions=0", "repetitions=0: must be a whole number of at least 1"),
        ("sustained_s=-1", "sustained_s=-1: must be a finite number"),
        ("ranks=1", "ranks=1: must be a whole number of at least 2"),
        ("name=../x", "name=../x: must be a word"),
        ("out=somewhere", "out=somewhere: must be a .yaml file"),
        ("out=/proc/no/x.yaml", "out=/proc/no/x.yaml: its folder can't be made"),
        ("kernel=flesh out=build/cluster/x.yaml", "kernel=flesh: there is no such kernel"),
        ("quick=[", "quick=\\[: is not YAML"),
        ("heads=6 kv_heads=4", "kv_heads=4: must divide heads=6; kv_heads=6 would work"),
        ("cluster=shapd", "cluster=shapd: there is no such cluster; did you mean shaped"),
        ("cluster=local", "cluster=local: has no hosts, .*; cluster=shaped would work"),
    ],
)
def test_bad_arguments_exit_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert re.search(f"sp_bench.calibrate: {message}", error), error


def test_a_gpu_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs."""
    monkeypatch.setattr("sp_bench.calibrate.RankPool", None)
    monkeypatch.setattr("sp_bench.calibrate.gpus_here", lambda: 0)
    for cores, there in ((1, "1 CPU core"), (2, "2 CPU cores")):
        monkeypatch.setattr("sp_bench.calibrate.cores_here", lambda count=cores: count)
        assert main(["device=cuda"]) == 2
        error = f"device=cuda: this machine has no GPU, but {there}; device=cpu would work"
        assert error in capsys.readouterr().err


class OneGpu:
    """A pool whose one rank has a GPU of known rates."""

    name = "NVIDIA H100 80GB HBM3"

    def __init__(self, n: int, timeout_s: float) -> None:
        assert n == 1 and timeout_s >= 300, "some kernels are compiled at their first call"
        self.settings: list[Setting] = []

    def __enter__(self) -> OneGpu:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def run(self, function: str, *arguments: Any) -> list[Any]:
        if function.endswith(":describe_gpu"):
            return [Gpu(name=self.name, sms=132, memory_bytes=80 * 2**30, software="CUDA 13.0, cuDNN 91900")]
        assert function.endswith(":measure_kernels")
        (setting,) = arguments
        assert setting.device == "cuda" and setting.sizes[-1] in (1024, 65536)
        return [self.costs(setting)]

    def costs(self, setting: Setting) -> Costs:
        costs = Costs(kernel="cudnn", launch_s=[5e-6] * 3, fold_bytes=2000, fold_s=[6e-6] * 3)
        costs.copy_bytes, costs.copy_s = 3000, [6e-6] * 3
        costs.sum_bytes, costs.sum_s = 4000, [12e-6] * 3
        costs.product_shape, costs.products_s = (8192, 4096, 8192), {dtype: [1e-3] * 3 for dtype in setting.dtypes}
        costs.layers_s = {(phase, n): [n * 1e-6] * 3 for phase in PHASES for n in setting.sizes}
        for dtype, phase in itertools.product(setting.dtypes, PHASES):
            for q, kv in itertools.product(setting.sizes, repeat=2):
                costs.blocks_s[dtype, f"{phase}_full", q, kv] = [1e-3 * q * kv / 512**2] * 3
            for size in setting.sizes:
                costs.blocks_s[dtype, f"{phase}_causal", size, size] = [5e-4 * size**2 / 512**2] * 3
        return costs


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_bench.calibrate.gpus_here", lambda: 1)
    monkeypatch.setattr("sp_bench.calibrate.RankPool", OneGpu)


@pytest.mark.parametrize("options", ["device=cuda quick=true", "quick=true", "device=cuda", "device=cuda kv_heads=4"])
def test_a_gpu_is_a_cluster_with_the_links_of_another(one_gpu: None, options: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster" / "mine.yaml"
    assert main([*options.split(), f"out={path}"]) == 0
    config = yaml.safe_load(path.read_text())
    cluster = Cluster.build(config)
    base = Cluster.build(yaml.safe_load(conf_files("cluster")["h100_ndr400"].read_text()))
    assert cluster.topology == base.topology and not cluster.this_machine
    assert cluster.device.name == "NVIDIA H100 80GB HBM3" and cluster.device.memory_bytes == 80 * 2**30
    assert cluster.device.peak_tflops == base.device.peak_tflops
    assert cluster.device.fold_bytes_per_s == pytest.approx(2000 / 1e-6)
    assert cluster.device.sum_bytes_per_s == pytest.approx(4000 / 2e-6)
    assert cluster.device.memory_bytes_per_s == pytest.approx(3000 / 1e-6)
    for dtype in ("bfloat16", "float16"):
        for tokens, phase in itertools.product((512, 1024), PHASES):
            found = block_s(cluster, tokens, phase, causal=False, dtype=dtype, heads=32, head_dim=128)
            assert found == pytest.approx(1e-3 * (tokens / 512) ** 2, rel=1e-3)
    sources = config["sources"]
    assert sources["gpus_per_node, intra, inter, fabric, placement, peak_tflops, transfer_slowdown"].endswith(
        "not measured: those of cluster=h100_ndr400"
    )
    assert sources["software"] == "CUDA 13.0, cuDNN 91900"
    assert ("blocks of 32/4 heads" in sources["rates"]) == ("kv_heads=4" in options)
    assert (
        "CUDA events" in sources["rates"]
        and "in bfloat16 into them" in sources["memory_bytes_per_s, fold_bytes_per_s, sum_bytes_per_s"]
    )


def test_rates_that_no_gpu_has_are_named(
    one_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OneGpu.costs

    def too_fast(self: OneGpu, setting: Setting) -> Costs:
        costs = right(self, setting)
        costs.blocks_s["float16", "backward_full", 512, 1024] = [1e-5] * 3
        return costs

    assert main(["device=cuda", "quick=true", f"out={tmp_path}/cluster/a.yaml"]) == 0
    assert "above the peak" not in capsys.readouterr().out
    monkeypatch.setattr(OneGpu, "costs", too_fast)
    assert main(["device=cuda", "quick=true", f"out={tmp_path}/cluster/b.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "rates above the peak of NVIDIA H100 80GB HBM3" in shown
    assert "is too large a part of the time: cudnn_float16 backward_full 512x1024\n" in shown


def test_links_of_a_gpu_that_no_file_knows(
    one_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneGpu, "name", "NVIDIA T4")
    out = f"out={tmp_path}/cluster/mine.yaml"
    for options, message in (
        ([], "cluster=null: no cluster file has the links of NVIDIA T4, .*h100_ndr400"),
        (["cluster=h100_ndr"], "cluster=h100_ndr: there is no such cluster; did you mean h100_ndr400"),
        (["cluster=local"], "cluster=local: has no GPUs, whose links the file could take; cluster=.* would work"),
        (["ranks=2"], "ranks=2: on GPUs there is one rank for each"),
    ):
        assert main(["device=cuda", "quick=true", out, *options]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert main(["device=cuda", "quick=true", out, "cluster=a100_hdr200"]) == 0
    assert yaml.safe_load((tmp_path / "cluster" / "mine.yaml").read_text())["device"]["name"] == "NVIDIA T4"


def test_links_between_gpus_are_those_of_their_pairs(
    one_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo, between ranks in the place of GPUs; what pairs don't show is still the other cluster's."""
    asked: list[Any] = []

    def ranks(n: int, timeout_s: float, launch: object, *, devices: Devices) -> RankPool:
        asked.append((n, launch, devices))
        return RankPool(n, timeout_s)

    monkeypatch.setattr("sp_bench.calibrate.gpus_here", lambda: 2)
    monkeypatch.setattr("sp_bench.calibrate.open_ranks", ranks)
    path = tmp_path / "cluster" / "mine.yaml"
    assert main(["device=cuda", "quick=true", f"out={path}"]) == 0
    assert asked == [(2, None, Devices(kind="cuda"))]
    found, base = yaml.safe_load(path.read_text()), yaml.safe_load(conf_files("cluster")["h100_ndr400"].read_text())
    assert found["intra"]["bytes_per_s"] != base["intra"]["bytes_per_s"] and found["inter"] == base["inter"]
    assert found["sources"]["intra"].startswith("medians of 2 exchanges between two ranks of a node over NCCL")
    assert "inter" in next(key for key, why in found["sources"].items() if why.startswith("not measured"))
    Cluster.build(found)


def test_rates_of_pairs_as_a_cluster_file_has_them() -> None:
    pairs = [
        PairRate(a=a, b=b, lane=lane, bytes_per_s=rate * (1 + lane / 8), latency_s=latency_s)
        for a, b, rate, latency_s in ((0, 1, 3e11, 4e-6), (2, 3, 3e11, 4e-6), (0, 2, 4e10, 2e-5), (1, 3, 4e10, 2e-5))
        for lane in (0, 1)
    ]
    hosts, inter = {"n1": [0, 1], "n2": [2, 3]}, {"bytes_per_s": 1.0, "latency_s": 1.0, "nics_per_node": 4}
    base = {"gpus_per_node": 8, "intra": {"bytes_per_s": 1.0, "latency_s": 1.0}, "inter": inter}
    keys, sources = measured_links(base, pairs, hosts)
    assert keys["intra"] == {"bytes_per_s": 3.188e11, "latency_s": 4e-6}, "the median of both lanes"
    assert keys["inter"] == {"bytes_per_s": 4.25e10, "latency_s": 2e-5, "nics_per_node": 4}
    assert sources["inter"] == (
        "medians of 4 exchanges between two ranks of different nodes over NCCL, one pair and one of 2 lanes at a time,"
        " from 4e+10 to 4.5e+10 bytes/s each way"
    )
    cables = measured_links({**base, "intra": {"kind": "full_mesh", **base["intra"]}}, pairs[:2], hosts)[0]
    assert cables["intra"]["bytes_per_s"] == pytest.approx(7 * 3.1875e11, rel=1e-3)
    assert measured_links({**base, "intra": {"kind": "pcie_tree"}, "inter": None}, pairs, hosts) == ({}, {})
    assert measured_links(base, [], {}) == ({}, {})


def test_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="device=cuda: torch .* can't use a GPU here"):
        describe_gpu()


@pytest.mark.long
def test_blocks_are_timed_after_a_run_of_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    forward = AtenCpu.forward

    def counted(self: AtenCpu, q: Tensor, k: Tensor, v: Tensor, mask: RegionKind) -> tuple[Tensor, Tensor]:
        calls[f"{mask.value} {q.shape[1]}x{k.shape[1]}"] += 1
        return forward(self, q, k, v, mask)

    monkeypatch.setattr(AtenCpu, "forward", counted)
    setting = replace(SETTING, sizes=(64,), repetitions=1)
    rested = measure_kernels(setting)
    once, sustained = dict(calls), replace(setting, sustained_s=0.05)
    calls.clear()
    busy = measure_kernels(sustained)
    assert rested and busy and rested.blocks_s.keys() == busy.blocks_s.keys()
    assert once["full 64x64"] == once["causal 64x64"] == 2
    assert min(calls["full 64x64"], calls["causal 64x64"]) > 10
    assert "after 0.05 s of the same block" in device_sources(sustained, busy, "on one thread")["rates"]
    assert "after" not in device_sources(setting, rested, "on one thread")["rates"]


def test_costs_of_gqa() -> None:
    """On a CPU: keys and values have fewer heads, and a part in bf16 is folded."""
    setting = replace(SETTING, kv_heads=1, dtypes=("bfloat16",), repetitions=1)
    costs = measure_kernels(setting)
    assert costs and set(costs.blocks_s) == {
        ("bfloat16", f"{phase}_{mask}", q, kv)
        for phase in PHASES
        for mask, q, kv in [
            *(("full", q, kv) for q in (64, 128) for kv in (64, 128)),
            ("causal", 64, 64),
            ("causal", 128, 128),
        ]
    }
    rows = setting.memory_tokens * setting.heads
    assert (costs.fold_bytes, costs.copy_bytes, costs.sum_bytes) == (
        (10 * 16 + 12) * rows, 8 * 16 * rows, (10 + 6) * 16 * rows,
    )  # fmt: skip


def test_the_clock_of_a_gpu_times_kernels_and_not_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events that say when they are recorded: the GPU is busy while all is launched, and is waited for."""
    happened: list[str] = []
    slept: list[int] = []
    awake = [False]
    """Whether the GPU has begun when all has been launched, each time."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = ""

        def record(self) -> None:
            self.name = "end" if happened[-1] == "launch" else "start"
            happened.append(self.name)

        def query(self) -> bool:
            assert self.name == "start" and happened[-1] == "end"
            return awake.pop(0)

        def synchronize(self) -> None:
            happened.append(f"wait for {self.name}")

        def elapsed_time(self, other: Event) -> float:
            assert (self.name, other.name) == ("start", "end") and happened[-1] == "wait for end"
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (happened.append("sleep"), slept.append(cycles)))

    def launch(x: int) -> int:
        happened.append("launch")
        return x + 1

    assert CLOCKS["cuda"](launch, 2) == (0.25, 3)
    once = ["sleep", "start", "launch", "end", "wait for end"]
    assert happened == once
    for awake[:], launched in (([True, False], 2), ([True] * 4, 4)):
        happened.clear()
        assert CLOCKS["cuda"](launch, 2) == (0.25, 3)
        assert happened == once * launched, "again if that took longer than it slept, but not for ever"
        first = slept[-launched]
        assert first > 0 and slept[-launched:] == [first * 4**attempt for attempt in range(launched)]
