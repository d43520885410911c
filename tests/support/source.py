"""The suite's own source, as tests of its structure read it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(path: str) -> set[str]:
    """The modules that a file imports, at the top or inside."""
    tree, found = ast.parse((ROOT / path).read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found
