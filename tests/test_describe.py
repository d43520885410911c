"""describe: the Mesh paper's own example, and a table of methods that is what the code says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench import draw
from sp_bench.account import volume
from sp_bench.describe import PAPERS_VOLUMES, counted_volumes, describe, main, methods_table
from sp_bench.methods import REGISTRY
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import WHOLE
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block
from sp_bench.plan.tensors import Q
from sp_bench.point.backing import Kind, row_of
from tests.support.problems import all_methods, splittable_problem


def test_mesh_on_nine_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Figure 1(c): KV indices rotated so that each GPU has its own Q-KV pair; 72 units in all against Ring's 144."""
    assert main(["method=mesh", "gpus=9", "method.tile=[3,3]"]) == 0
    text = capsys.readouterr().out
    assert "each rank sends 8 units (chunks of Q), all of them 72" in text
    assert "       4         3  4  5  3  4  5  3  4  5" in text
    assert "step   0: Pass[rings] kv#0 -> +1, kv#1 <- -1; Attend q#0 x kv#0 into o#0" in text
    assert main(["method=ring", "gpus=9"]) == 0
    assert "all of them 144" in capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 4, 9, 12])
def test_local_q_kv_property_and_full_coverage(n: int) -> None:
    """Every method computes all blocks, and every rank its own Q-KV pair (section 3.1) except in StarTrail."""
    problem = splittable_problem(n, "zigzag")
    for method in all_methods(problem):
        assigned = method.assigned(problem)
        matrix = draw.assignment(method.plan(problem, "forward", COMPUTE_BOUND), assigned)
        assert matrix.min() >= 0
        assert (
            matrix.diagonal().tolist() == list(range(0, n, assigned.layout.head_parallel)) or method.name == "startrail"
        )


def test_every_slice_of_the_heads_has_its_tile(capsys: pytest.CaptureFixture[str]) -> None:
    problem = splittable_problem(4, "zigzag")
    for method in all_methods(problem):
        assigned = method.assigned(problem)
        plan = method.plan(problem, "forward", COMPUTE_BOUND)
        tiles = draw.block_steps(plan)
        assert len(tiles) == assigned.head_slices
        assert (tiles >= 0).sum() == sum(len(op.blocks) for op in plan.ops if isinstance(op, Block))
    assert main(["method=mesh", "gpus=4", "method.tile=[2,2]", "method.schedule=searched", "method.slices=2"]) == 0
    assert capsys.readouterr().out.count("heads/1\n      Q# \\ KV#") == len(PHASES)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_formulas_are_the_counted_payload(n: int, k: int) -> None:
    problem = replace(splittable_problem(n, "zigzag"), heads=4 * n, kv_heads=4 * n // k)
    unit = problem.chunk_bytes(Q, wire=True)
    for method in all_methods(problem):
        names = {"n": n, "h": problem.heads, "k": problem.kv_ratio, "max": max, **method.symbols(problem)}
        for phase in PHASES:
            counted = volume(method.plan(problem, phase, COMPUTE_BOUND), method.assigned(problem)).payload_bytes / unit
            assert eval(method.formula[phase], {}, names) == pytest.approx(counted, rel=1e-12)


def test_table_2_of_the_mesh_paper_is_what_is_counted() -> None:
    """StarTrail has two figures: the table's holds, for the rank that sends most; the text's is 3 / n above it."""
    for n in (16, 64, 256):
        found = {paper.method: counted_volumes(paper, n) for paper in PAPERS_VOLUMES}
        for name in ("ring", "ulysses", "mesh"):
            assert found[name].mean == found[name].busiest == pytest.approx(found[name].paper, rel=1e-12)
        for name in ("ulysses", "mesh"):
            assert found[name].mean == pytest.approx(found[name].bound, rel=1e-12)
        assert all(one.any_split <= one.bound <= one.mean * (1 + 1e-12) for one in found.values())
        startrail = found["startrail"]
        assert startrail.busiest == pytest.approx(startrail.paper, rel=1e-12)
        assert startrail.mean == pytest.approx(startrail.paper - 2 / n, rel=1e-12)


def test_the_table_in_the_docs_is_current() -> None:
    committed = (Path(__file__).parents[1] / "docs" / "results" / "methods.md").read_text()
    assert committed == methods_table() + "\n"
    assert all(f"`{name}`" in committed for name in REGISTRY)


def test_bad_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=mesh", "gpus=400"]) == 2
    assert "gpus=400: its matrix would not fit" in capsys.readouterr().err
    assert main(["method=mush"]) == 2


def test_simulated_steps_have_their_intervals() -> None:
    """Ring's transfers were measured over such links, and Mesh's on A800 alone, but for tiles of one row."""
    shape = ["gpus=8", "seqlen=4k", "heads=4", "cluster=h100_ndr400", "implementation=published"]
    found = {}
    for method in ("ring", "mesh"):
        text = describe([f"method={method}", *shape, "method.layout=search"])
        (found[method],) = [line for line in text.splitlines() if line.startswith("simulated step: ")]
        assert "memory against time" in text or method == "ring"
    low, high = (float(end.strip("[],")) for end in found["ring"].split()[4:6])
    row = row_of(Kind("attention", WHOLE, "KV passed on", "NVLink"))
    assert row
    error = row.two_of_three
    assert high / low == pytest.approx((1 + error) / (1 - error), rel=0.02)
    why = "measurements of KV, Q and outputs passed on over NVLink are of a800"
    assert found["mesh"].split("ms ")[1].startswith(f"(not validated ({why}")
    front = text.split("memory against time")[1].splitlines()[2:]
    assert any("not validated" in line for line in front)
    assert all(("not validated" in line) == (line.count("[") == 0) for line in front)


def test_documents() -> None:
    """Documents have 13, 3, 30 and 18 tokens: on 4 ranks, only ranks 2 and 3 see keys of another one: 16 rows and 2."""
    pack = ["mask=document", "data=lengths", "data.lengths=[13,3,30,18]", "seqlen=64"]
    text = describe(["method=ring", "gpus=4", "method.layout=contiguous", "heads=1", *pack])
    matrix = text.split("Q \\ KV")[1].splitlines()[1:5]
    assert [line.split()[1:] for line in matrix] == [list("0..."), list(".1.."), list(".22."), list("..33")]
    rows = text.split("of the mean\n")[1].splitlines()[:4]
    pairs = (13 * 14 // 2 + 6, 16 * 17 // 2, 14 * 16 + 14 * 15 // 2 + 3, 16 * 17 // 2 + 16 * 2)
    assert [row.split()[:4] for row in rows] == [
        [str(rank), "16", str(documents), str(of_rank)]
        for rank, (documents, of_rank) in enumerate(zip((2, 1, 2, 1), pairs, strict=True))
    ]
    assert "forward: each rank sends 0.5625 units (chunks of Q), all of them 2.25" in text
