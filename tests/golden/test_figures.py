"""No change of the code changes a simulated or counted figure unless figures.json is recorded again with it."""

from __future__ import annotations

import json

import pytest

from sp_bench.methods import REGISTRY
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import MASKS
from sp_bench.resources import CONF
from tests.golden.record import COUNTS, FILE, POINTS, TIMES, WHOLE, figures
from tests.support.marks import exhaustive

RECORDED = json.loads(FILE.read_text())


QUICK = {point.split()[0]: point for point in reversed(POINTS) if "gpus=256" not in point}.values()
"""The first of each method."""
LACKING = "figures.json has no figures of this point: python -m tests.golden.record --new"


@pytest.mark.parametrize("point", [point if point in QUICK else exhaustive(point) for point in POINTS])
def test_figures_are_as_recorded(point: str) -> None:
    assert point in RECORDED, LACKING
    found, recorded = figures(point), RECORDED[point]
    assert found.keys() == recorded.keys()
    times = found.keys() & TIMES
    assert {name: found[name] for name in times} == pytest.approx({name: recorded[name] for name in times}, rel=1e-12)
    assert all(found[name] == recorded[name] for name in found.keys() & COUNTS)


def test_all_that_is_registered_has_figures() -> None:
    """Methods, masks, layouts, layouts and clusters; `python -m tests.golden.record --new` records what lacks some."""
    assert list(RECORDED) == list(POINTS)
    words = {word for point in POINTS for word in point.split()}
    assert {f"method={name}" for name in REGISTRY} <= words
    packed = {mask.name for mask in Packed.__subclasses__()}
    assert {f"mask={name}" for name in {*MASKS, *packed} - WHOLE.keys()} | {"causal=false"} <= words
    assert {recorded["layout"] for recorded in RECORDED.values()} == {*LAYOUTS, *ASSIGNMENTS}
    simulated = {path.stem for path in (CONF / "cluster").glob("*.yaml")} - {"local"}
    assert {f"cluster={name}" for name in simulated} <= words
