"""The floors of the house: who may import whom, and that no reader knows a method."""

from __future__ import annotations

import ast

import pytest

from sp_bench.methods import REGISTRY
from tests.support.source import ROOT, imported

ROOMS = ("simulate", "records")
READERS = ["sp_bench/check.py", "sp_bench/account.py", "sp_bench/draw.py"]
READERS += [str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "sp_bench" / room).glob("*.py")]
PLAN = [str(path.relative_to(ROOT)) for path in (ROOT / "sp_bench" / "plan").glob("*.py")]
SUITE = [str(path.relative_to(ROOT)) for path in (ROOT / "sp_bench").rglob("*.py")]
METHODS = [str(path.relative_to(ROOT)) for path in (ROOT / "methods").glob("*.py")]


def of_the_suite(path: str) -> set[str]:
    return {module for module in imported(path) if module.split(".")[0] in ("sp_bench",)}


@pytest.mark.parametrize("path", PLAN)
def test_plans_are_pure(path: str) -> None:
    assert not {module.split(".")[0] for module in imported(path)} & {"torch", "numpy"}
    assert all(module.startswith("sp_bench.plan") or module == "sp_bench.errors" for module in of_the_suite(path))


@pytest.mark.parametrize("path", METHODS)
def test_methods_import_the_vocabulary_and_nothing_else(path: str) -> None:
    assert "torch" not in {module.split(".")[0] for module in imported(path)}
    assert all(module == "sp_bench.plan" or module.startswith("sp_bench.methods.") for module in of_the_suite(path))


@pytest.mark.parametrize("path", [*SUITE, *METHODS])
def test_nothing_below_knows_analyses_or_job_arrays(path: str) -> None:
    assert not any(module.startswith(("sp_bench.analysis", "sp_bench.slurm")) for module in imported(path))


@pytest.mark.parametrize("path", READERS)
def test_readers_do_not_know_each_other(path: str) -> None:
    own = [f"sp_bench.{room}" for room in ROOMS if f"/{room}/" in path]
    common = ("plan", "cluster", "errors", "extras", "machine", "reading", "resources")
    allowed = (*(f"sp_bench.{name}" for name in common), *own)
    assert all(module.startswith(allowed) for module in of_the_suite(path))
    assert "torch" not in {module.split(".")[0] for module in imported(path)}


@pytest.mark.parametrize("path", [*READERS, *(f"sp_bench/run/{name}.py" for name in ("executor", "partials"))])
def test_readers_name_no_method(path: str) -> None:
    """In code; docstrings may give a paper as a source."""
    words = {node.id for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Name)}
    literals = {
        node.value
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {*REGISTRY} | {cls.__name__ for cls in REGISTRY.values()}
    assert not names & words
    assert not names & literals
