"""Bounds in the figures of volumes, and Mesh's orders of memory against time, on a few points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp_bench.analysis.figure import Figure
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.choosing import places as choosing_grid
from sp_bench.analysis.studies.choosing import shapes as choosing_tiles
from tests.support.sections import table_of, words_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    methods, keys = ("striped", "ulysses", "mesh"), (("h100_ndr400", 8, "512k", 8), ("h100_ndr400", 8, "512k", 16))
    for module in (choosing_grid, choosing_tiles):
        for name, value in {"METHODS": methods, "KEYS": keys, "KV_HEADS": (8,), "GPUS": (8, 16)}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.mark.long
def test_volumes_stand_between_their_bounds(runs: Runs, few: None, tmp_path: Path) -> None:
    """Methods with whole heads are above the dashed line, and all are above the dotted one."""
    (figure,) = [part for part in choosing_tiles.volume(runs).saved() if isinstance(part, Figure)]
    drawn = figure.canvas.axes[0].lines
    lines = {str(line.get_label()).split(" (")[0]: np.asarray(line.get_ydata()) for line in drawn}
    whole, least = lines["bound, heads whole"], lines["bound, any split of heads"]
    assert len(lines) == 5 and len(whole) == 2
    for i in range(2):
        assert least[i] < whole[i] <= min(lines["mesh"][i], lines["striped"][i])
        assert least[i] <= lines["ulysses"][i] < whole[i]


@pytest.mark.long
def test_orders_hold_less_for_more_time(runs: Runs, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing_tiles, "AT", {**choosing_tiles.AT, "gpus": 8})
    section = choosing_tiles.orders(runs)
    rows = [[cell if isinstance(cell, str | int) else cell.known for cell in row] for row in table_of(section).rows]
    memory, times = [row[3] for row in rows], [row[4] for row in rows]
    assert memory == sorted(memory) and times == sorted(times, reverse=True) and len(rows) > 1
    assert {row[1] for row in rows} & {"by rows", "by columns"}
    assert "less memory" in words_of(section) and "{" not in words_of(section)
