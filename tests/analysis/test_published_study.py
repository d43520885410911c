"""The study of published measurements has the figures of `sp_bench.validate published`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import published
from sp_bench.validate.left_out import fits
from tests.support.frames import rows_of
from tests.support.sections import sections_of, table_of, tables_of, values, words_of

PAGE = Path(__file__).parents[2] / "docs" / "results" / "published.csv"
SEEN = pd.read_csv(PAGE, dtype={"causal": str}, keep_default_na=False)
GIVEN, HELD_OUT, SECOND = (rows_of(SEEN, set=name).reset_index(drop=True) for name in ("given", "held_out", "second"))
ON_ONE_GPU = [i for i, gpus in enumerate(GIVEN["gpus"]) if gpus == 1]
ON_PCIE = [i for i, hardware in enumerate(GIVEN["hardware"]) if hardware == "8xL20 PCIe"][-3:]
HELD = [i for i, gpus in enumerate(HELD_OUT["gpus"]) if gpus == 1]
TILES = [i for i, row in enumerate(SECOND.to_dict("records")) if (row["gpus"], row["seqlen"]) == (8, 8192)]
COUNT = len(ON_ONE_GPU) + len(ON_PCIE) + len(HELD) + len(TILES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture(autouse=True, scope="module")
def few() -> Iterator[None]:
    rows = {"measurements": [*ON_ONE_GPU, *ON_PCIE], "held_out": HELD, "second": TILES}
    here = {name: [published.published_rows(name)[i] for i in rows[name]] for name in rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "published_rows", here.__getitem__)
        published.asked.cache_clear()
        yield
    published.asked.cache_clear()


@pytest.mark.long
def test_figures_are_those_of_the_page(runs: Runs) -> None:
    """But for the left-out times of an A100, which are fitted again to rows that are not here."""
    page = pd.concat([GIVEN.iloc[[*ON_ONE_GPU, *ON_PCIE]], HELD_OUT.iloc[HELD], SECOND.iloc[TILES]]).to_dict("records")
    found = published.compared(runs)
    for one, row in zip(found, page, strict=True):
        assert one.measured.known == row["step_measured_ms"] and one.kind["links"] == row["links"]
        assert one.simulated.known == pytest.approx(row["step_simulated_ms"], rel=1e-9)
        assert one.errors[0].known == pytest.approx(row["error"], rel=1e-9)
        if "A100" not in row["hardware"]:
            assert one.left_out.known == pytest.approx(row["step_left_out_ms"], rel=1e-9)
    assert any(one.left_out.known != one.simulated.known for one in found)
    assert {one.simulated.kind for one in found} == {"simulated"} != {one.measured.kind for one in found}


@pytest.mark.long
def test_sections_say_errors_order_and_fits(runs: Runs) -> None:
    tables = tables_of(published.errors(runs))
    by_links = {row[0]: row for row in tables["published-measurements-links"].rows}
    assert by_links["PCIe"][1] == len(ON_PCIE)
    (worst,) = values(by_links["PCIe"][4:5])
    assert worst == pytest.approx(GIVEN.iloc[ON_PCIE]["error"].abs().max(), rel=1e-9)
    assert f"{COUNT} times" in words_of(published.errors(runs))
    ordered = {row[1]: row[2:] for row in table_of(published.order(runs)).rows}
    count, alike, left_out = map(int, values(ordered["8xL20 PCIe"]))
    assert 0 < alike <= count and left_out <= count
    assert len(table_of(published.fitted(runs)).rows) == len(fits())
    assert len(table_of(published.points(runs)).rows) == COUNT


@pytest.mark.long
def test_all_sections_render_(runs: Runs) -> None:
    for section in sections_of("published", runs):
        assert "{" not in words_of(section) and section.to_html()
