"""W&B logging: what lies on disk after it, and that no way of failing reaches the benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from sp_bench import loggers, records
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.loggers import open_logger
from sp_bench.loggers.wandb_client import WandbLogger
from tests.support.made_records import columns, made
from tests.support.wandb_runs import FAKE, read_runs, shadow_wandb

NOT_INSTALLED = 'raise ModuleNotFoundError("No module named wandb", name="wandb")'
HANGING = "import time; time.sleep(60)"
INIT_RAISES = FAKE + "def init(**_): raise RuntimeError('no more\\n quota')"
INIT_HANGS = FAKE + "def init(**_): import time; time.sleep(60)"


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {"name": "wandb", "mode": "offline", "project": "p", "entity": None, "group": None, "dir": str(folder)}
    return values | {"timeout_s": 60} | changes


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts another wandb in the writer's way."""

    return lambda code: shadow_wandb(tmp_path, monkeypatch, code)


def kept(folder: Path, run_id: str = "3fa2c0de", samples: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The file of a record made by hand."""
    return records.write(folder, made(run_id, **changes), samples=samples)


@needs_wandb
def test_names_and_samples(tmp_path: Path):
    logger = open_logger(settings(tmp_path, group="mesh_table3"))
    logger.log(kept(tmp_path, samples=columns({"forward": [[1000, 2500], [3000]]}), mfu=None))
    assert logger.close() is None
    (found,) = read_runs(tmp_path)
    run = found.run
    assert (run.run_id, run.run_group, run.job_type) == ("3fa2c0de", "mesh_table3", "mesh")
    assert (run.display_name, run.project) == ("mesh 16x16 256gpu", "p")
    assert found.summary.items() >= {"status": "ok", "error": None, "step_ms_median": 12.5, "mfu": None}.items()
    assert found.table["data"] == [
        [0, 0, "forward", "step", 1],
        [0, 1, "forward", "step", 2.5],
        [1, 0, "forward", "step", 3.0],
    ]


@needs_wandb
def test_two_records_are_two_runs_and_nothing_private_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SP_BENCH_PRIVATE", "private-value")
    with open_logger(settings(tmp_path)) as logger:
        logger.log(kept(tmp_path))
        logger.log(kept(tmp_path, "other", status="oom", error="no room", step_ms_median=None))
    first, second = read_runs(tmp_path)
    assert [first.run.run_id, second.run.run_id] == ["3fa2c0de", "other"]
    assert list(second.run.tags) == ["simulate", "h100_ndr400", "oom"]
    assert second.summary.items() >= {"error": "no room", "step_ms_median": None}.items()
    assert first.table is None
    assert first.run.run_group == ""
    assert first.run.host == ""
    assert b"private" not in first.raw
    assert not list(tmp_path.rglob("requirements.txt"))


@pytest.mark.long
@needs_wandb
def test_the_same_run_again_is_another_folder(tmp_path: Path):
    path = kept(tmp_path)
    with open_logger(settings(tmp_path)) as logger:
        logger.log(path)
        logger.log(path)
    assert [found.run.run_id for found in read_runs(tmp_path)] == ["3fa2c0de", "3fa2c0de"]


@needs_wandb
@pytest.mark.long
def test_more_samples_than_a_table_usually_takes(tmp_path: Path):
    with open_logger(settings(tmp_path)) as logger:
        logger.log(kept(tmp_path, samples=columns({"forward": [[1.0] * 50] * 240})))
    (found,) = read_runs(tmp_path)
    assert len(found.table["data"]) == 12_000


@needs_wandb
def test_a_record_that_fails_leaves_the_others(tmp_path: Path):
    logger = open_logger(settings(tmp_path))
    logger.log(kept(tmp_path, samples={"forward_ms": 1.0}))
    (half := kept(tmp_path, "half")).write_text('{"run_id"')
    logger.log(half)
    logger.log(tmp_path / "gone.json")
    logger.log(kept(tmp_path, "fine"))
    warning = logger.close()
    assert warning is not None
    assert "run gone: FileNotFoundError" in warning
    assert f"3 of 4 runs are not written, python -m sp_bench.wandb_upload {tmp_path} project=p writes them" in warning
    assert warning == logger.close()
    assert [found.run.run_id for found in read_runs(tmp_path)] == ["fine"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (NOT_INSTALLED, 'it is not installed: pip install "sp-bench[wandb]", or logger=none'),
        ('raise ImportError("libfoo.so is missing")', "ImportError: libfoo.so is missing"),
        (INIT_RAISES, "run 3fa2c0de: RuntimeError: no more quota"),
        ("import os; os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_wandb_that_fails_is_one_line(tmp_path: Path, shadow: Any, code: str, says: str):
    shadow(code)
    logger = open_logger(settings(tmp_path))
    logger.log(kept(tmp_path, samples=columns({"forward": [[1.0]]})))
    warning = logger.close() or ""
    assert warning.startswith("logger=wandb: ")
    assert says in warning
    assert "\n" not in warning


@pytest.mark.parametrize("code", [HANGING, INIT_HANGS])
def test_a_wandb_that_hangs_is_given_up(tmp_path: Path, shadow: Any, code: str):
    shadow(code)
    logger = open_logger(settings(tmp_path, timeout_s=0.5))
    assert isinstance(logger, WandbLogger)
    assert logger._process
    start = time.perf_counter()
    logger.log(kept(tmp_path))
    assert "not done after 0.5 s" in (logger.close() or "")
    assert time.perf_counter() - start < 10
    assert logger._process.returncode == -signal.SIGKILL


def test_nothing_logged_is_nothing_waited_for(tmp_path: Path, shadow: Any):
    shadow(HANGING)
    start = time.perf_counter()
    assert open_logger(settings(tmp_path)).close() is None
    assert time.perf_counter() - start < 10


def test_a_writer_that_reads_nothing_does_not_hold_up_the_benchmark(tmp_path: Path):
    logger = open_logger(settings(tmp_path, timeout_s=0.5))
    assert isinstance(logger, WandbLogger)
    assert logger._process
    os.kill(logger._process.pid, signal.SIGSTOP)
    start = time.perf_counter()
    path = kept(tmp_path)
    for _ in range(5000):  # more than the pipe holds
        logger.log(path)
    assert time.perf_counter() - start < 5
    assert "not done" in (logger.close() or "")
    assert time.perf_counter() - start < 15


def test_a_writer_that_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with open_logger(settings(tmp_path)) as logger:
        assert isinstance(logger, WandbLogger)
        assert logger._process
        logger.log(path := kept(tmp_path))
        logger._process.kill()
        logger._process.wait()
        for _ in range(5000):
            logger.log(path)
    assert "ended by SIGKILL" in caplog.text


@pytest.mark.long
def test_a_long_sweep_costs_the_benchmark_no_memory(tmp_path: Path):
    samples = columns({"forward": [[float(i) for i in range(1000)]] * 4})
    paths = [kept(tmp_path, f"{i:04}", samples) for i in range(500)]
    logger = open_logger(settings(tmp_path, timeout_s=0.5))
    assert isinstance(logger, WandbLogger)
    assert logger._process
    os.kill(logger._process.pid, signal.SIGSTOP)
    tracemalloc.start()
    for path in paths:
        logger.log(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1000 * len(paths) < sum(path.stat().st_size for path in tmp_path.glob("*.samples.json")) / 10
    assert "500 of 500 runs are not written" in (logger.close() or "")


@needs_wandb
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path):
    (tmp_path / "file").touch()
    logger = open_logger(settings(tmp_path / "file"))
    logger.log(kept(tmp_path))
    assert "FileExistsError" in (logger.close() or "")


def test_a_writer_that_cannot_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with open_logger(settings(tmp_path)) as logger:
        logger.log(kept(tmp_path))
        assert "did not start" in (logger.close() or "")


def test_the_writer_does_not_outlive_a_killed_benchmark(tmp_path: Path, shadow: Any):
    shadow(INIT_HANGS)
    code = (
        "import sys, json, time, pathlib; from sp_bench.loggers import open_logger;"
        "logger = open_logger(json.loads(sys.argv[1])); logger.log(pathlib.Path(sys.argv[2]));"
        "print(logger._process.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", code, json.dumps(settings(tmp_path, timeout_s=0.5)), str(kept(tmp_path))]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as benchmark:
        assert benchmark.stdout
        writer = int(benchmark.stdout.readline())
        benchmark.kill()
    end = time.perf_counter() + 20
    while _runs(writer):
        assert time.perf_counter() < end, "the writer is still there"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process is there. Nobody may be left to reap it, so a zombie isn't."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(status) and not status.startswith("Z")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "wandbb"}, "did you mean wandb"),
        ({"name": None}, "known: none, wandb"),
        ({"mode": "dryrun"}, "logger.mode=dryrun"),
        ({"timeout_s": 0}, "logger.timeout_s=0"),
        ({"proyect": "p"}, "logger.proyect: there is no such key; did you mean logger.project"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], says: str):
    with pytest.raises(RequestError, match=says):
        open_logger(settings(tmp_path, **changes))


def test_none_logs_nothing(tmp_path: Path):
    with open_logger({"name": "none"}) as logger:
        logger.log(kept(tmp_path))
    assert logger.close() is None


def test_importing_loggers_is_light():
    code = "import sys, sp_bench.loggers; print({'wandb', 'torch', 'pandas', 'numpy'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def composed_logger(*overrides: str) -> dict[str, Any]:
    with Composer() as composer:
        return composer.compose(overrides)["logger"]


def test_wandb_is_for_those_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its variables where it is installed, or by a key of the logger."""
    monkeypatch.setattr(loggers, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    assert composed_logger() == {"name": "none"}
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    (tmp_path / "wandb").mkdir()
    assert composed_logger() == {"name": "none"}, "a folder of W&B's runs is no wandb"
    (tmp_path / "wandb" / "__init__.py").touch()
    PathFinder.invalidate_caches()
    assert composed_logger().items() >= {"name": "wandb", "project": "theirs", "mode": "offline"}.items()
    assert composed_logger("logger=none") == {"name": "none"}
    assert composed_logger("logger.project=mine").items() >= {"name": "wandb", "project": "mine"}.items()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert composed_logger()["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert composed_logger() == {"name": "none"}
    with open_logger({**composed_logger("logger=wandb"), "dir": str(tmp_path)}) as logger:
        logger.log(tmp_path / "none.json")
        assert not isinstance(logger, WandbLogger)
