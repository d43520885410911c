"""Tables of points: all figures, on terminals of any width and in files."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sp_bench.__main__ import main
from sp_bench.advise.candidates import Question, answer
from sp_bench.cli import session
from sp_bench.cli.columns import ONE, SEVERAL, make_console
from sp_bench.cli.compose import Composer
from sp_bench.cli.report import print_points, print_sweep
from sp_bench.cli.rows import ROWS
from sp_bench.cli.words import speed_up
from sp_bench.point import Outcome
from tests.support.made_records import made
from tests.support.points import point

FIGURES = ["33.125 ms [32.62, 33.38]", "1.00x", "11.25", "33.5", "54,321", "7.658 kB", "23%", "7.75", "7.654 MB"]
"""The figures of `outcome("mesh", 33.125)`, in their order, but for the status."""
POINT = ["4x2", "8", "64k", "32x128 causal bf16", "striped", "measure"]
"""The rest of the point, beside its method."""


def outcome(method: str, step_ms: float, *, reused: bool = False, **changes: Any) -> Outcome:
    fields = {"method": method, "layout": "striped", "variant": "4x2", "gpus": 8, "seqlen": 2**16, "mode": "measure"}
    figures = {
        "step_ms_median": step_ms, "step_ms_ci95_low": step_ms - 0.5, "step_ms_ci95_high": step_ms + 0.25,
        "forward_ms_median": 11.25, "backward_ms_median": 33.5, "tokens_per_s": 54321.0, "exposed_comm_ms": 7.75,
        "peak_mem_bytes_max": 7_654_000, "iters": 10,
    }  # fmt: skip
    return Outcome(made(method, **{**fields, **figures, **changes}), reused=reused)


MESH, RING = outcome("mesh", 33.125), outcome("ring", 44.5)
OTHER = outcome("ring", 44.5, variant="1x16", gpus=16, seqlen=2**17, layout="zigzag", dtype="float32", mode="simulate")


def printed(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], width: int = 10_000, *, every: bool = True
) -> list[str]:
    """The lines of a sweep on a terminal of a width, by default wider than any."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    console = make_console()
    assert console.width == SEVERAL
    console.width = width
    print_sweep(console, outcomes, every=every)
    assert isinstance(sys.stdout, io.StringIO)
    return [line.rstrip() for line in sys.stdout.getvalue().splitlines()]


def test_a_step_that_the_host_bounds_says_so_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """If queueing takes more than 80% of it."""
    lines = printed(monkeypatch, [outcome("ring", 44.5, host_share=0.81), outcome("mesh", 33.125, host_share=0.8)])
    assert [("ring" in line, "mesh" in line) for line in lines if "host-bound" in line] == [(True, False)]


def test_notes_of_a_sweep_name_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that all points have names none, and those of some name them as the table counts them."""
    noted = [outcome("ring", 44.5, notes=["of all", "of two"]), outcome("mesh", 33.125, notes=["of all"])]
    lines = printed(monkeypatch, [*noted, outcome("usp", 40.0, notes=["of all", "of two", "of one"])])
    notes = [line for line in lines if line.startswith("note")]
    assert notes == ["note: of all", "note of rows 1, 3: of two", "note of row 3: of one"]


def cells_of(lines: list[str], method: str) -> list[list[str]]:
    """The other cells of a method's rows, by table."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return [[cell for cell in row if cell != method] for row in rows if method in row]


@pytest.mark.parametrize(("less", "tables"), [(0, 1), (1, 2), (40, 2), (60, 3)])
def test_a_sweep_is_cut_into_tables_that_fit(monkeypatch: pytest.MonkeyPatch, less: int, tables: int) -> None:
    """Each names the methods, and each figure is in one of them, whole and on the line of its point."""
    file = printed(monkeypatch, [RING, MESH])
    assert cells_of(file, "mesh") == [[*FIGURES, "ok"]]
    width = max(map(len, file[1:])) - less
    lines = printed(monkeypatch, [RING, MESH], width)
    assert max(map(len, lines)) <= width
    rows = cells_of(lines, "mesh")
    assert len(rows) == tables
    numbers = ["2"] if less else []
    assert all(row[: len(numbers)] == numbers for row in rows)
    assert sum((row[len(numbers) :] for row in rows), []) == [*FIGURES, "ok"]


@pytest.mark.parametrize("width", [1, 24, 80])
def test_no_terminal_is_too_narrow(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Cells are whole there too: what has no room is a line that the terminal goes on with."""
    rows = cells_of(printed(monkeypatch, [OTHER, MESH], width), "mesh")
    assert all(row[0] == "2" for row in rows)
    assert sum((row[1:] for row in rows), []) == [*POINT, *FIGURES, "ok"]


def test_points_that_share_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, [OTHER, MESH])
    assert lines[0] == "2 points, all: workload attention, cluster h100_ndr400"
    assert cells_of(lines, "mesh") == [[*POINT, *FIGURES, "ok"]]


def test_what_all_points_share_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, [RING, outcome("ring", 33.125, gpus=16, layout=None, reused=True)])
    here = "workload attention, cluster h100_ndr400, mode measure"
    assert lines[0] == f"2 points, all: variant 4x2, seqlen 64k, shape 32x128 causal bf16, {here}"
    assert "┃ method ┃ gpus ┃ layout  ┃" in lines[2]
    assert [row[-1] for row in cells_of(lines, "ring")] == ["ok", "ok (reused)"]
    alone = printed(monkeypatch, [outcome("ring", 44.5, layout=None, variant=None)])
    assert alone[0] == f"1 point: gpus 8, seqlen 64k, shape 32x128 causal bf16, {here}"


def test_a_column_of_ratios_has_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ulysses splits heads and ring doesn't, so that the least of their own splits differs; both have sent as much."""
    sent: dict[str, Any] = {"comm_bytes_per_gpu": 8e6, "comm_bytes_statistics": 0, "comm_bytes_least": 2e6}
    ring = outcome("ring", 44.5, **sent, comm_bytes_lower_bound=4e6)
    ulysses = outcome("ulysses", 44.5, **sent, comm_bytes_lower_bound=5e6)
    lines = printed(monkeypatch, [ring, ulysses])
    head = next([cell.strip() for cell in line.split("┃")[1:-1]] for line in lines if line.startswith("┃"))
    cells = {name: [rows[0][head.index(name) - 1] for rows in (cells_of(lines, m) for m in ("ring", "ulysses"))]
             for name in head if name != "method"}  # fmt: skip
    ratios = {name: values for name, values in cells.items() if name.startswith("/")}
    assert ratios["/ least"] == ["4.00x", "4.00x"]
    assert all(len({value.rstrip(" ~") for value in values}) == 1 for values in ratios.values())
    assert cells["least, own split"] == ["4 MB", "5 MB"]


@pytest.mark.parametrize("mask", [["mask=causal"], ["mask=full", "kv_heads=4"]])
def test_all_methods_of_a_problem_have_one_least(mask: list[str]) -> None:
    """The bound that the column divides by."""
    found = answer(Question(["gpus=4", "seqlen=4k", "heads=8", *mask], ("ring", "ulysses", "usp", "mesh")))
    assert len({each.record.comm_bytes_least for each in found.feasible}) == 1
    assert len({each.record.comm_bytes_lower_bound for each in found.feasible}) > 1


@pytest.mark.parametrize("point", [["gpus=8", "seqlen=64k"], ["cluster=local", "gpus=2", "seqlen=64", "iters=1"]])
def test_timelines_fit(
    point: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([*point, "baseline=null", "logger=none", f"results_dir={tmp_path}"]) == 0
    bars = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert len(bars) >= 2 and {len(line) for line in bars} == {60}
    assert all(line.endswith("|") and line.count("|") == 2 for line in bars)


@pytest.mark.parametrize(
    "point", [["gpus=8", "seqlen=64k"], ["method=ring", "cluster=local", "gpus=2", "seqlen=64", "iters=2"]]
)
def test_a_reused_point_prints_what_a_fresh_one_printed(
    point: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, notes and timelines come from the record and the files beside it alone."""
    shown = []
    for reuse in ("false", "true"):
        assert main([*point, "logger=none", f"reuse={reuse}", f"results_dir={tmp_path}"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "|" in shown[0]


def test_brackets_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user wrote stands in tables and errors as it is."""
    strange = outcome("ring", 44.5, dtype="[/x]", status="unsupported", error="dtype=[/x]: must be one of [bold]")
    assert "shape 32x128 causal [/x]," in printed(monkeypatch, [strange])[0]
    lines = printed(monkeypatch, [strange, MESH])
    assert cells_of(lines, "ring")[0][0] == "32x128 causal [/x]"
    assert lines[-1] == "ring, 8 GPUs, seqlen 64k: unsupported: dtype=[/x]: must be one of [bold]"
    print_points(make_console(), [strange, MESH], Path())
    assert isinstance(sys.stdout, io.StringIO)
    assert "unsupported: dtype=[/x]: must be one of [bold]" in sys.stdout.getvalue()


def test_errors_that_are_not_known_are_dashes_in_their_places() -> None:
    cells = {row.name: row.cell for row in ROWS}
    cell = cells["  of rows of what was timed"]
    assert cell(made(mode="measure", err_timed_out=1e-7, err_timed_dk=3e-7)) == "1.0e-07 - 3.0e-07 -"
    assert cell(made(mode="measure", err_timed_seqlen=64)) == "- (none were compared)"
    assert cell(made(mode="measure")) == "-"
    gate = cells["  out, dq, dk, dv"]
    assert gate(made(mode="measure", err_out=1e-7)) == "1.0e-07 - - -"
    trained = made(mode="measure", err_loss=1e-7, err_gradient=2e-7)
    assert cells["  loss, gradient"](trained) == "1.0e-07 2.0e-07"
    assert cells["error against fp64"](trained) == "2.0e-07 at most"


TRAINING = ["model=llama3_8b", "gpus=8", "seqlen=64k"]


@pytest.mark.parametrize(
    ("point", "columns"),
    [
        (["gpus=16", "seqlen=64k"], 80),
        (["gpus=16", "seqlen=64k"], None),
        (["gpus=16", "seqlen=64k", "baseline=null"], None),
        (TRAINING, 80),
        (["-m", "method=ring,usp,mesh", "gpus=8", "seqlen=64k", "cluster=h100_ndr400,b200"], None),
        (["-m", "method=ring,usp,mesh", "gpus=8", "seqlen=64k", "cluster=h100_ndr400,b200"], 80),
    ],
)
def test_the_first_screen(
    point: list[str], columns: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One table of at most 12 rows, and no line wider than the terminal, or than 80 or 100 characters in a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*point, f"results_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if not line.startswith("records: ")]
    assert max(map(len, shown)) <= (columns or (ONE if "baseline=null" in point else SEVERAL))
    assert sum(line.startswith("┏") for line in lines) == 1
    assert 5 <= sum(line.startswith("│") for line in lines) <= 12
    variants = next((i for i, line in enumerate(lines) if line.startswith("variants: ")), None)
    assert "-m" in point or (variants is not None and "" in lines[variants + 1 : variants + 4])


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """The cells of each row of a point's tables, stacked ones joined."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.split("│")[1:-1])
            found.setdefault(name, []).extend(cells)
    return found


def test_a_narrow_terminal_has_methods_one_below_the_other_and_all_prints_the_same_cells_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for columns, *more in (("100",), ("52",), ("100", "--all")):
        monkeypatch.setenv("COLUMNS", columns)
        assert main([*more, "gpus=16", "seqlen=128k", f"results_dir={tmp_path}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("┏") for line in lines) == (2 if columns == "52" else 1)
        tables[columns, *more] = rows_of(lines)
    first, narrow, every = tables.values()
    assert narrow == first and first.items() <= every.items()
    assert {"MFU", "throughput", "forward", "closed form", "with any split of heads"} <= every.keys() - first.keys()
    assert list(first)[:4] == ["layout, variant", "mode", "validation", "step [two of three]"]
    assert list(first)[4:] == [
        *("bound", "exposed communication", "sent by each GPU", "lower bound", "peak memory", "speed-up over ring")
    ]
    assert first["validation"][0] == "not validated" and first["validation"][1].startswith("median ")
    assert first["speed-up over ring"][0].endswith("(not validated)")


def test_what_a_table_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most important columns get the room, and a point that failed has its status."""
    lines = printed(monkeypatch, [OTHER, MESH, outcome("usp", 44.5, status="oom", error="of 8 GB")], 125, every=False)
    (row,) = cells_of(lines, "mesh")
    assert row == [*POINT, "33.125 ms [32.62, 33.38]", "1.00x", "ok"]
    left_out = "--all prints these too: fwd ms, bwd ms, tokens/s, sent/GPU, exposed, exposed ms, peak mem"
    assert left_out in lines and lines[-1].startswith("usp, 8 GPUs, seqlen 64k: oom: of 8 GB")


def test_a_measured_speed_up_has_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    near = outcome("ring", 33.5)
    assert speed_up(MESH.record, [MESH, RING]) == "1.34x [1.32, 1.37]"
    assert speed_up(MESH.record, [MESH, near]) == "1.01x [0.989, 1.03] ~"
    lines = printed(monkeypatch, [MESH, near], 100, every=False)
    assert "~: not told apart, or too close to call: the intervals overlap" in lines


def test_a_measurement_says_before_and_meanwhile_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before by the cluster's rates, whose square the length is; meanwhile by the steps that are done."""
    local = ["cluster=local", "device=cpu", "gpus=2", "method=ring", "iters=10"]
    session._say_duration([point(*local, "seqlen=1k")])
    session._say_duration([point(*local, "seqlen=64k")])
    session._say_duration([point(*local, "model=tiny")])
    session._say_duration([point("gpus=8", "seqlen=64k")])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "what is simulated takes no time"
    said = [re.fullmatch(r"about ([\d.]+) (s|h) of computing at local's rates", line) for line in lines]
    assert [one and one[2] for one in said] == ["s", "h", "s"]
    monkeypatch.setattr(session, "has_bfloat16", lambda: False)
    session._say_duration([point(*local, "dtype=bfloat16")])
    unknown = "1 points whose time isn't known before their first steps: this CPU emulates their dtype, and "
    assert capsys.readouterr().err == f"{unknown}dtype=float32 is faster\n"
    now_s = iter((0.0, 5.0, 30.0, 40.0, 65.0))
    monkeypatch.setattr(session.time, "monotonic", lambda: next(now_s, 66.0))
    with session._bar(11) as advance:
        for _ in range(5):
            advance(1)
    first, later = capsys.readouterr().err.splitlines()
    assert first == "1 of 11 benchmark steps", "one step tells little of the others"
    assert later == "3 of 11 benchmark steps, about 3 min left"


def test_this_machine_has_a_short_sequence_and_a_fast_dtype_by_default() -> None:
    def chosen(*given: str, gpus: int) -> tuple[object, object]:
        with Composer(gpus=gpus) as composer:
            config = composer.compose(given)
        return config["seqlen"], config["dtype"]

    assert chosen("cluster=local", gpus=0) == chosen("cluster=local", "device=cpu", gpus=8) == (2**9, "float32")
    assert chosen("cluster=local", gpus=8) == (2**9, "bfloat16")
    assert chosen("cluster=local", "seqlen=4k", "dtype=float64", gpus=0) == ("4k", "float64")
    assert chosen(gpus=0) == chosen(gpus=8) == (2**20, "bfloat16")
