"""MagiAttention's bars of packed documents beside their simulation: what the table states, and how it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sp_bench.point.backing import BETWEEN_NODES, PACKS, Kind, known, row_of
from sp_bench.point.simulated import simulate_point
from sp_bench.validate.common import published_rows
from sp_bench.validate.documents import AMONG, DRAWS, Simulated, backing, draws, pairs, simulated
from tests.support.points import point

SEEN = pd.read_csv(Path(__file__).parents[1] / "docs" / "results" / "published_documents.csv")


def test_errors_and_order_are_within_what_is_promised() -> None:
    assert len(SEEN) == len(published_rows("document_bars")) == 64
    assert np.median(np.abs(SEEN["error_left_out"].to_numpy())) < 0.12
    alike, count, wrong = pairs(SEEN)
    assert alike / count > 0.85 and count > 200 and len(wrong) == count - alike
    low, mean, high = (SEEN[name].to_numpy() for name in ("low", "tflops_simulated", "high"))
    assert np.all(low <= mean) and np.all(mean <= high)


def test_packs_are_backed_by_these_bars_alone() -> None:
    """Each bar backs one kind of points, by its error without the bars of as many GPUs."""
    rows = backing(SEEN)
    assert rows == [row for row in known() if row.kind.mask == PACKS]
    assert sum(row.points for row in rows) == len(SEEN)
    both = "KV passed on and all-to-alls"
    nodes = SEEN[(SEEN["transfers"] == both) & (SEEN["gpus"] > 8)]
    assert {*nodes["method"]} == {"usp", "loongtrain"}
    (row,) = (row for row in rows if row.kind[2:] == (both, BETWEEN_NODES))
    assert row.two_of_three == pytest.approx(np.quantile(np.abs(np.asarray(nodes["error_left_out"])), 2 / 3), abs=1e-4)


@pytest.mark.parametrize(
    ("overrides", "transfers"),
    [
        ("method=group_cast method.ulysses=8 method.stages=1 implementation=ours", "all-to-alls and rows cast"),
        ("method=usp method.ulysses=8 implementation=published", "KV passed on and all-to-alls"),
        ("method=ulysses implementation=published", "all-to-alls"),
    ],
)
def test_a_step_of_a_pack_has_the_interval_of_its_kind(overrides: str, transfers: str) -> None:
    setting = "mask=document data=magi_attention gpus=16 seqlen=128k heads=64 kv_heads=8 cluster=h100_ndr400"
    record, _ = simulate_point(point(*setting.split(), *overrides.split(), "mode=simulate"))
    row = row_of(Kind("attention", PACKS, transfers, BETWEEN_NODES))
    assert row
    assert record.validation_error == pytest.approx(row.two_of_three, abs=0.031)
    assert record.step_ms_validated_low and record.step_ms_validated_low < (record.step_ms_median or 0)


def test_group_cast_beats_usp_as_measured() -> None:
    keys = zip(SEEN["method"], SEEN["phase"], SEEN["gpus"], strict=True)
    by = dict(zip(keys, SEEN["tflops_simulated"].tolist(), strict=True))
    for phase in ("forward", "backward"):
        for gpus in (8, 16, 32, 64):
            assert by["magi_attn-native", phase, gpus] > by["usp", phase, gpus]


@pytest.mark.long
def test_the_table_is_what_is_simulated() -> None:
    chosen = [0, 2, 6, 33]
    found = simulated([published_rows("document_bars")[i] for i in chosen])
    for column in ("tflops_measured", "tflops_simulated", "low", "high", "error", "error_unfitted"):
        assert found[column].tolist() == pytest.approx(SEEN[column].iloc[chosen].tolist(), rel=1e-9), column


def test_packs_are_at_even_steps_of_the_work() -> None:
    found = draws(65536)
    assert len({*found}) == DRAWS and max(found) < AMONG


def test_times_are_linear_in_what_was_fitted() -> None:
    seen = Simulated(np.array([100.0, 50.0]), np.array([200.0, 100.0]))
    assert seen.at(0) == pytest.approx(seen.unfitted) and seen.at(1) == pytest.approx(seen.found)
    assert seen.at(2) == pytest.approx([200 / 3, 100 / 3])


def test_a_pair_is_in_order_if_both_say_the_same() -> None:
    rows = [("a", 100.0, 10.0), ("b", 101.0, 1.0), ("c", 200.0, 20.0), ("d", 50.0, 30.0)]
    table = pd.DataFrame(
        [{"method": m, "gpus": 8, "phase": "forward", "tflops_measured": x, "tflops_left_out": y} for m, x, y in rows]
    )
    assert pairs(table)[:2] == (2, 5)  # a and b are alike as measured; d is fastest in the simulation alone
