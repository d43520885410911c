"""No reader knows a method, and public things have words. Which package may import which is for import-linter."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from functools import cached_property
from importlib import import_module
from inspect import isclass
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType

import pytest

import sp_bench
from sp_bench.methods import REGISTRY

ROOT = Path(__file__).parents[1]
READERS = ["sp_bench/draw.py"]
READERS += [
    str(path.relative_to(ROOT))
    for room in ("account", "check", "simulate", "records")
    for path in (ROOT / "sp_bench" / room).glob("*.py")
]


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


ROOMS = ("analysis", "benchmarks", "methods", "slurm", "sp_bench", "tests")
CODE = [path for name in ROOMS for path in sorted((ROOT / name).rglob("*.py"))]
RELATIVE = re.compile(r"(Of|What|Whose|Where|Which|Who)\b")


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_the_thing_itself(path: Path) -> None:
    """Not with a relative clause; those of attributes and constants neither."""
    expressions = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr))
    texts = [one.value.strip() for one in expressions if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    assert not [text for text in texts if RELATIVE.match(text)]


def test_the_page_of_the_design_has_the_floors_that_are_checked() -> None:
    """In their order; a package that is new, gone or moved is so on the page too."""
    text = (ROOT / "docs" / "explanation" / "design.md").read_text().partition("| floor | packages |")[2]
    rows = re.findall(r"^\|[^|]+\|([^|]+)\|$", text.partition("\n\n")[0], re.MULTILINE)
    page = [set(re.findall(r"`(\w+)`", row)) for row in rows if "`" in row]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert page == [set(floor.split(" | ")) for floor in layers]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_workers_take_tests_by_groups(request: pytest.FixtureRequest) -> None:
    """Else two of them would have ranks, SLURM or hosts at one time."""
    assert request.node.nodeid.endswith("@tests/test_house.py")


def test_public_methods_have_words() -> None:
    """Their own or those of what they override. Of the operations of plans, reads, writes and stream are one thing."""
    said = {"reads", "writes", "stream"}
    assert not [
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls in _public_classes()
        for name, member in vars(cls).items()
        if not name.startswith("_") and name not in said and isinstance(member, DESCRIBED) and not _words(cls, name)
    ]


DESCRIBED = (FunctionType, property, cached_property, classmethod, staticmethod)


def _public_classes() -> set[type]:
    modules = (module for module in walk_packages(sp_bench.__path__, "sp_bench.") if "__main__" not in module.name)
    found = (each for module in modules for each in vars(import_module(module.name)).values() if isclass(each))
    return {cls for cls in found if cls.__module__.startswith("sp_bench.") and not cls.__name__.startswith("_")}


def _words(cls: type, name: str) -> str | None:
    return next((words for each in cls.__mro__ if name in vars(each) and (words := vars(each)[name].__doc__)), None)
