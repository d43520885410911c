"""The wheel installs one name, and its core simulates anywhere without torch, wandb, matplotlib or pandas."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sp_bench.extras import EXTRAS
from sp_bench.records import read_all
from tests.packaging.conftest import ROOT, SOURCES, Install, needed, pyproject
from tests.support.marks import exhaustive

HEAVY = {"torch", "wandb", "matplotlib", "seaborn", "pandas", "pyarrow"}


def test_it_has_one_name_and_all_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sp_bench"}
    there = {path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()}
    there = {path.relative_to(ROOT) for path in there if "__pycache__" not in path.parts}
    shipped = {str(path) if path.parts[0] == "sp_bench" else f"sp_bench/{path}" for path in there}
    assert shipped == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_extras_are_those_that_errors_name() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    for name, packages in EXTRAS.items():
        assert set(packages) <= needed(extras[name])


@pytest.mark.long
def test_the_core_simulates_from_a_folder_with_the_same_names(core: Install) -> None:
    for name in ("methods", "conf", "analysis", "slurm"):
        (core.folder / name).mkdir()
        (core.folder / name / "__init__.py").write_text("raise AssertionError('a stranger')")
    imported = [core("-c", f"import {package}").returncode for package in HEAVY]
    assert imported == [1] * len(HEAVY)
    done = core("-m", "sp_bench", "method=mesh", "gpus=256")
    assert done.returncode == 0, done.stderr
    assert "Simulated, not measured" in done.stdout
    assert "wandb" not in done.stderr, "none is asked for"
    found = sorted((one.method, one.gpus, one.status) for one in read_all(core.folder / "results"))
    assert found == [("mesh", 256, "ok"), ("ring", 256, "ok")]


def test_the_core_says_what_wandb_needs(core: Install) -> None:
    done = core("-m", "sp_bench", "method=ring", "gpus=8", "seqlen=8k", "logger=wandb", "results_dir=asked")
    (line,) = done.stderr.splitlines()
    assert 'pip install "sp-bench[wandb]"' in line


def test_the_core_describes(core: Install) -> None:
    done = core("-m", "sp_bench.describe", "method=mesh", "gpus=9", "method.tile=[3,3]")
    assert done.returncode == 0, done.stderr
    assert "assignment matrix" in done.stdout


def test_the_repository_around_it_is_not_its_own(core: Install) -> None:
    repository = ["git", "-C", str(core.python.parents[1])]
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run([*repository, "init", "-q"], check=True)
    subprocess.run([*repository, *who, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    done = core("-c", "from sp_bench.records import provenance as p; print(p()['git_commit'], p()['git_dirty'])")
    assert (done.returncode, done.stdout) == (0, "None None\n")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("-m", "sp_bench", "method=ring", "gpus=2", "cluster=local"), "run"),
        exhaustive(("-m", "sp_bench.calibrate"), "run"),
        (("-m", "sp_bench.validate"), "analysis"),
        exhaustive(("-m", "sp_bench.analysis.reproduce"), "analysis"),
        (("-m", "sp_bench.records", "collect", "."), "analysis"),
        (("-c", "import sp_bench.records as r; r.load('.')"), "analysis"),
        (("-c", "from sp_bench import SequenceParallelAttention"), "run"),
    ],
)
def test_what_an_extra_brings_is_asked_for_by_its_name(core: Install, arguments: tuple[str, ...], extra: str) -> None:
    done = core(*arguments)
    assert done.returncode != 0
    assert f'pip install "sp-bench[{extra}]" would work' in done.stderr.splitlines()[-1]


MEASURING = tuple(
    f"sp_bench.{name}" for name in ("kernels", "run", "measure", "labs", "peers.registry", "point.measured")
)
"""Packages that only ranks, and those who ask them, need."""
POINT = "from sp_bench.__main__ import main; assert main(['method=mesh', 'gpus=16', 'logger=none']) == 0"
DESCRIPTION = "from sp_bench.describe import main; assert main(['method=mesh', 'gpus=9']) == 0"


IN_THIS_PROCESS = POINT.replace("'gpus=16'", "'gpus=16', 'baseline=null'")
SELDOM = {"llvmlite", "numba", "numpy.ma", "numpy.random"}
"""Modules that few points need, and tenths of a second of start-up."""


def errors_of(code: str, folder: Path) -> str:
    """The errors that a Python of all extras prints for some code, which must end well."""
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("code", [POINT, DESCRIPTION])
def test_simulating_imports_nothing_heavy_where_it_is_installed(code: str, tmp_path: Path) -> None:
    code += f"\nimport sys; print(*({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    code += f"\nprint(*(name for name in sys.modules if name.startswith({MEASURING!r})), file=sys.stderr)"
    assert errors_of(code, tmp_path) == "\n\n"


def test_a_small_point_imports_nothing_that_few_points_need(tmp_path: Path) -> None:
    code = IN_THIS_PROCESS + f"\nimport sys; print(*({SELDOM!r} & sys.modules.keys()), file=sys.stderr)"
    assert errors_of(code, tmp_path) == "\n"
