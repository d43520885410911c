"""The paper's Mesh-Attention stands alone: its files know none of our variants, and those change nothing by default."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from sp_bench import methods
from sp_bench.methods.mesh import MeshAttention, tiles
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.plan import Method
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.row_sums import send_row_sums
from tests.support.problems import small_problem

FOLDER = Path(methods.__file__).resolve().parent
PAPER = ("mesh", "mesh_schedule")
OURS = ("placement", "lanes", "schedule", "slices", "form", "collectives", "ulysses", "pad_heads", "row_sums")


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_files_import_no_variant(name: str) -> None:
    found = ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
    modules = {node.module for node in found if isinstance(node, ast.ImportFrom)}
    of_methods = {module.rpartition(".")[2] for module in modules if module and module.startswith("sp_bench.methods")}
    assert of_methods <= {*PAPER}


def test_the_tile_is_the_papers_only_option() -> None:
    paper = {field.name for field in fields(MeshAttention)} - {field.name for field in fields(Method)}
    assert paper == {"tile"}
    assert {field.name for field in fields(Mesh)} - {field.name for field in fields(MeshAttention)} == {*OURS}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["striped", "contiguous"])
def test_our_variants_change_nothing_by_default(layout: str, phase: str) -> None:
    problem = small_problem(12, layout)
    for tile in tiles(12):
        paper, ours = (kind(tile=tile) for kind in (MeshAttention, Mesh))
        assert ours.plan(problem, phase, COMPUTE_BOUND).is_program_of(paper.plan(problem, phase, COMPUTE_BOUND))
        assert ours.bytes_sent(problem, phase) == paper.bytes_sent(problem, phase)
        assert ours.variant(12) == paper.variant(12)


@pytest.mark.parametrize("tile", tiles(12), ids=str)
def test_row_sums_are_a_rewriting_of_the_papers_backward(tile: tuple[int, int]) -> None:
    """With known costs a schedule may differ, as row sums weigh less than O."""
    problem = small_problem(12)
    paper = MeshAttention(tile=tile).plan(problem, "backward", COMPUTE_BOUND)
    assert Mesh(tile=tile, row_sums=True).plan(problem, "backward", COMPUTE_BOUND).is_program_of(send_row_sums(paper))
    assert (send_row_sums(paper) is paper) == (tile[0] == 1)
