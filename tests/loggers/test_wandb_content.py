"""A real point's W&B run, read back: it says exactly what the record and the files beside it say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sp_bench import records, wandb_upload
from sp_bench.__main__ import main
from tests.support.wandb_runs import read_runs

pytest.importorskip("wandb")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a simulated and a measured point, logged live as one sweep."""
    folder = tmp_path_factory.mktemp("real")
    small = ["heads=2", "head_dim=64", "dtype=float32", "iters=2", "warmup=0", "seed=3", "parts=false", "seqlen=512"]
    both = ["cluster=local", "method=mesh", "gpus=2", "mode=simulate,measure", "logger.timeout_s=60"]
    assert main(["-m", *both, *small, f"results_dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize("mode", ["simulate", "measure"])
def test_a_run_is_exactly_what_the_record_says(real: Path, mode: str):
    (path,) = (real / f"{r.run_id}.json" for r in records.read_all(real) if r.mode == mode)
    record = json.loads(path.read_text())
    (found,) = (run for run in read_runs(real) if run.run.run_id == record["run_id"])
    assert (found.run.job_type, found.exit_code) == ("mesh", 0)
    assert found.run.run_group.startswith("cluster=local method=mesh gpus=2 mode=simulate,measure heads=2")
    assert list(found.run.tags) == [mode, "local", "ok"]
    assert found.run.notes == "\n".join(record["notes"] or [])
    config = {key: value for key, value in found.config.items() if key != "_wandb"}
    provenance = {key: config.pop(key) for key in ("code_version", "git_commit", "git_dirty", "versions")}
    assert provenance.items() <= record["provenance"].items()
    summary = _told(found)
    elsewhere = {"run_id", "notes", "candidates", "config", "provenance", "losses", "chunk_ms"}
    assert config | summary == {key: value for key, value in record.items() if key not in elsewhere}
    assert not config.keys() & summary.keys()
    assert {"comm_bytes_per_gpu", "mfu", "tokens_per_s", "peak_mem_bytes_max", "comm_bytes_by_lane"} <= set(summary)
    assert {"mode", "cluster", "gpus", "seqlen", "dtype", "seed", "stragglers"} <= set(config)
    assert (found.table is None) == (mode == "simulate")


def test_the_table_of_samples_is_what_the_file_beside_the_record_says(real: Path):
    (path,) = real.glob("*.samples.json")
    samples = json.loads(path.read_text())
    (found,) = (run for run in read_runs(real) if run.run.run_id == path.name.partition(".")[0])
    assert found.table["columns"] == list(samples) == ["rank", "iteration", "phase", "part", "seconds"]
    assert [tuple(row) for row in found.table["data"]] == list(zip(*samples.values(), strict=True))
    assert set(samples["phase"]) >= {"forward", "backward"}


def test_the_timeline_of_a_simulated_point_is_an_artifact(real: Path):
    (trace,) = real.glob("*.trace.json")
    run_id = trace.name.partition(".")[0]
    by_id = {found.run.run_id: found for found in read_runs(real)}
    artifact = by_id.pop(run_id).artifacts["timeline"]
    assert artifact.name == f"timeline-{run_id}"
    assert artifact.run_id == run_id
    files = {entry.path: Path(entry.local_path).read_bytes() for entry in artifact.manifest.contents}
    assert files == {name: (real / name).read_bytes() for name in (trace.name, f"{run_id}.ranks.json")}
    (measured,) = by_id.values()
    assert "timeline" not in measured.artifacts


def test_what_is_uploaded_later_is_what_was_logged_live(real: Path, tmp_path: Path):
    for path in real.glob("*.json"):
        if not path.name.endswith(".wandb.json"):
            shutil.copy(path, tmp_path)
    assert wandb_upload.main([str(tmp_path)]) == 0
    live, later = ({found.run.run_id: found for found in read_runs(folder)} for folder in (real, tmp_path))
    assert live.keys() == later.keys()
    for one, other in ((live[run_id], later[run_id]) for run_id in live):
        assert one.config == other.config
        assert _told(one) == _told(other)
        assert one.table == other.table
        assert {name: a.digest for name, a in one.artifacts.items()} == {
            n: a.digest for n, a in other.artifacts.items()
        }
        for field in ("run_group", "job_type", "display_name", "notes", "tags"):
            assert getattr(one.run, field) == getattr(other.run, field)


def _told(run: Any) -> dict[str, Any]:
    """The summary without the run's own duration and its table's place."""
    return {key: value for key, value in run.summary.items() if not key.startswith("_") and key != "samples"}
