"""Comparisons of two sets of records: the pairs of points, their ratios and their verdicts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import records
from sp_bench.analysis import compare, frames
from sp_bench.analysis.pairs import in_turn, paired
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.verdict import AMBIGUOUS, FASTER, SAME, SLOWER, Ratio, exact, of_medians
from sp_bench.records import Record
from tests.support.made_records import PLAIN, made, simulated, spread, written

ratios = st.floats(0.1, 10)


@given(ratios, ratios, ratios, st.floats(0, 0.9))
def test_there_is_one_verdict_and_its_mirror_image(low: float, value: float, high: float, same: float) -> None:
    low, value, high = sorted((low, value, high))
    mirrored = {SAME: SAME, AMBIGUOUS: AMBIGUOUS, FASTER: SLOWER, SLOWER: FASTER}
    found = Ratio(value, low, high).verdict(same)
    inverse = Ratio(1 / value, 1 / high, 1 / low)
    # 1 / x rounds: at the edge itself either word is right.
    edges = [abs(x - edge) < 1e-9 for x in (low, value, high) for edge in (1, 1 + same, 1 / (1 + same))]
    assert any(edges) or inverse.verdict(same) == mirrored[found]
    if value == low == high:
        assert found != AMBIGUOUS


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (0.99, 1.0, 1.01, SAME),
        (0.985, 0.988, 0.99, SAME),
        (0.9, 0.95, 0.97, FASTER),
        (0.97, 0.975, 0.99, FASTER),
        (0.97, 0.985, 0.99, AMBIGUOUS),
        (0.9, 0.95, 1.001, AMBIGUOUS),
        (0.97, 1.0, 1.03, AMBIGUOUS),
        (1.03, 1.05, 1.2, SLOWER),
        (0.5, 1.5, 3.0, AMBIGUOUS),
    ],
)
def test_verdicts(low: float, value: float, high: float, verdict: str) -> None:
    assert Ratio(value, low, high).verdict(0.02) == verdict


def test_numbers_without_noise_are_told_apart_however_close() -> None:
    assert exact(100.0, 100.0).verdict(1e-9) == SAME
    assert exact(100.0, 100.001).verdict(1e-9) == SLOWER
    assert exact(0, 0).verdict(1e-9) == SAME
    assert exact(0, 5).verdict(1e-9) == SLOWER
    assert exact(5, 0).verdict(1e-9) == FASTER


def test_drift_cancels_for_points_timed_in_turn() -> None:
    drift = np.geomspace(1, 2, 20)
    a, b = 10 * drift, 9 * drift
    together, apart = of_medians(a, b, in_turn=True), of_medians(a, b, in_turn=False)
    assert together.value == apart.value == pytest.approx(0.9)
    assert (together.low, together.high) == pytest.approx((0.9, 0.9))
    assert (together.verdict(0.02), apart.verdict(0.02)) == (FASTER, AMBIGUOUS)
    assert of_medians(a, b[:15], in_turn=True).verdict(0.02) == AMBIGUOUS


def test_too_few_iterations_have_no_interval() -> None:
    found = of_medians(np.full(4, 1.0), np.full(4, 2.0), in_turn=False)
    assert (found.value, found.low, found.verdict(0.02)) == (2.0, None, AMBIGUOUS)
    assert "4 iterations" in found.why


def test_an_iteration_is_its_slowest_rank(tmp_path: Path) -> None:
    path = written(tmp_path, "aa", spread(100))
    record = records.read(path)
    samples = frames.samples(record, path)
    assert len(samples) == 2 * 2 * 8
    assert set(samples["mode"]) == {"measured"}
    steps = frames.iterations(samples)["step"]
    assert 1e3 * np.median(steps) == pytest.approx(record.step_ms_median)
    assert frames.samples(made("none"), tmp_path / "none.json").empty


def test_frames_are_in_seconds_with_methods_in_order(tmp_path: Path) -> None:
    written(tmp_path, "aa", spread(100), method="mesh")
    simulated(tmp_path, "bb", 50, method="ring")
    simulated(tmp_path, "cc", 25, method="theirs", impl="theirs")
    found = frames.points(tmp_path)
    assert found["step_s_median"].tolist() == pytest.approx([0.1, 0.05, 0.025])
    assert not [name for name in found if "_ms" in name]
    assert found["mode"].tolist() == ["measured", "simulated", "simulated"]
    assert found.sort_values("method")["method"].tolist() == ["ring", "mesh", "theirs"]


def test_folders_are_compared_point_by_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    configs = [{**PLAIN["config"], "key": i} for i in range(5)]
    for folder, factor in ((a, (1, 1, 1)), (b, (1.001, 0.8, 1.3))):
        for i, by in enumerate(factor):
            written(folder, f"{folder.name}{i}", spread(100 * by, by=0.002), config=configs[i])
    written(a, "only", spread(100), config=configs[3], method="usp")
    out = tmp_path / "out.csv"
    assert compare.main([str(a), str(b), f"csv={out}"]) == 0
    said = capsys.readouterr().out
    assert "only in A: usp" in said
    assert "measured in separate runs: 3" in said
    steps = pd.read_csv(out).query("quantity == 'step'").set_index("run_id_a")
    assert steps["verdict"].to_dict() == {"a0": SAME, "a1": FASTER, "a2": SLOWER}
    assert steps["ratio"].to_dict() == pytest.approx({"a0": 1.001, "a1": 0.8, "a2": 1.3})
    assert steps["a"].tolist() == pytest.approx([0.1] * 3)
    low, ratio, high = (steps[column].to_numpy() for column in ("ratio_low", "ratio", "ratio_high"))
    assert (low < ratio).all() and (ratio < high).all()
    assert compare.main([str(a), str(b), "fail_slower=true"]) == 1
    assert compare.main([str(b), str(a), "fail_slower=true", "same=0.5"]) == 0


def test_what_does_not_change_the_result_does_not_part_points(tmp_path: Path) -> None:
    config = {**PLAIN["config"], "results_dir": "a", "iters": 5, "kv_heads": None, "mode": "auto"}
    written(tmp_path / "a", "aa", spread(100), config=config)
    other = {**config, "results_dir": "b", "iters": 9, "kv_heads": 32, "mode": "measure", "logger": {"name": "none"}}
    written(tmp_path / "b", "bb", spread(100), config=other)
    assert len(paired(str(tmp_path / "a"), str(tmp_path / "b")).pairs) == 1


def test_of_older_records_the_newest_is_compared(tmp_path: Path) -> None:
    for at, run_id in enumerate(("old", "new")):
        path = written(tmp_path / "a", run_id, spread(100), provenance={"code_version": run_id})
        os.utime(path, (at, at))
    written(tmp_path / "b", "bb", spread(100))
    found = paired(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [a.record.run_id for a, _ in found.pairs] == ["new"]
    assert "1 older records" in found.notes[0]


def test_two_records_may_be_of_other_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = simulated(tmp_path, "ring", 100.0, method="ring", config={"method": {"name": "ring"}}, comm_bytes_per_gpu=4)
    mesh = simulated(tmp_path, "mesh", 50.0, config={"method": {"name": "mesh"}}, comm_bytes_per_gpu=2)
    out = tmp_path / "out.csv"
    assert compare.main([str(ring), str(mesh), f"csv={out}"]) == 0
    said = capsys.readouterr().out
    assert "differs: method.name: ring, mesh" in said
    found = pd.read_csv(out).set_index("quantity")
    verdicts = found["verdict"].to_dict()
    assert (verdicts["step"], verdicts["sent"], verdicts["backward"]) == ("FASTER", "LESS", "-")
    assert (found["unit"]["step"], found["unit"]["sent"]) == ("s", "bytes")


def test_points_of_one_run_are_in_turn() -> None:
    def at(host: str, measured_at: str | None) -> Record:
        return made(provenance={"host": host, "measured_at": measured_at})

    assert in_turn(at("a", "noon"), at("a", "noon"))
    assert not in_turn(at("a", "noon"), at("a", "one"))
    assert not in_turn(at("a", "noon"), at("b", "noon"))
    assert not in_turn(at("a", None), at("a", None))


@pytest.mark.long
def test_measured_points_of_one_problem_are_timed_in_turn(tmp_path: Path) -> None:
    keys = {"cluster": "local", "gpus": 2, "seqlen": "1k", "heads": 2, "head_dim": 16, "dtype": "float32", "iters": 5}
    found = Runs(tmp_path).ask([point(method=name, **keys) for name in ("ring", "ulysses")])
    assert {record.status for record in found} == {"ok"}
    assert in_turn(found[0], found[1])
    paths = [tmp_path / f"{record.run_id}.json" for record in found]
    for record, path in zip(found, paths, strict=True):
        steps = frames.iterations(frames.samples(record, path))
        assert 1e3 * np.median(steps["step"]) == pytest.approx(record.step_ms_median)
        assert 1e3 * np.median(steps["forward"]) == pytest.approx(record.forward_ms_median)
    assert compare.main([str(path) for path in paths]) == 0


def test_other_machines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [written(tmp_path, host, spread(100), provenance={"host": host}) for host in ("one", "other")]
    compare.main([str(path) for path in paths])
    assert "host is one in A and other in B" in capsys.readouterr().out


def test_a_point_that_fails_now_is_worse(tmp_path: Path) -> None:
    written(tmp_path / "a", "aa", spread(100))
    written(tmp_path / "b", "bb", status="oom", error="out of memory", step_ms_median=None)
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.main([*both, "fail_slower=true"]) == 1
    assert compare.main([*both[::-1], "fail_slower=true"]) == 0


def test_without_samples_nothing_is_decided(tmp_path: Path) -> None:
    written(tmp_path / "a", "aa", step_ms_median=100.0)
    written(tmp_path / "b", "bb", spread(200))
    ((a, b),) = paired(str(tmp_path / "a"), str(tmp_path / "b")).pairs
    step = compare.compare(a, b)[0]
    assert step.ratio and step.ratio.value == pytest.approx(2)
    assert step.verdict == AMBIGUOUS


def test_bad_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = str(written(tmp_path / "m", "mm", spread(100), gpus=256, cluster="h100_ndr400"))
    model = str(simulated(tmp_path / "s", "ss", 100.0))
    longer = str(simulated(tmp_path / "l", "ll", 100.0, seqlen=2**21))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text(json.dumps({"schema_version": 1}))
    for arguments, said in (
        ([measured, model], "the first is measured and the second simulated"),
        ([str(tmp_path / "m"), str(tmp_path / "s")], "the first is measured and the second simulated"),
        ([model, longer], "seqlen=1048576 and 2097152: two records must be of the same attention"),
        ([str(tmp_path / "s"), str(tmp_path / "l")], "no point is in both"),
        ([model], "must be two, A and B"),
        ([model, str(tmp_path / "empty")], "has no records"),
        ([model, str(tmp_path / "broken.json")], "neither a folder nor a record"),
        ([model, str(tmp_path / "nothing")], "neither a folder nor a record"),
        ([model, model, "same=2"], "same=2: must be a number from 0 to below 1"),
        ([model, model, "fail_slower=1"], "must be true or false"),
        ([model, model, "sam=0.1"], "did you mean same?"),
    ):
        assert compare.main(arguments) == 2
        assert said in capsys.readouterr().err


def runs_of(folder: Path, steps_ms: Sequence[float], **changes: Any) -> None:
    """A point's runs in folders of their own, as `for i in 1 2 3; do ... results_dir=before/$i` makes them."""
    for i, step_ms in enumerate(steps_ms):
        written(folder / str(i), f"{folder.name}{i}", spread(step_ms, by=0.0001), **changes)


def test_three_runs_have_the_interval_of_their_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Iterations of one run are close together here, and runs aren't: only runs tell how far to trust the ratio."""
    runs_of(tmp_path / "a", (100, 110, 90))
    runs_of(tmp_path / "b", (95, 99, 97))
    ((a, b),) = paired(str(tmp_path / "a"), str(tmp_path / "b")).pairs
    step = compare.compare(a, b)[0]
    assert step.ratio and (step.ratio.low, step.ratio.value, step.ratio.high) == pytest.approx(
        (95 / 110, 0.97, 99 / 90)
    )
    assert step.verdict == AMBIGUOUS
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of 3 runs of A and 3 of B" in said and "separate runs" not in said and "older records" not in said


def test_markdown_for_reviewers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"host": "box", "platform": "Linux", "versions": {"torch": "2.13.0"}, "argv": ["method=ring"]}
    facts = {"err_out": 1e-7, "err_dk": 3e-7, "peak_mem_bytes_max": 2_000_000, "comm_bytes_per_gpu": 3e6}
    runs_of(tmp_path / "a", (100, 101, 99), provenance=known | {"git_commit": "1111aaaa"}, **facts)
    after = known | {"git_commit": "2222bbbb", "git_dirty": True}
    runs_of(tmp_path / "b", (80, 81, 82), provenance=after, **facts | {"peak_mem_bytes_max": 1_000_000})
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| commit | 1111aaaa | 2222bbbb with changes |" in lines
    (row,) = (line for line in lines if "FASTER" in line and line.startswith("|"))
    assert "| 100 ± 1, 3 runs | 81 ± 1, 3 runs | 0.810 [0.792, 0.828] | FASTER |" in row
    assert row.endswith("| 3.0e-07 at most | 2 MB → 1 MB | 3 MB |")
    assert "**steps: 1 FASTER**" in lines and any("torch 2.13.0" in line for line in lines)


def test_two_commits_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for commit, step_ms in (("1111aaaa", 100), ("2222bbbb", 120)):
        written(tmp_path, commit, spread(step_ms), provenance={"host": "box", "git_commit": commit})
    both = [f"{tmp_path}@1111", f"{tmp_path}@2222bbbb"]
    ((a, b),) = paired(*both).pairs
    assert (a.record.run_id, b.record.run_id) == ("1111aaaa", "2222bbbb")
    assert compare.main([*both, "--markdown"]) == 0
    assert "fewest runs of a measured point: 1; 3 say how far apart runs are" in capsys.readouterr().out
    assert compare.main([both[0], f"{tmp_path}@3333"]) == 2
    assert "has no records" in capsys.readouterr().err


def test_a_run_that_failed_is_no_run(tmp_path: Path) -> None:
    runs_of(tmp_path / "a", (100, 110, 90))
    runs_of(tmp_path / "b", (95, 99, 97))
    failed = written(tmp_path / "a" / "3", "failed", status="oom", error="of memory", step_ms_median=None)
    os.utime(failed, (1, 1))
    ((a, b),) = paired(str(tmp_path / "a"), str(tmp_path / "b")).pairs
    assert [len(a.runs), len(b.runs)] == [3, 3]
    assert compare.compare(a, b)[0].verdict == AMBIGUOUS
