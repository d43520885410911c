"""Tables of points: all figures, on terminals of any width and in files."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sp_bench.bench import Outcome
from sp_bench.cli.report import make_console, print_sweep
from tests.made_records import made

WIDE = 10_000


def outcome(method: str, step_ms: float, *, reused: bool = False, **changes: Any) -> Outcome:
    fields = {"method": method, "layout": "striped", "variant": "4x2", "gpus": 8, "seqlen": 2**16, "mode": "measure"}
    figures = {
        "step_ms_median": step_ms, "step_ms_ci95_low": step_ms - 0.5, "step_ms_ci95_high": step_ms + 0.25,
        "forward_ms_median": 11.25, "backward_ms_median": 33.5, "tokens_per_s": 54321.0, "exposed_comm_ms": 7.75,
        "peak_mem_bytes_max": 6_543_000, "iters": 10,
    }  # fmt: skip
    return Outcome(made(method, **{**fields, **figures, **changes}), reused=reused)


def printed(outcomes: list[Outcome], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    print_sweep(console, outcomes)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "tables"), [(62, 3), (80, 2), (140, 1), (WIDE, 1)])
def test_a_sweep_is_cut_into_tables_that_fit(width: int, tables: int) -> None:
    """Each names the points, and each figure is in one of them, whole and on the line of its point."""
    lines = printed([outcome("ring", 44.5), outcome("mesh", 33.125, peak_mem_bytes_max=7_654_000)], width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("│ mesh ")]
    assert len(rows) == tables == sum("┃ method ┃" in line for line in lines)
    cells = [cell.strip() for row in rows for cell in row.split("│")[1:-1]]
    step = "33.125 ms  [32.62, 33.38]"
    whole = [step, "1.00x", "11.25", "33.5", "54,321", "7.658 kB", "7.75 ms  (23%)", "7.654 MB", "ok"]
    assert [cell for cell in cells if cell != "mesh"] == whole


def test_cells_that_no_terminal_has_room_for_lose_nothing() -> None:
    lines = printed([outcome("ring", 44.5), outcome("mesh", 33.125)], 24)
    assert max(map(len, lines)) <= 24
    assert "…" not in "".join(lines)


def test_what_all_points_share_is_said_once() -> None:
    alike = printed([outcome("ring", 44.5), outcome("mesh", 33.125)], WIDE)
    said = "variant 4x2, gpus 8, seqlen 64k, shape 32x128 causal bf16, layout striped, mode measure"
    assert alike[0] == f"2 points, all: {said}"
    assert not [name for name in ("variant", "gpus", "seqlen", "shape", "layout", "mode") if name in "".join(alike[1:])]
    sizes = printed([outcome("ring", 44.5), outcome("ring", 33.125, gpus=16, reused=True)], WIDE)
    assert "┃ method ┃ gpus ┃" in sizes[2] and "gpus" not in sizes[0]
    assert sum("ok (reused) │" in line for line in sizes) == 1


def test_one_point_has_all_its_columns() -> None:
    lines = printed([outcome("ring", 44.5)], WIDE)
    assert lines[0] == "1 points" and "┃ variant ┃ gpus ┃ seqlen ┃" in lines[2]


def test_a_file_is_wider_than_any_table() -> None:
    assert make_console().width == WIDE
