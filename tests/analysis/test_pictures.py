"""Pictures of records agree with the plan, the trace or the samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from sp_bench import account, methods, records
from sp_bench.analysis import assignments, pictures
from sp_bench.analysis.assignments import assignment, matrix
from sp_bench.analysis.figure import Figure
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.timelines import timeline
from sp_bench.errors import RequestError
from sp_bench.plan import Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL
from sp_bench.records import Record
from tests.support.made_records import made, spread, written
from tests.support.typed import of_kind


def planned(name: str, n: int = 4, *, layout: str = "auto", **options: object) -> tuple[Plan, Problem]:
    method = methods.build(name, {"layout": layout, **options})
    problem = Problem(n=n, seqlen=64 * n, heads=4, kv_heads=4, head_dim=8, layout=CAUSAL.layout(method.layout))
    (method,) = method.candidates(problem)
    return method.plan(problem, "forward", COMPUTE_BOUND), method.assigned(problem)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    """A simulated point with a timeline of two ranks."""
    folder = tmp_path_factory.mktemp("records")
    found = Runs(folder).one(method="mesh", gpus=4, tile=[2, 2], seqlen="16k", heads=8, trace=2)
    return found, folder / f"{found.run_id}.json"


def labels(figure: Figure) -> list[str]:
    legends = [legend for ax in figure.canvas.axes if (legend := ax.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def bars(figure: Figure) -> list[tuple[float, float]]:
    """The (start, length) of all bars of a timeline."""
    ax = figure.canvas.axes[0]
    boxes = [path.get_extents() for c in ax.collections if isinstance(c, PolyCollection) for path in c.get_paths()]
    return [(box.x0, box.width) for box in boxes]


def test_by_rank_and_step_of_a_tile() -> None:
    plan, problem = planned("mesh", tile=(2, 2))
    by_rank, by_step = (matrix(plan, problem, by).values for by in ("rank", "step"))
    for rank in range(4):
        rows, columns = np.nonzero(by_rank == rank)
        assert len(set(rows)) == len(set(columns)) == 2
        assert by_step[rank, rank] == 0
    assert by_step.min() == 0 and by_step.max() <= max(plan.steps)


@pytest.mark.parametrize(("name", "layout"), [("ring", "contiguous"), ("ring", "striped"), ("zigzag", "zigzag")])
def test_costs_are_the_pairs_under_the_mask(name: str, layout: str) -> None:
    plan, problem = planned(name, layout=layout)
    costs, owners = (matrix(plan, problem, by).values for by in ("cost", "rank"))
    by_rank = [np.nansum(costs[owners == rank]) * problem.block_heads for rank in range(problem.n)]
    assert by_rank == account.pairs(plan, problem).tolist()
    assert np.nansum(costs) == problem.seqlen * (problem.seqlen + 1) / 2


def test_costs_on_a_cluster_are_simulated(record: tuple[Record, Path]) -> None:
    figure = assignments.of_record(record[0])
    below = [ax.get_xlabel() for ax in figure.canvas.axes[3:]]
    assert below == ["rank (computed)", "step (computed)", "ms for a block (simulated)"]
    assert [ax.get_xlabel() for ax in figure.canvas.axes[:3]] == ["KV chunk (4,096 tokens each)"] * 3
    assert [source.id for source in figure.sources] == [record[0].run_id]


def test_split_heads_and_other_wishes() -> None:
    plan, problem = planned("ulysses")
    figure = assignment(plan, problem, "rank", name="a", title="A")
    assert "Of 4 ranks" in figure.note
    with pytest.raises(RequestError, match="by=colour"):
        assignment(plan, problem, "colour", name="a", title="A")


def test_a_variant_that_the_code_has_not(record: tuple[Record, Path]) -> None:
    with pytest.raises(RequestError, match="mesh 3x3: this code has no such variant; known: 2x2"):
        assignments.of_record(replace(record[0], variant="3x3"))


def test_a_variant_is_found_with_fused_blocks(record: tuple[Record, Path]) -> None:
    plan, problem, _ = assignments.planned(replace(record[0], variant="2x2 fused"), "forward")
    assert plan.n == problem.n == record[0].gpus


def test_a_simulated_timeline_is_that_of_the_trace(record: tuple[Record, Path]) -> None:
    figure = timeline(*record)
    assert labels(figure) == ["blocks and folds (simulated)", "transfers (simulated)"]
    ax = figure.canvas.axes[0]
    assert ax.get_xlabel() == "ms since the step's start"
    rows = [text.get_text() for text in ax.get_yticklabels()]
    assert {row.rpartition(" ")[0] for row in rows} == {"rank 0", "rank 1"}
    assert record[0].step_ms_median == pytest.approx(max(start + length for start, length in bars(figure)), rel=1e-6)
    assert len(bars(timeline(*record, ranks=[1]))) < len(bars(figure))
    with pytest.raises(RequestError, match="ranks=7: the timeline beside the record has 0 to 1"):
        timeline(*record, ranks=[7])


def test_a_measured_timeline_has_each_ranks_own_times(tmp_path: Path) -> None:
    path = written(tmp_path, "aa", spread(100), method="ring")
    figure = timeline(records.read(path), path)
    assert labels(figure) == ["forward (measured)", "backward (measured)"]
    lengths = sorted(length for _, length in bars(figure))
    steps = spread(100)
    expected = sorted(part * rank * step for step in steps for part in (0.25, 0.75) for rank in (0.9, 1.0))
    assert lengths == pytest.approx(expected)
    assert max(start + length for start, length in bars(figure)) == pytest.approx(sum(steps))


def test_no_timeline_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no timeline beside it"):
        timeline(made(), records.write(tmp_path, made()))


def test_bound_bars_add_up_to_the_step() -> None:
    found = [
        made("aa", bound_ms=5.0, bound_by="nic", step_ms_median=20.0, method="ring"),
        made("bb", bound_ms=9.0, bound_by="compute", step_ms_median=10.0),
    ]
    figure = pictures.bound_bars(found)
    ax = figure.canvas.axes[0]
    widths = [of_kind(Rectangle, bar).get_width() for bar in ax.patches]
    assert widths == pytest.approx([5, 9, 15, 1])
    assert [text.get_text().strip() for text in ax.texts] == ["bound 25% of it, by nic", "bound 90% of it, by compute"]
    assert labels(figure) == ["bound (simulated)", "rest of the step (simulated)"]
    assert ax.get_xlabel() == "step (ms)"


@pytest.mark.long
def test_the_command_draws_all_of_a_record(
    record: tuple[Record, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pictures.main([str(record[1]), f"out={tmp_path}", "ranks=0"]) == 0
    names = {path.stem for path in tmp_path.glob("*.pdf")}
    run_id = record[0].run_id
    assert names == {"bounds", f"{run_id}-timeline", *(f"{run_id}-assignment-{p}" for p in ("forward", "backward"))}
    failed = records.write(tmp_path, made("failed", status="failed", step_ms_median=None))
    for arguments, said in (
        ([], "there is nothing to draw"),
        ([str(tmp_path / "none.json")], "is not a record"),
        ([str(record[1]), "ranks=first"], "ranks=first: must be numbers"),
        ([str(record[1]), "outs=x"], "did you mean out?"),
        ([str(failed)], "have nothing to draw"),
    ):
        assert pictures.main(arguments) == 2
        assert said in capsys.readouterr().err
