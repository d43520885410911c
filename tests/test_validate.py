"""Simulated against measured: real points on this machine, and what counts as ordered alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sp_bench import records
from sp_bench.calibrating import speed
from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.labs.shaped.description import Hosts
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import O
from sp_bench.point import Outcome, Request, resolve
from sp_bench.point import run_points as run_all
from sp_bench.point.choose import choose
from sp_bench.validate import machine as validate
from sp_bench.validate.machine import main, pairs_in_order
from tests.support.clusters import problem
from tests.support.typed import Known, of_kind

SMALL = "cluster=local heads=2 head_dim=64 dtype=float32 causal=false iters=5 warmup=1 parts=false logger=none".split()


@pytest.mark.long
def test_points_are_measured_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"out={tmp_path}", *SMALL, "gpus=2", "seqlen=512,1k", "method=ring,pass_q,ulysses"]
    assert main(arguments) == 0
    table = pd.read_csv(tmp_path / "validation.csv")
    assert len(table) == 6
    assert table["step_error"].equals(table["step_simulated_ms"] / table["step_measured_ms"] - 1)
    by_id = {record.run_id: record for record in records.read_all(tmp_path / "records")}
    timed_alone = {record.seqlen: record for record in by_id.values() if record.compute_only_ms_median}
    assert sorted(timed_alone) == [512, 1024] and {record.method for record in timed_alone.values()} == {"ring"}
    for point in table.to_dict("records"):
        measured, simulated = (Known(by_id[point[f"{mode}_run_id"]]) for mode in ("measured", "simulated"))
        assert (measured.mode, simulated.mode) == ("measure", "simulate")
        assert point["step_measured_ms"] == measured.step_ms_median
        assert point["step_as_calibrated_ms"] == pytest.approx(simulated.step_ms_median)
        assert point["step_error_as_calibrated"] == pytest.approx(
            simulated.step_ms_median / measured.step_ms_median - 1
        )
        alone = timed_alone[point["seqlen"]]
        assert alone.config and point["speed"] == pytest.approx(speed.speed_of(resolve(alone.config), alone))
        faster, slower = sorted([point["step_simulated_ms"], simulated.step_ms_median])
        assert faster * 1.001 <= slower or point["speed"] == pytest.approx(1, abs=0.01)
        assert (point["step_simulated_ms"] == slower) == (point["speed"] < 1)
    text = (tmp_path / "validation.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("| 2 ranks, ") == 6
    assert "6 points. Ordered alike: " in text
    assert "<svg" in (tmp_path / "validation.svg").read_text()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()}
    monkeypatch.setattr(validate, "speed_of", None)  # nothing asks for it
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()} == before, "all were there"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "validation.csv"), table)


@pytest.mark.long
def test_each_point_keeps_the_speed_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others are added later, or the speed was not written before the end came."""
    speeds = iter([1.0, 2.0, 3.0, 5.0])
    asked: list[tuple[str, int]] = []

    def counted(request: Request, record: records.Record) -> float:
        assert request.parts and record.compute_only_ms_median
        asked.append((request.method.name, request.problem.kv_heads))
        return next(speeds)

    monkeypatch.setattr(validate, "speed_of", counted)
    arguments = [f"out={tmp_path}", *SMALL, "gpus=2", "seqlen=512"]
    assert main([*arguments, "method=ring"]) == 0
    first = pd.read_csv(tmp_path / "validation.csv").set_index("method")
    assert main([*arguments, "method=ring,pass_q"]) == 0
    both = pd.read_csv(tmp_path / "validation.csv").set_index("method")
    assert both["speed"].to_dict() == {"ring": 1.0, "pass_q": 2.0}
    assert both.loc["ring", "step_measured_ms"] == first.loc["ring", "step_measured_ms"]
    (tmp_path / "speeds.json").unlink()
    assert main([*arguments, "method=ring", "kv_heads=1,2"]) == 0
    assert asked == [("ring", 2)] * 2 + [("ring", 1), ("ring", 2)]
    assert pd.read_csv(tmp_path / "validation.csv")["speed"].tolist() == [3.0, 5.0]


@pytest.mark.long
def test_points_whose_parts_are_timed_anyway_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one tells the speed, which also one that is added later has to be measured with."""
    asked: list[list[str]] = []

    def run_points(requests: list[Request], **options: Any) -> list[Outcome]:
        if requests and requests[0].mode == "measure" and not options["reuse"]:
            asked.append([request.method.name for request in requests])
        return run_all(requests, **options)

    monkeypatch.setattr(validate, "run_points", run_points)
    arguments = [f"out={tmp_path}", *SMALL, "gpus=2", "seqlen=512", "parts=true"]
    arguments.remove("parts=false")
    assert main([*arguments, "method=ring"]) == 0
    before = json.loads((tmp_path / "speeds.json").read_text())
    assert main([*arguments, "method=ring,pass_q"]) == 0
    assert asked == [["ring"], ["ring", "pass_q"]]
    after = json.loads((tmp_path / "speeds.json").read_text())
    assert len(after) == 2 and len({*after.values()}) == 1
    assert before.keys() < after.keys() and {*before.values()}.isdisjoint(after.values())


def test_a_point_that_fails_leaves_the_speed_as_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one whose blocks were to be timed alone."""

    def run_points(requests: list[Request], **options: Any) -> list[Outcome]:
        found = run_all([request for request in requests if not request.parts], **options)
        failed = [Outcome(request.record("failed", "rank 1: gone")) for request in requests if request.parts]
        return [*failed, *found]

    monkeypatch.setattr(validate, "run_points", run_points)
    assert main([f"out={tmp_path}", *SMALL, "gpus=2", "seqlen=512", "method=ring"]) == 0
    assert "as calibrated: rank 1: gone" in capsys.readouterr().err
    point = pd.read_csv(tmp_path / "validation.csv").iloc[0]
    assert np.isnan(point["speed"])
    assert json.loads((tmp_path / "speeds.json").read_text()) == {point["measured_run_id"]: None}
    assert point["step_error"] == pytest.approx(point["step_error_as_calibrated"], rel=1e-3)


def test_a_point_that_can_not_be_simulated_is_a_row(tmp_path: Path) -> None:
    """Here for want of memory."""
    (tmp_path / "cluster").mkdir()
    tiny = "defaults: [local, _self_]\nname: tiny\ndevice:\n  memory_bytes: 1.0e+4\n"
    (tmp_path / "cluster" / "tiny.yaml").write_text(tiny)
    arguments = [f"out={tmp_path}", "--config-dir", str(tmp_path), "cluster=tiny", *SMALL[1:], "gpus=2", "seqlen=512"]
    assert main([*arguments, "method=ring"]) == 0
    assert "oom: " in (tmp_path / "validation.md").read_text()


@pytest.mark.long
def test_what_can_not_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"out={tmp_path}", *SMALL, "gpus=2", "seqlen=512", "method=ring,startrail", "method.team=3"]) == 2
    assert "method.team" in capsys.readouterr().err
    assert main([f"out={tmp_path}", "gpus=8", "cluster=h100_ndr400", "method=ring"]) == 2
    assert "mode=measure on cluster=h100_ndr400" in capsys.readouterr().err
    assert main([f"out={tmp_path}", *SMALL, "gpus=3,2", "seqlen=768", "method=ulysses"]) == 0
    assert "left out: gpus=3: ulysses" in capsys.readouterr().err
    assert main(["out=/proc/nowhere", *SMALL, "gpus=2", "method=ring"]) == 2
    assert "out=/proc/nowhere: can't be made" in capsys.readouterr().err


def point(method: str, measured: float, simulated: float, spread: float = 0.0, **setting: Any) -> dict[str, Any]:
    shape = {
        "cluster": "shaped",
        "link_mbit_per_s": 100.0,
        "uplink_mbit_per_s": None,
        "gpus": 4,
        "seqlen": 4096,
        "causal": False,
        "heads": 8,
    }
    times = {"step_measured_ms": measured, "step_simulated_ms": simulated, "step_error": simulated / measured - 1}
    interval = {"low_ms": measured - spread, "high_ms": measured + spread}
    return {"method": method, "variant": None, **shape, **setting, **times, **interval}


def test_pairs_count_where_intervals_do_not_overlap() -> None:
    ring, mesh = point("ring", 30, 33), point("mesh", 20, 19)
    assert pairs_in_order(pd.DataFrame([ring, mesh])) == (1, 1, [])
    close = point("pass_q", 29, 40, spread=2)
    assert pairs_in_order(pd.DataFrame([ring, close])) == (0, 0, [])
    wrong = point("usp", 25, 18)
    assert pairs_in_order(pd.DataFrame([ring, mesh, wrong])) == (
        2,
        3,
        ["mesh and usp (4 ranks, 4k, full, 100 Mbit/s, 8 heads)"],
    )
    elsewhere = point("usp", 25, 18, gpus=8)
    assert pairs_in_order(pd.DataFrame([ring, mesh, elsewhere])) == (1, 1, [])
    short = {"link_mbit_per_s": None, "seqlen": 512}
    no_link = [point("ring", 30, 33, **short), point("mesh", 20, 40, **short)]
    assert pairs_in_order(pd.DataFrame(no_link)) == (0, 1, ["ring and mesh (4 ranks, 512 tokens, full, 8 heads)"])


def test_cores_are_simulated_as_fast_as_they_are() -> None:
    with Composer() as composer:
        config = composer.compose(["cluster=shaped", "heads=8", "head_dim=64", "dtype=float32"])["cluster"]
    plain, twice = Cluster.build(config), Cluster.build(speed.at_speed(config, 2.0))
    p = problem(4, dtype="float32")
    for phase in ("forward", "backward"):
        assert twice.device.block_s(p, phase) == pytest.approx(plain.device.block_s(p, phase) / 2, rel=1e-3)
    assert twice.device.fold_s(p, O) == pytest.approx(plain.device.fold_s(p, O) / 2)
    hosts, faster = (of_kind(Hosts, cluster.hosts) for cluster in (plain, twice))
    assert faster.core_s_per_byte == pytest.approx(hosts.core_s_per_byte / 2)
    assert twice.topology == plain.topology


def test_a_point_is_simulated_as_it_was_measured() -> None:
    """In the variant that its cluster's own figures choose, though slower cores may have a better one."""
    keys = ["cluster=shaped", "gpus=8", "seqlen=4k", "heads=8", "head_dim=64", "dtype=float32", "causal=false"]
    even = ["cluster.hosts.turn_s=0", "cluster.hosts.ahead_bytes=0"]
    with Composer() as composer:
        config = composer.compose([*keys, "mode=simulate", "method=startrail", *even])
        in_turns = composer.compose([*keys, "mode=simulate", "method=startrail", "seed=1"])
    request = resolve(config)
    as_it_is = {phase: 1e3 * run.makespan_s for phase, run in choose(request).runs.items()}
    assert validate.at_speed_ms(request, 1.0) == pytest.approx(as_it_is, rel=1e-3)
    best_ms, found_ms = [], []
    for times in (0.1, 0.5, 2.0, 10.0):
        best = choose(resolve({**config, "cluster": speed.at_speed(config["cluster"], times)}))
        best_ms.append(1e3 * best.total_s)
        found_ms.append(sum(validate.at_speed_ms(request, times).values()))
    assert all(found >= best * (1 - 1e-3) for found, best in zip(found_ms, best_ms, strict=True))
    assert max(found / best for found, best in zip(found_ms, best_ms, strict=True)) > 1.01
    assert found_ms == sorted(found_ms, reverse=True)
    drawn = resolve(in_turns)
    as_drawn = {phase: 1e3 * run.makespan_s for phase, run in choose(drawn).runs.items()}
    assert validate.at_speed_ms(drawn, 1.0) == pytest.approx(as_drawn, rel=1e-4)
    assert as_drawn != pytest.approx(validate.at_speed_ms(resolve({**in_turns, "seed": 2}), 1.0), rel=1e-4)


def test_the_speed_is_what_blocks_should_take_over_what_they_took() -> None:
    """All ranks' blocks and folds on the cores that these share."""
    keys = ["cluster=local", "cluster.cores=2", "gpus=4", "seqlen=2k", "heads=8", "head_dim=64", "causal=false"]
    with Composer() as composer:
        config = composer.compose([*keys, "mode=measure", "method=ring", "dtype=float32", "parts=true"])
    request = resolve(config)
    block = replace(problem(1, tokens=512, dtype="float32"), heads=8, kv_heads=8)
    blocks_s = 4 * 4 / 2 * sum(float(request.cluster.device.block_s(block, phase).max()) for phase in PHASES)
    took = replace(request.record("ok"), compute_only_ms_median=1e3 * blocks_s)
    found = speed.speed_of(request, took)
    assert found and 1.0 < found < 1.1  # there are folds too
    longer = replace(took, compute_only_ms_median=2e3 * blocks_s)
    assert speed.speed_of(request, longer) == pytest.approx(found / 2)
