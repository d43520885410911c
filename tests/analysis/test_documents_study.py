"""Findings that the study of packed documents must show, on a part of its grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.number import Number
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Text
from sp_bench.analysis.studies import documents
from sp_bench.analysis.studies.documents import casts as documents_casts
from sp_bench.analysis.studies.documents import cells as documents_maps
from sp_bench.analysis.studies.documents import places as documents_grid
from sp_bench.analysis.studies.documents.places import CLOSE, SPLIT_HEADS, cells, fastest, step, winner
from sp_bench.methods import REGISTRY
from sp_bench.records.interval import interval
from tests.support.sections import code_of, sections_of, table_of, tables_of, words_of

DATA, GPUS, METHODS = ("short", "equal"), (4, 8), ("ring", "mesh", "ulysses", "usp")
VARIANTS = {"ring": {}, "mesh": {"tile": [2, 2]}, "usp": {"ulysses": 2}}
SMALL = {"DATA": DATA, "GPUS": GPUS, "MAP_GPUS": 4, "METHODS": METHODS, "VARIANTS": VARIANTS, "SHARED_DATA": "short"}


def numbers(row: Sequence[object]) -> list[Number]:
    """The cells of a row that are numbers."""
    return [cell for cell in row if isinstance(cell, Number)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"), workers=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the grid."""
    for module in (documents_grid, documents_maps):
        for name, value in SMALL.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.mark.long
def test_the_winner_is_the_fastest_of_all_methods_and_layouts(runs: Runs) -> None:
    all_cells, found = cells(runs), fastest(runs)
    assert len(all_cells) == len(DATA) * sum(len(REGISTRY[method].all_layouts()) for method in METHODS)
    for data in DATA:
        one = winner(found, data, 4, METHODS)
        here = [step(record) for key, record in all_cells.items() if key[0] == data]
        assert one.step.value == min(here) and one.margin.known >= 0
        limit = (1 + CLOSE) * min(here)
        assert {r.method for r in one.within(CLOSE)} == {r.method for r in one.others if step(r) < limit}
    whole = winner(found, "short", 8, [method for method in METHODS if method not in SPLIT_HEADS])
    assert whole.record.method not in SPLIT_HEADS and whole.record.gpus == 8


@pytest.mark.long
def test_what_auto_finds_is_the_fastest_of_all_layouts(runs: Runs) -> None:
    (auto,) = runs.ask([documents_grid.asked("short", 4, "mesh")])
    assert auto.step_ms_median == fastest(runs)["short", 4, "mesh"].step_ms_median


@pytest.mark.long
def test_equal_documents_stay_whole_and_nothing_is_sent(runs: Runs) -> None:
    """Documents of 8k tokens, one for each GPU."""
    section = documents.bounds(runs)
    rows = {(row[0], row[1]): numbers(row) for row in table_of(section).rows}
    for layout in ("contiguous", "whole_documents"):
        work, least_work, sent, bound, over = rows["equal", layout]
        assert (work.value, least_work.value, sent.value, bound.value, over.value) == (1, 1, 0, 0, None)
    assert "equal: contiguous is the most even layout (1.000 times the mean) and needs least" in words_of(section)
    for work, least_work, sent, bound, _ in rows.values():
        assert work.kind == bound.kind == "computed"
        assert work.known >= least_work.known - 1e-9 and sent.known >= bound.known


@pytest.mark.long
def test_what_is_cast_is_what_must_be(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MagiAttention's setting, at a size that a test has time for; work and rows at 64 and 256 GPUs are in
    tests/methods/test_group_cast.py.
    """
    monkeypatch.setattr(documents_casts, "CAST_GPUS", (16,))
    (row,) = table_of(documents.even(runs)).rows
    work, sent, needed, share, step, earlier, ratio = numbers(row)
    assert row[0] == 16 and row[7] in documents_casts.EARLIER
    assert work.known <= 1.05 and share.known <= 1.05 and sent.kind == needed.kind == work.kind == "computed"
    assert ratio.known == pytest.approx(step.known / earlier.known) and ratio.known < 1


@pytest.mark.long
def test_rows_for_a_node_cross_less_and_never_take_longer_with_split_heads(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_casts, "RELAYED_GPUS", (16,))
    for row in table_of(documents.relayed(runs)).rows:
        split, variant = row[0], row[3]
        each, levels, *steps, ratio = numbers(row)
        assert levels.known <= each.known and (split == "yes" or "by 8s" in str(variant))
        assert steps[1].known / steps[0].known == pytest.approx(ratio.known)
        assert split == "no" or ratio.known <= 1


def test_queries_that_travel_save_most_backward_and_leave_work_even(
    monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    monkeypatch.setattr(documents_casts, "TRAVELLING", ((16, 8),))
    rows = {row[2]: [cell.known for cell in numbers(row)] for row in table_of(documents.travels(runs)).rows}
    for forward, backward, work, keys, both, ratio in rows.values():
        assert 0 <= forward <= backward < 100 and 1 <= work <= 1.05
        assert both / keys == pytest.approx(ratio)
    assert rows[64][1] > 20 > 1 > rows[8][1]


@pytest.mark.long
def test_the_map_has_all_cells_and_its_words_follow(runs: Runs) -> None:
    section = documents.maps(runs)
    rows = table_of(section).rows
    assert {row[2] for row in rows if row[1] == "ulysses"} == {"contiguous"}
    for data in DATA:
        best = min((row for row in rows if row[0] == data), key=lambda row: numbers(row)[0].known)
        assert numbers(best)[1].value == 1
        assert f"{data}: {best[1]} on {best[2]} is the fastest" in words_of(section)


@pytest.mark.long
def test_what_is_sent_is_a_share_of_what_full_attention_sends(runs: Runs) -> None:
    table = table_of(documents.shares(runs))
    heads = [column.name for column in table.columns][3:]
    shares = {row[0]: dict(zip(heads, (n.known for n in numbers(row)[1:]), strict=True)) for row in table.rows}
    ring = shares["ring"]
    assert ring["whole_documents"] == 0 < ring["contiguous"] < ring["striped"] == pytest.approx(100, abs=0.1)
    assert all(0 <= share < 100.1 for of_method in shares.values() for share in of_method.values())


@pytest.mark.long
def test_all_sections_render(runs: Runs) -> None:
    for section in sections_of("documents", runs):
        assert "{" not in "".join(str(part) for part in section.parts if isinstance(part, Text))
        assert section.sources and section.to_html()
    names = tables_of(documents.winners(runs))
    assert [len(table.rows) for table in names.values()] == [len(DATA) * len(GPUS)] * 2


@pytest.mark.long
def test_winners_have_the_intervals_of_their_records(runs: Runs) -> None:
    found, table = fastest(runs), tables_of(documents.winners(runs))["documents-winners"]
    for row in table.rows:
        one = winner(found, str(row[0]), cast(int, row[1]), METHODS)
        low, high = numbers(row)[1:3]
        record = one.record
        assert (low.value, high.value) == (record.step_ms_validated_low, record.step_ms_validated_high)
        tied = [each.method for each in one.others if interval(each).overlaps(interval(record))]
        assert row[-1] == (", ".join(tied) or ("none" if low.value else "-"))


@pytest.mark.exhaustive
def test_the_notebook_runs(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notebooks.RECORDS, str(runs.folder))
    names: dict[str, object] = {}
    for cell in code_of("documents"):
        exec(cell, names)
    assert names["record"]
