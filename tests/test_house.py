"""No reader knows a method. Which package may import which is for import-linter (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sp_bench.methods import REGISTRY

ROOT = Path(__file__).parents[1]
READERS = ["sp_bench/check.py", "sp_bench/account.py", "sp_bench/draw.py"]
READERS += [
    str(path.relative_to(ROOT)) for room in ("simulate", "records") for path in (ROOT / "sp_bench" / room).glob("*.py")
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
