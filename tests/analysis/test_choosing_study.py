"""The study of choosing on a few of its points, and its search for the range of a claim."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench.account import lower_bound_bytes
from sp_bench.analysis.number import Number, formula
from sp_bench.analysis.ranking import payload_over_bound
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.choosing import ladders as choosing_limits
from sp_bench.analysis.studies.choosing import places as choosing_grid
from sp_bench.analysis.studies.choosing import shapes as choosing_tiles
from sp_bench.analysis.studies.choosing import winners as choosing_maps
from sp_bench.analysis.studies.choosing.ladders import GAIN, Ladder
from sp_bench.analysis.studies.choosing.places import METHODS, SPLIT_HEADS, TIE, best, grid, leanest, tied
from sp_bench.plan import Problem
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from tests.support.sections import code_of, table_of, words_of
from tests.support.typed import Known

CLUSTERS, SEQLENS, GPUS = ("h100_ndr400",), ("128k", "512k"), (8, 64)
KEYS = tuple((cluster, 32, seqlen, gpus) for cluster in CLUSTERS for seqlen in SEQLENS for gpus in GPUS)
SOURCE = (formula("test", "a test", "this file"),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the study use a part of its grid."""
    for module in (choosing_grid, choosing_maps, choosing_tiles):
        for name, value in {
            "KEYS": KEYS,
            "CLUSTERS": CLUSTERS,
            "KV_HEADS": (32,),
            "SEQLENS": SEQLENS,
            "GPUS": GPUS,
            "TILED_GPUS": (64,),
            "EVERY_VARIANT": KEYS[-1:] * 2,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.mark.long
def test_points_that_cannot_be_served_are_rows(runs: Runs) -> None:
    section = choosing_maps.points(runs)
    table = table_of(section)
    assert {(row[3], row[4], row[5]) for row in table.rows} == {(64, "ulysses", "unsupported")}
    assert all("heads=32" in str(row[6]) for row in table.rows)
    assert f"{len(KEYS) * len(METHODS)} points" in words_of(section)


@pytest.mark.long
def test_the_best_is_the_fastest_and_the_second_another_plan(runs: Runs) -> None:
    found = grid(runs)
    for key in KEYS:
        one = best(found, key, METHODS)
        assert one is not None and one.second is not None
        times = sorted(r.step_ms_median or math.inf for (k, _), r in found.items() if k == key)
        assert one.step.value == times[0]
        assert one.margin.known > 0 and tied(one) == (one.margin.known < TIE)
        assert one.second.comm_bytes_per_gpu != one.record.comm_bytes_per_gpu
    # USP on one node is Ulysses: one plan, and no second.
    one = best(found, KEYS[0], SPLIT_HEADS)
    assert one is not None and one.record.method == "ulysses" and one.second is None and one.margin.value is None


@pytest.mark.long
def test_the_leanest_is_as_fast_and_needs_no_more(runs: Runs) -> None:
    found = grid(runs)
    for key in KEYS:
        one, lean = best(found, key, METHODS), leanest(found, key, METHODS)
        assert one is not None and lean is not None
        assert Known(lean).step_ms_median < (1 + TIE) * one.step.known
        assert Known(lean).peak_mem_bytes_max <= Known(one.record).peak_mem_bytes_max
    nothing = {place: replace(record, status="oom") for place, record in found.items()}
    assert leanest(nothing, KEYS[0], METHODS) is None and best(nothing, KEYS[0], METHODS) is None


@pytest.mark.long
def test_mesh_beats_ring_across_nodes_and_usp_beats_both(runs: Runs) -> None:
    found = grid(runs)
    place = ("h100_ndr400", 32, "512k", 64)
    ring, mesh, usp = (Known(found[place, name]).step_ms_median for name in ("striped", "mesh", "usp"))
    assert usp < mesh < ring / 1.5


@pytest.mark.long
def test_payload_over_the_bound(runs: Runs) -> None:
    record = grid(runs)[("h100_ndr400", 32, "512k", 64), "striped"]
    ratio = payload_over_bound(record)
    shape = {"n": 64, "seqlen": record.seqlen, "heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "bfloat16"}
    problem = Problem(**shape, mask=CAUSAL, layout=LAYOUTS["striped"])
    bound = sum(lower_bound_bytes(problem, phase) for phase in ("forward", "backward"))
    chunk = 2 * record.seqlen / 64 * 32 * 128
    assert ratio.kind == "computed"
    assert ratio.value == pytest.approx((2 + 4) * 63 * chunk / bound)


@pytest.mark.long
def test_tiles_say_which_time_is_a_bound(runs: Runs) -> None:
    for row in table_of(choosing_tiles.tiles(runs)).rows:
        assert row[8] in ("simulated", "a bound") and row[9].value >= (1 if row[8] == "simulated" else 0)  # type: ignore[union-attr]
        assert row[5] == "8x8"  # sqrt(64)


@pytest.mark.long
def test_all_sections_render(runs: Runs) -> None:
    made = [choosing_maps.maps, choosing_maps.maps_whole_heads, choosing_tiles.memory, choosing_tiles.volume]
    for section in (make(runs) for make in made):
        assert "{" not in words_of(section)
        assert section.sources and section.to_html()


def test_pareto_keeps_what_nothing_beats() -> None:
    def variant(gb: float, ms: float) -> choosing_tiles.Variant:
        return "mesh", f"{gb}", Number(gb, "computed", SOURCE), Number(ms, "simulated", SOURCE)

    front = choosing_tiles.pareto([variant(*at) for at in ((1, 9), (2, 5), (2, 7), (3, 5), (4, 1), (5, 8))])
    assert [(gb.value, ms.value) for _, _, gb, ms in front] == [(1, 9), (2, 5), (4, 1)]


def ladder(*gains: float) -> Ladder:
    return Ladder("GB/s", ".3g", {float(2**i): Number(gain, "simulated", SOURCE) for i, gain in enumerate(gains)})


def test_a_crossing_is_found_between_two_records() -> None:
    (at,) = ladder(4.0, 2.0, GAIN / 2, 0.5).crossings()
    # Log gain falls from log 2 to log 0.51 between 2 and 4.
    share = math.log(2 / GAIN) / math.log(2 / (GAIN / 2))
    assert at.value == pytest.approx(2 * 2**share)
    assert "stops being faster from" in str(ladder(4.0, 2.0, 0.5).words("A", "B"))
    assert "begins being faster from" in str(ladder(0.5, 2.0).words("A", "B"))
    both = str(ladder(0.5, 2.0, 0.5).words("A", "B"))
    assert both.index("begins") < both.index("stops")


@pytest.mark.parametrize(("gains", "word"), [((3.0, 2.0), "everywhere"), ((1.0, 0.9), "nowhere")])
def test_no_crossing_is_said(gains: tuple[float, ...], word: str) -> None:
    assert ladder(*gains).crossings() == [] and word in str(ladder(*gains).words("A", "B"))


@pytest.mark.long
def test_claims_stop_where_records_say(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing_limits, "RIVALS", ("striped", "mesh"))
    monkeypatch.setattr(choosing_limits, "TOKENS", (2, 64))
    found = choosing_limits._by_tokens(runs)
    gains = choosing_limits._ladder(found, "mesh", "striped", choosing_limits.PER_GPU)
    (at,) = gains.crossings()
    assert 2048 < at.known < 65536
    monkeypatch.setattr(choosing_limits, "RING_POINTS", (("ascend_oam", (8,)), ("h100_ndr400", (8,))))
    monkeypatch.setattr(choosing_limits, "RING_TOKENS", (4,))
    mesh, switch = map(str, choosing_limits._about_tokenring(runs))
    assert "8 GPUs up to 4k tokens" in mesh and "nowhere" in switch


@pytest.mark.long
def test_the_last_cells_of_the_notebook_run(runs: Runs, tmp_path: Path) -> None:
    """The maps take minutes without records, so only the first cell and the last ones are run."""
    code = code_of("choosing")
    names: dict[str, object] = {}
    for cell in (code[0], *code[-2:]):
        exec(cell.replace('"results/report/records"', repr(str(tmp_path))), names)
    assert names["record"]
