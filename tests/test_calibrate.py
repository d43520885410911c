"""Calibration: a quick one gives a cluster file that loads, simulates, and says what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sp_bench.__main__ import main as bench
from sp_bench.calibrate import main
from sp_bench.calibrating.cluster_file import block_flops, cluster_config
from sp_bench.calibrating.setting import Costs, Links, Setting
from sp_bench.plan import PHASES, Problem, layout_named
from sp_bench.simulate import Cluster

SETTING = Setting(
    device="cpu",
    kernel="auto",
    dtypes=("float32",),
    heads=2,
    head_dim=16,
    sizes=(64, 128),
    repetitions=3,
    message_bytes=1000,
    exchange_bytes=(10_000, 100_000),
)
LAUNCH_S = 1e-6


def samples() -> tuple[Costs, list[Links]]:
    """What a machine of known rates would have shown: blocks of 1, 2, 3 ... ms."""
    costs = Costs(kernel="aten_cpu", launch_s=[LAUNCH_S] * 3, fold_bytes=10, fold_s=[2e-6] * 3)
    costs.copy_bytes, costs.copy_s = 8, [3e-6] * 3
    for phase in PHASES:
        cases = [(f"{phase}_full", q, kv) for q in SETTING.sizes for kv in SETTING.sizes]
        for case in [*cases, *((f"{phase}_causal", size, size) for size in SETTING.sizes)]:
            middle = 1e-3 * (1 + len(costs.blocks_s))
            costs.blocks_s["float32", *case] = [middle / 2, middle, 5 * middle]
    link = Links(
        pair_tiny_s=[1e-4], pair_large_s=[2e-4], ring_tiny_s=[1e-4, 1e-4, 9e-4], ring_large_s=[3e-4, 3e-4, 3e-4]
    )
    link.alone_s, link.beside_s = [1.0, 1.0], [1.5, 1.5]
    slower = Links(ring_tiny_s=[5e-5, 2e-4, 2e-4], ring_large_s=[1e-4, 1.2e-3, 1.2e-3], alone_s=[1.0], beside_s=[])
    return costs, [link, slower]


def block_s(cluster: Cluster, tokens: int, phase: str, *, causal: bool, dtype: str = "float32", **shape: int) -> float:
    p = Problem(
        n=1,
        seqlen=tokens,
        causal=causal,
        dtype=dtype,
        kv_heads=shape["heads"],
        layout=layout_named("contiguous", causal=causal),
        **shape,
    )
    return float(cluster.device.block_s(p, phase)[1])


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


def test_flops_of_a_block() -> None:
    assert block_flops("forward_full", 64, 128, SETTING) == 4 * 64 * 128 * 2 * 16
    assert block_flops("backward_causal", 64, 64, SETTING) == 10 * 64 * 65 // 2 * 2 * 16


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a quick calibration wrote, in a folder for --config-dir."""
    path = tmp_path_factory.mktemp("conf") / "cluster" / "here.yaml"
    assert main(["quick=true", f"out={path}", "head_dim=16", "heads=2", "ranks=2"]) == 0
    return path


def rates(config: dict[str, Any]) -> list[float]:
    tables = config["device"]["rates"].values()
    return [
        rate for table in tables for name in table if name.endswith(("full", "causal")) for rate in table[name].values()
    ]


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


def test_a_calibration_says_where_it_comes_from(quick: Path) -> None:
    sources = yaml.safe_load(quick.read_text())["sources"]
    assert "python -m sp_bench.calibrate quick=true head_dim=16" in sources["calibrated"]
    assert "git commit" in sources["calibrated"] and str(quick) not in quick.read_text()
    assert "torch" in sources["machine"] and "cores" in sources["machine"]
    assert "medians of 3" in sources["rates"] and "spread" in sources["rates"]


def test_it_can_be_simulated_at_once(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = "cluster=here mode=simulate method=ring gpus=2 seqlen=256 heads=2 head_dim=16 dtype=float32 logger=none"
    assert bench(["--config-dir", str(quick.parent.parent), *point.split(), f"results_dir={tmp_path}"]) == 0
    assert "SIMULATED" in capsys.readouterr().out


def test_its_own_file_is_written_again_and_no_other(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = quick.with_name("other.yaml")
    other.write_text("name: other\n")
    assert main(["quick=true", f"out={other}"]) == 2
    assert "this command didn't write it" in capsys.readouterr().err
    assert other.read_text() == "name: other\n"
    assert main(["name=local"]) == 2
    assert "name=local: there is such a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("device=tpu", "device=tpu: there is no such device; .*cpu, cuda"),
        ("nam=x", "nam: there is no such key; did you mean name"),
        ("quick", "quick: is not of the form key=value"),
        ("quick=maybe", "quick=maybe: must be true or false"),
        ("heads=0", "heads=0: must be at least 1"),
        ("head_dim=x", "head_dim=x: must be a whole number"),
        ("repetitions=0", "repetitions=0: must be at least 1"),
        ("ranks=1", "ranks=1: must be at least 2"),
        ("name=../x", "name=../x: must be a word"),
        ("out=somewhere", "out=somewhere: must be a .yaml file"),
        ("out=/proc/no/x.yaml", "out=/proc/no/x.yaml: its folder can't be made"),
        ("kernel=flesh out=build/cluster/x.yaml", "kernel=flesh: there is no such kernel"),
        ("quick=[", "quick=\\[: is no value"),
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
    for gpus, why in ((0, "this machine has no GPU"), (1, "calibrating GPUs is not supported yet")):
        monkeypatch.setattr("sp_bench.calibrate.gpus_here", lambda count=gpus: count)
        assert main(["device=cuda"]) == 2
        assert f"device=cuda: {why}; device=cpu would work" in capsys.readouterr().err
