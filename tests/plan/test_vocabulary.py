"""The exports of sp_bench.plan are the imports of methods, no more and no less."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sp_bench import methods, plan

METHODS = sorted(Path(methods.__file__).parent.glob("*.py"))


def imports(path: Path) -> list[ast.ImportFrom]:
    """The names that a file imports of this suite, by `from ... import ...`."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [node for node in found if (node.module or "").startswith("sp_bench")]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_imports_the_vocabulary_and_other_methods(path: Path) -> None:
    modules = {node.module or "" for node in imports(path)} - {"sp_bench.plan"}
    modules -= {"sp_bench.checkout"} if path.stem == "__init__" else set()
    assert all(module.startswith("sp_bench.methods.") for module in modules)


def test_all_that_is_exported_is_used_by_some_method() -> None:
    vocabulary = [node for path in METHODS for node in imports(path) if node.module == "sp_bench.plan"]
    assert {name.name for node in vocabulary for name in node.names} == set(plan.__all__)
