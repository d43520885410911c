"""describe: the Mesh paper's own example, and a table of methods that is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from methods import REGISTRY
from sp_bench import draw
from sp_bench.account import volume
from sp_bench.describe import main, methods_table
from sp_bench.plan import COMPUTE_BOUND, PHASES, Problem, layout_named
from tests.problems import all_methods


def test_mesh_on_nine_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Figure 1(c): KV indices rotated so that each GPU has its own Q-KV pair; 72 units in all against Ring's 144."""
    assert main(["method=mesh", "gpus=9", "method.tile=[3,3]"]) == 0
    text = capsys.readouterr().out
    assert "each rank sends 8 units (chunks of Q), all of them 72" in text
    assert "       4         3  4  5  3  4  5  3  4  5" in text
    assert "step   0: Pass[rings] kv#0 -> -1, kv#1 <- +1; Attend q#0 x kv#0 into o#0" in text
    assert main(["method=ring", "gpus=9"]) == 0
    assert "all of them 144" in capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 4, 9, 12])
def test_local_q_kv_property_and_full_coverage(n: int) -> None:
    """Every method computes all blocks, and every rank its own Q-KV pair (section 3.1)."""
    problem = Problem(n=n, seqlen=2 * n, heads=2, kv_heads=1, head_dim=8, layout=layout_named("zigzag", causal=True))
    for method in all_methods(n):
        matrix = draw.assignment(method.forward(problem, COMPUTE_BOUND))
        assert matrix.min() >= 0
        assert matrix.diagonal().tolist() == list(range(n))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_formulas_are_the_counted_payload(n: int, k: int) -> None:
    problem = Problem(
        n=n, seqlen=2 * n, heads=4, kv_heads=4 // k, head_dim=8, layout=layout_named("zigzag", causal=True)
    )
    unit = problem.chunk_bytes("q", wire=True)
    for method in all_methods(n):
        for phase in PHASES:
            counted = volume(method.plan(problem, phase, COMPUTE_BOUND), problem).payload_bytes / unit
            names = {"n": n, "k": 1 / k, **method.symbols(n)}
            assert eval(method.formula[phase], {}, names) == counted


def test_the_table_in_the_docs_is_current() -> None:
    committed = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    assert committed == methods_table() + "\n"
    assert all(f"`{name}`" in committed for name in REGISTRY)


def test_bad_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=mesh", "gpus=400"]) == 2
    assert "gpus=400: its matrix would not fit" in capsys.readouterr().err
    assert main(["method=mush"]) == 2
