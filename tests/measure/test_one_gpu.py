"""The study of one GPU on CPUs: what it measures, and the page it makes of that."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sp_bench import records
from sp_bench.analysis import reproduce
from sp_bench.analysis.studies import fused_blocks, one_gpu
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError

SMALL = replace(
    one_gpu.BENCHES["cpu"],
    sizes=((4, "512"),),
    where=replace(one_gpu.CPU, head_dim=16),
    calibration=("quick=true", "ranks=2", "heads=2", "repetitions=1"),
)
METHODS = (("method=ring", "method.layout=zigzag"), ("method=mesh", "method.layout=zigzag", "method.fuse=true"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(one_gpu.BENCHES, "cpu", SMALL)
    monkeypatch.setattr(one_gpu, "METHODS", METHODS)
    monkeypatch.setattr(one_gpu, "TILES", {(4, 1): (2, 2)})
    monkeypatch.setattr(fused_blocks, "TOKENS", (64,))
    monkeypatch.setattr(fused_blocks, "REPETITIONS", 6)


@pytest.mark.long
def test_ranks_alone_are_beside_their_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "measured"
    asked = ["study=one_gpu", "device=cpu", f"records={folder}", f"pages={tmp_path}"]
    assert reproduce.main([*asked, "measure=false"]) == 2
    assert "has no figures of aten_cpu" in capsys.readouterr().err
    assert reproduce.main(asked) == 0
    found = records.read_all(folder / "alone")
    assert {(record.method, record.status, record.gpus) for record in found} == {("ring", "ok", 4), ("mesh", "ok", 4)}
    page = (tmp_path / "one_gpu.md").read_text()
    for record in found:
        computed = rf"{record.kernels_ms:.1f} \+ {record.folds_ms:.1f} \| {record.compute_ms:.1f}"
        assert re.search(rf"\| 4 \| 0k \| {record.method} .*{computed}", page), record.method
    assert "Not measured" not in page
    assert page.count("| 64 | causal |") == len(fused_blocks.SETTINGS[0][1])
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert reproduce.main(asked) == 0, "what is there is not measured again"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == stamps


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def breaks(*asked: object) -> list[str]:
        raise RuntimeError("no more memory")

    for name in ("_calibrate", "_ranks_alone"):
        monkeypatch.setattr(one_gpu, name, breaks)
    monkeypatch.setattr(one_gpu, "_shares", lambda *asked: iter(done.append(asked[2]) or ["one share"]))
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["study=one_gpu", "device=cpu", f"records={tmp_path}", f"pages={tmp_path}", "kernels=a,b"])
    shown = str(ended.value)
    assert shown.count("RuntimeError: no more memory") == 4 and shown.count("one share") == 2
    assert done == ["a", "b"]


def test_a_device_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["study=one_gpu", "device=tpu"]) == 2
    assert "device=tpu" in capsys.readouterr().err


def test_square_blocks_are_those_with_as_many_queries_as_keys() -> None:
    assert one_gpu._square({"512x512": 1.0, "512x1024": 2.0, "1024x1024": 3.0}) == {"512": 1.0, "1024": 3.0}
    assert one_gpu._square({512: 1.0, 1024: 2.0}) == {"512": 1.0, "1024": 2.0}


def test_a_ratio_is_simulated_over_measured() -> None:
    measured = SimpleNamespace(
        gpus=8, seqlen=4096, method="ring", variant="1x8", layout="zigzag", kernels_ms=7.0, folds_ms=2.0,
        compute_ms=10.0, alone_ms_median=20.0, interpreter_ms=5.0, sm_mhz_median=1980.0, gpu_power_w_median=650.0,
    )  # fmt: skip
    row = one_gpu._row(measured, {"here": SimpleNamespace(compute_ms=9.0), "there": SimpleNamespace(compute_ms=11.0)})  # pyright: ignore[reportArgumentType]
    assert (row["ratio, here"], row["ratio, there"], row["queueing"]) == ("0.900", "1.100", "25%")
    assert row["clock, power"] == "1980 MHz, 650 W"


def test_rates_are_beside_the_cluster_files_where_they_differ(tmp_path: Path) -> None:
    bench = one_gpu.BENCHES["cuda"]
    with Composer() as composer:
        filed = composer.compose([f"cluster={bench.cluster}"])["cluster"]["device"]["rates"]["flash_attn_4"]
    same, other = filed["forward_full"]["1024x1024"], filed["backward_causal"][512] + 7
    table = {"dtypes": {"bfloat16": 1.0}, "forward_full": {"1024x1024": same, "1024x512": 1}, "forward_causal": {}}
    table |= {"backward_full": {}, "backward_causal": {512: other}}
    path = tmp_path / "conf" / "cluster" / "flash_attn_4.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"device": {"rates": {"any": table}}}))
    rows = {row[""]: row for row in one_gpu._rates(tmp_path, bench, "flash_attn_4")}
    assert rows["forward, full"] == {"": "forward, full", "1024": f"{same:.0f}"}
    assert rows["backward, causal"] == {"": "backward, causal", "512": f"{other:.0f} ({other - 7:.0f})"}


def test_a_point_with_two_records_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [SimpleNamespace(config={"method": {"name": "ring"}, "gpus": 4}, run_id=name) for name in ("one", "two")]
    monkeypatch.setattr(records, "read_all", lambda folder: twice)
    with pytest.raises(RequestError, match="has two records of a point, one and two"):
        one_gpu._alone_rows(tmp_path, SMALL, "aten_cpu")
