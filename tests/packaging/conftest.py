"""A wheel of this checkout, and an environment with the core install alone: no torch, wandb, matplotlib or pandas."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sp_bench.checkout import BESIDE

ROOT = Path(__file__).parents[2]
SOURCES = ("sp_bench", *BESIDE)


@dataclass(frozen=True)
class Install:
    """An environment, and a folder outside the checkout in which its commands run."""

    python: Path
    folder: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The output of its Python with these arguments."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )


def pyproject() -> dict:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder that is there already would be packed too."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    return packed("wheel", checkout(sources), built)


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """An environment in which a copy of this checkout is installed as `pip install -e` does, with all packages here."""
    sources, built, home = (tmp_path_factory.mktemp(name) for name in ("checkout", "editable", "developer"))
    site = environment(home, packed("editable", checkout(sources), built))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return Install(home / "bin" / "python", tmp_path_factory.mktemp("elsewhere"))


def checkout(folder: Path) -> Path:
    """The folder, with a copy in it of what a wheel is built from."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def packed(kind: str, sources: Path, built: Path) -> Path:
    """The `wheel`, or the `editable` one that refers to the sources, in the folder `built`."""
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True, timeout=120)
    (path,) = built.glob("*.whl")
    return path


def environment(home: Path, wheel: Path) -> Path:
    """The site-packages of a new environment that has the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
    (site,) = home.glob("lib/python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """The wheel, and of this environment only what the wheel's dependencies need, without any extra."""
    home, folder = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("elsewhere")
    site = environment(home, wheel)
    for name in needed(pyproject()["project"]["dependencies"]):
        for top in tops(name):
            (site / top.name).symlink_to(top)
    return Install(home / "bin" / "python", folder)


def needed(requirements: Iterable[str]) -> set[str]:
    """The distributions that these requirements come to, with all that those require in turn."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name == "sp-bench":
            todo += [
                Requirement(text)
                for extra in one.extras
                for text in pyproject()["project"]["optional-dependencies"][extra]
            ]
            continue
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return found


def tops(distribution: str) -> set[Path]:
    """The files and folders of an installed distribution in site-packages."""
    files = importlib.metadata.files(distribution) or []
    names = {file.parts[0] for file in files} - {"..", "__pycache__"}
    home = Path(str(importlib.metadata.distribution(distribution).locate_file("")))
    return {home / name for name in names}
