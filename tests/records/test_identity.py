"""Dependencies of a record's run_id, and what its provenance says of git."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sp_bench.checkout import BESIDE
from sp_bench.records import identity
from sp_bench.records.provenance import git_state
from sp_bench.resources import PACKAGE, ROOT, place

OF_NO_NUMBER = {
    *("advise", "analysis", "calibrating", "cli", "conf", "conform", "diagnosing", "integrations", "loggers"),
    *(
        f"records/{name}.py"
        for name in (
            *("__init__", "__main__", "checking", "files", "gather", "identity", "interval", "provenance"),
            *("quantities", "record", "rows", "schema", "tables", "timeline", "work"),
        )
    ),
    *("slurm", "tracing", "validate"),
    *("__init__.py", "__main__.py", "calibrate.py", "checkout.py", "collection.py", "describe.py", "doctor.py"),
    *("draw.py", "errors.py", "extras.py", "first_hour.py", "markdown.py", "resources.py", "terminal.py"),
    *("traces.py", "wandb_upload.py"),
}
"""Code that reads, writes, shows and refuses, and changes no number of a point."""

Ids = Callable[[], tuple[str, str]]


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ids:
    """The ids of a simulated and a measured point by the package in tmp_path, a copy of this one."""
    (tmp_path / "records").mkdir()
    for name in (*identity.MEASURED_CODE, "cli", "loggers", "records/files.py"):
        copy = shutil.copy if place(name).is_file() else shutil.copytree
        copy(place(name), tmp_path / name)
    monkeypatch.setattr(identity, "place", lambda name: tmp_path / name)
    for name in ("code_version", "source_hash"):
        monkeypatch.setattr(identity, name, getattr(identity, name).__wrapped__)
    return lambda: (identity.run_id({"gpus": 2}, measured=False), identity.run_id({"gpus": 2}, measured=True))


@pytest.mark.parametrize(
    ("path", "simulated", "measured"),
    [
        ("cli/report.py", False, False),
        ("loggers/wandb_fields.py", False, False),
        ("records/files.py", False, False),
        ("records/workloads.py", True, True),
        ("reading.py", True, True),
        ("simulate/flows.py", True, True),
        ("methods/mesh.py", True, True),
        ("account/sent.py", True, True),
        ("kernels/fold.py", False, True),
        ("run/executor.py", False, True),
        ("measure/pool.py", False, True),
    ],
)
def test_code_that_changes_a_number_changes_the_id(
    path: str, simulated: bool, measured: bool, tmp_path: Path, ids: Ids
) -> None:
    before = ids()
    with (tmp_path / path).open("a") as file:
        file.write("# touched\n")
    assert [new != old for new, old in zip(ids(), before, strict=True)] == [simulated, measured]


def test_data_that_changes_a_number_changes_the_id(tmp_path: Path, ids: Ids) -> None:
    """Every file that is no source, in a folder that computes points, and new ones of any kind; no cache does."""
    package, before = tmp_path, ids()
    there = [path for name in identity.MEASURED_CODE for path in (package / name).rglob("*") if path.is_file()]
    data = [path for path in there if path.suffix != ".py" and path.parent.name != identity.CACHE]
    assert package / "point" / "backing.json" in data
    new = [package / "cluster" / name for name in ("rates.csv", "rates.yaml", "rates.json", "rates.npz")]
    for path in (*data, *new):
        content = path.read_bytes() if path.exists() else b""
        path.write_bytes(content + b" ")
        changed = ids()
        assert all(now != old for now, old in zip(changed, before, strict=True)), path
        path.write_bytes(content) if content else path.unlink()
        assert ids() == before
    for path in (package / "cluster" / "__pycache__" / "device.pyc", package / "cluster" / ".device.py.swp"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b" ")
    assert ids() == before


def test_of_every_file_is_known_whether_it_changes_a_number() -> None:
    there = {*BESIDE, *(path.name for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py")}
    there -= {"__pycache__", "records"}
    there |= {f"records/{path.name}" for path in (PACKAGE / "records").glob("*.py")}
    assert there - set(identity.MEASURED_CODE) == OF_NO_NUMBER


def test_versions_and_machines_change_the_ids_of_what_depends_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids() -> list[str]:
        return [
            identity.run_id({}, measured=False),
            identity.run_id({}, measured=True),
            identity.run_id({}, measured=True, gpu_packages=("triton",)),
        ]

    def changed(name: str, new: Callable) -> list[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(identity, name, new)
            identity.machine.cache_clear()
            found = ids()
        identity.machine.cache_clear()
        return [new != old for new, old in zip(found, before, strict=True)]

    monkeypatch.setattr(identity, "gpu_software", lambda packages: {"gpus": ["H200, 570.1"], "nccl": (2, 27)})
    before = ids()
    assert len(set(before)) == 3
    version = identity.version
    assert changed("version", lambda name: "0.0" if name == "torch" else version(name)) == [False, True, True]
    assert changed("version", lambda name: "0.0" if name == "numpy" else version(name)) == [True, True, True]
    assert changed("cores_here", lambda: 1000) == [False, True, True]
    assert changed("gpu_software", lambda packages: {"gpus": ["H200, 580.2"], "nccl": (2, 27)}) == [False, False, True]


def test_variables_of_gpus_are_part_of_the_id() -> None:
    given = {
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG_FILE": "/job/7",
        "CUDA_VISIBLE_DEVICES": "3",
        "HOME": "/",
        "NVTE_FLASH_ATTN": "0",
    }
    assert identity.gpu_environment(given) == {"NCCL_ALGO": "Ring", "NVTE_FLASH_ATTN": "0"}


def test_the_order_of_keys_changes_no_id() -> None:
    assert identity.digest({"a": 1, "b": {2: 3, "x": 4}}) == identity.digest({"b": {"x": 4, "2": 3}, "a": 1})


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of this project with one commit."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sp_bench").mkdir()
    (tmp_path / "sp_bench" / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_a_checkout_has_its_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert git_state(checkout) == {"git_commit": commit, "git_dirty": False}
    (checkout / "docs").mkdir()
    (checkout / "docs" / "page.md").touch()
    assert git_state(checkout) == {"git_commit": commit, "git_dirty": False}, "no part of what ran"
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    (checkout / "new").touch()
    assert git_state(checkout) == {"git_commit": commit, "git_dirty": True}


def test_the_repository_around_an_installed_package_is_not_its_own(checkout: Path) -> None:
    """As a virtual environment in somebody's checkout, even of this project, and a copy without one's own git."""
    nothing = {"git_commit": None, "git_dirty": None}
    site = checkout / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    assert git_state(site) == nothing
    shutil.copy(checkout / "pyproject.toml", site)
    assert git_state(site) == nothing
    (checkout / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert git_state(checkout) == nothing
    (checkout / "pyproject.toml").unlink()
    assert git_state(checkout) == nothing
