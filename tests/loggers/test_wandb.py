"""W&B logging: what lies on disk after it, and that no way of failing reaches the benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sp_bench.errors import RequestError
from sp_bench.loggers import WandbLogger, open_logger

RECORD = {
    "run_id": "3fa2c0de",
    "status": "ok",
    "error": None,
    "mode": "simulate",
    "method": "mesh",
    "tile_a": 16,
    "tile_b": 16,
    "variant": "16x16",
    "gpus": 256,
    "causal": True,
    "cluster": "h100_ndr400",
    "kernel": None,
    "step_ms_median": 12.5,
    "mfu": None,
    "hosts": {"private-host": 0},
}
NOT_INSTALLED = 'raise ModuleNotFoundError("No module named wandb", name="wandb")'
HANGING = "import time; time.sleep(60)"
FAKE = """
class Table:
    def __init__(self, **_): pass
def Settings(**_): pass
def setup(_): pass
def teardown(): pass
"""
INIT_RAISES = FAKE + "def init(**_): raise RuntimeError('no more\\n quota')"
INIT_HANGS = FAKE + "def init(**_): import time; time.sleep(60)"


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {"name": "wandb", "mode": "offline", "project": "p", "entity": None, "group": None, "dir": str(folder)}
    return values | {"timeout_s": 60} | changes


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts another wandb in the writer's way."""

    def shadow(code: str) -> None:
        (tmp_path / "shadow").mkdir()
        (tmp_path / "shadow" / "wandb.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))

    return shadow


def entries(path: Path) -> Iterator[bytes]:
    """The entries of a .wandb file: a LevelDB log (blocks of 32 KiB; crc, length and part before each piece)."""
    data, at, entry = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield entry
            entry = b""


def read_runs(folder: Path) -> list[SimpleNamespace]:
    """All offline runs in a folder, as W&B would upload them."""
    wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        found = SimpleNamespace(run=None, summary={}, exit_code=None, table=None, raw=path.read_bytes())
        for entry in entries(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            if record.HasField("run"):
                found.run = record.run
                found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("summary"):
                for item in record.summary.update:
                    found.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("exit"):
                found.exit_code = record.exit.exit_code
        for table in path.parent.glob("files/media/table/samples*.json"):
            found.table = json.loads(table.read_text())
        runs.append(found)
    return runs


@needs_wandb
def test_a_run_is_what_the_record_says(tmp_path: Path):
    logger = open_logger(settings(tmp_path, group="mesh_table3"))
    logger.log(RECORD, {"forward_ms": [[1, 2.5], [3.0, None]], "step_ms": [4.0]})
    assert logger.close() is None
    (found,) = read_runs(tmp_path)
    run = found.run
    assert (run.run_id, run.run_group, run.job_type) == ("3fa2c0de", "mesh_table3", "mesh")
    assert (run.display_name, run.project) == ("mesh 16x16 256gpu", "p")
    assert list(run.tags) == ["simulate", "h100_ndr400", "ok"]
    config = {key: value for key, value in found.config.items() if key != "_wandb"}
    assert config == {
        key: RECORD[key] for key in ("method", "tile_a", "tile_b", "variant", "gpus", "causal", "cluster")
    } | {
        "mode": "simulate",
        "kernel": None,
    }
    assert found.summary.items() >= {"status": "ok", "error": None, "step_ms_median": 12.5, "mfu": None}.items()
    assert found.table == {
        "columns": ["rank", "iteration", "phase", "ms"],
        "data": [
            [0, 0, "forward", 1],
            [0, 1, "forward", 2.5],
            [1, 0, "forward", 3.0],
            [1, 1, "forward", None],
            [None, 0, "step", 4.0],
        ],
    }
    assert found.exit_code == 0


@needs_wandb
def test_two_records_are_two_runs_and_nothing_private_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SP_BENCH_PRIVATE", "private-value")
    with open_logger(settings(tmp_path)) as logger:
        logger.log(RECORD)
        logger.log(RECORD | {"run_id": "other", "status": "oom", "error": "no room", "step_ms_median": None})
    first, second = read_runs(tmp_path)
    assert [first.run.run_id, second.run.run_id] == ["3fa2c0de", "other"]
    assert list(second.run.tags) == ["simulate", "h100_ndr400", "oom"]
    assert second.summary.items() >= {"error": "no room", "step_ms_median": None}.items()
    assert first.table is None
    assert first.run.run_group == ""
    assert first.run.host == ""
    assert b"private" not in first.raw
    assert not list(tmp_path.rglob("requirements.txt"))


@needs_wandb
def test_the_same_run_again_is_another_folder(tmp_path: Path):
    with open_logger(settings(tmp_path)) as logger:
        logger.log(RECORD)
        logger.log(RECORD)
    assert [found.run.run_id for found in read_runs(tmp_path)] == ["3fa2c0de", "3fa2c0de"]


@needs_wandb
def test_more_samples_than_a_table_usually_takes(tmp_path: Path):
    with open_logger(settings(tmp_path)) as logger:
        logger.log(RECORD, {"forward_ms": [[1.0] * 50] * 240})
    (found,) = read_runs(tmp_path)
    assert len(found.table["data"]) == 12_000


@needs_wandb
def test_a_record_that_fails_leaves_the_others(tmp_path: Path):
    logger = open_logger(settings(tmp_path))
    logger.log(RECORD, {"forward_ms": 1.0})
    logger.log(RECORD | {"run_id": "bytes"}, {"forward_ms": [b"1"]})
    logger.log(RECORD | {"run_id": "fine"})
    warning = logger.close()
    assert warning is not None
    assert "run 3fa2c0de: TypeError" in warning
    assert warning == logger.close()
    assert [found.run.run_id for found in read_runs(tmp_path)] == ["fine"]


@needs_wandb
def test_what_is_not_json_is_a_warning(tmp_path: Path):
    logger = open_logger(settings(tmp_path))
    logger.log({"run_id": b"1"})
    assert "not logged" in (logger.close() or "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (NOT_INSTALLED, "it is not installed: pip install wandb, or logger=none"),
        ('raise ImportError("libfoo.so is missing")', "ImportError: libfoo.so is missing"),
        (INIT_RAISES, "run 3fa2c0de: RuntimeError: no more quota"),
        ("import os; os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_wandb_that_fails_is_one_line(tmp_path: Path, shadow: Any, code: str, says: str):
    shadow(code)
    logger = open_logger(settings(tmp_path))
    logger.log(RECORD, {"forward_ms": [[1.0]]})
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
    logger.log(RECORD)
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
    for _ in range(20):
        logger.log(RECORD | {"error": "x" * 100_000})
    assert time.perf_counter() - start < 5
    assert "not done" in (logger.close() or "")
    assert time.perf_counter() - start < 15


def test_a_writer_that_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with open_logger(settings(tmp_path)) as logger:
        assert isinstance(logger, WandbLogger)
        assert logger._process
        logger.log(RECORD)
        logger._process.kill()
        logger._process.wait()
        for _ in range(20):
            logger.log(RECORD | {"error": "x" * 100_000})
    assert "ended by SIGKILL" in caplog.text


@needs_wandb
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path):
    (tmp_path / "file").touch()
    logger = open_logger(settings(tmp_path / "file"))
    logger.log(RECORD)
    assert "FileExistsError" in (logger.close() or "")


def test_a_writer_that_cannot_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with open_logger(settings(tmp_path)) as logger:
        logger.log(RECORD)
        assert "did not start" in (logger.close() or "")


def test_the_writer_does_not_outlive_a_killed_benchmark(tmp_path: Path, shadow: Any):
    shadow(INIT_HANGS)
    code = (
        "import sys, json, time; from sp_bench.loggers import open_logger;"
        "logger = open_logger(json.loads(sys.argv[1])); logger.log(json.loads(sys.argv[2]));"
        "print(logger._process.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", code, json.dumps(settings(tmp_path, timeout_s=0.5)), json.dumps(RECORD)]
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
        ({"mode": "disabled"}, "logger.mode=disabled"),
        ({"timeout_s": 0}, "logger.timeout_s=0"),
        ({"proyect": "p"}, "did you mean project"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], says: str):
    with pytest.raises(RequestError, match=says):
        open_logger(settings(tmp_path, **changes))


def test_none_logs_nothing():
    with open_logger({"name": "none"}) as logger:
        logger.log(RECORD)
    assert logger.close() is None


def test_importing_loggers_is_light():
    code = "import sys, sp_bench.loggers; print({'wandb', 'torch', 'pandas', 'numpy'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
