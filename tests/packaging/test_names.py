"""Each module has one file and one name: in a checkout, in an editable install and in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.checkout import BESIDE
from tests.packaging.conftest import ROOT, SOURCES, Install
from tests.support.marks import exhaustive

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for top in SOURCES
    for path in sorted((ROOT / top).rglob("*.py"))
]
"""Every module, by the name that it has in a checkout: `slurm.sweep` is that of sp_bench.slurm.sweep."""
CORE = [name for name in MODULES if name.startswith(("conf", "methods", "slurm", "sp_bench.plan", "sp_bench.check"))]
ASKED = """
import importlib.util, sys
asked, outside = {asked!r}, {outside!r}
for name in asked:
    real = name if name.startswith("sp_bench") else "sp_bench." + name
    module = importlib.import_module(real)
    assert (module.__name__, module.__spec__.name) == (real, real)
    if name != real and not outside:
        assert importlib.import_module(name) is module, f"{{name}} is another module than {{real}}"
        assert module.__spec__.name == real
modules = {{id(module): module for name, module in sys.modules.items() if name != "__main__"}}
files = [getattr(module, "__file__", None) or "" for module in modules.values()]
files = [file for file in files if any(folder in file for folder in {folders!r})]
assert len(files) == len(set(files)) >= len(asked), {{file for file in files if files.count(file) > 1}}
if outside:
    lacking = [name for name in {beside!r} if importlib.util.find_spec(name) is None]
    assert lacking == list({beside!r}), "names of the top level"
"""


def asked(modules: list[str], *folders: str, outside: bool) -> str:
    """Code that imports modules, by both names unless `outside` a checkout, and looks for twins in the folders."""
    return ASKED.format(asked=modules, folders=folders, outside=outside, beside=BESIDE)


@pytest.mark.parametrize("modules", [CORE, exhaustive(MODULES)], ids=["core", "all"])
def test_in_a_checkout_both_names_are_one_module(modules: list[str]) -> None:
    # Papers' notebooks run where they are imported.
    modules = [name for name in modules if not name.startswith("analysis.notebooks.")]
    code = asked(modules, *(f"{ROOT / top}{os.sep}" for top in SOURCES), outside=False)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("top", BESIDE)
def test_the_short_name_first(top: str) -> None:
    """Nothing of sp_bench is imported yet, as in python -m slurm.sweep."""
    code = f"import {top} as short, sp_bench.{top} as long; assert short is long"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["slurm.sweep", *map(exhaustive, ("sp_bench.slurm.sweep", "analysis.explore"))])
def test_commands_of_a_checkout(command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", command, "--help"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"python -m {command.removeprefix('sp_bench.')}")


def test_a_package_of_the_users_own_is_not_ours(core: Install, tmp_path: Path) -> None:
    """In whose folder `analysis` is their analysis, though sp_bench is imported."""
    theirs = tmp_path / "analysis"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    (theirs / "compare.py").write_text("WHOSE = 'theirs'\n")
    done = Install(core.python, tmp_path)(
        "-c", "import sp_bench.methods, analysis.compare; print(analysis.compare.WHOSE)"
    )
    assert (done.returncode, done.stdout) == (0, "theirs\n"), done.stderr


def test_an_installed_wheel_has_one_name(core: Install) -> None:
    done = core("-c", asked(CORE_WITHOUT_TORCH, "/site-packages/sp_bench/", outside=True))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_editable_install_has_one_name(editable: Install) -> None:
    done = editable("-c", asked(CORE, "/checkout0/", outside=True))
    assert done.returncode == 0, done.stderr


CORE_WITHOUT_TORCH = [name for name in CORE if not name.startswith("slurm.")]


def test_the_checkout_has_no_links() -> None:
    """Some file systems and archives have none, and a link gives a file a second name."""
    tops = [path for path in ROOT.iterdir() if path.name not in (".git", ".venv", "build", "results")]
    assert {path.name for path in tops} >= set(SOURCES)
    paths = [*tops, *(path for top in tops if top.is_dir() for path in top.rglob("*"))]
    assert [path for path in paths if path.is_symlink()] == []
