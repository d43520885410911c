"""Others' published training steps beside their simulation: the errors that the page states, and what backs a step."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sp_bench.plan.mask import WHOLE
from sp_bench.point.backing import BETWEEN_NODES, Kind, row_of
from sp_bench.point.training import simulate_training
from sp_bench.validate.common import published_rows
from sp_bench.validate.steps import LEAST, backing, overrides, simulated, source_of, table, words
from tests.support.frames import rows_of
from tests.support.typed import Known
from tests.workload.requests import point

DOCS = Path(__file__).parents[1] / "docs"
SEEN = pd.read_csv(DOCS / "results" / "published_steps.csv", keep_default_na=False)
LIKE_TRL = (
    "model=qwen3_8b", "method=ring", "method.layout=zigzag", "gpus=8", "seqlen=256k", "cluster=h100_ndr400",
    "kernel=cudnn", "dtype=bfloat16", "wire_dtype=float32", "train.recompute=full", "train.parameters=sharded",
    "implementation=torch_context_parallel",
)  # fmt: skip


def test_errors_are_within_what_is_promised() -> None:
    """In the median of each source; with what would be assumed without it they are larger."""
    assert len(SEEN) == len(published_rows("steps")) == 23
    off = SEEN[["error", "error_left_out"]].abs().assign(source=SEEN["source"]).groupby("source").median()
    error, left_out = off["error"].to_numpy(), off["error_left_out"].to_numpy()
    assert set(off.index) == {"NeMo", "TRL", "torchtitan"} and error.max() < 0.1
    assert (left_out >= error).all() and left_out.max() < 0.3
    page = (DOCS / "explanation" / "training_steps.md").read_text()
    assert table(SEEN) in page
    assert all(line in page for line in words(SEEN).splitlines())


def test_every_row_has_its_source_and_its_setting() -> None:
    for row in published_rows("steps"):
        assert source_of(row) and row["notes"] and float(row["measured_ms"]) > 0
        assert {key.partition("=")[0] for key in row["left_out"].split()} <= {"method.layout", "kernel"}
        assert (overrides(row) == overrides(row, left_out=True)) == (not row["left_out"])


@pytest.mark.long
def test_the_table_is_what_is_simulated() -> None:
    chosen = [1, 6, 11, 19]
    found = simulated([published_rows("steps")[i] for i in chosen])
    for column in ("measured_s", "simulated_s", "left_out_s", "error", "error_left_out"):
        assert found[column].tolist() == pytest.approx(SEEN[column].iloc[chosen].tolist(), rel=1e-9), column


def test_steps_back_steps() -> None:
    """A kind that enough of them are of, with the implementation of most."""
    rows = {row.kind: row for row in backing(SEEN)}
    inside, across = (Kind("train", WHOLE, "KV passed on", links) for links in ("NVLink", BETWEEN_NODES))
    assert set(rows) == {inside, across} and all(row_of(kind) == row for kind, row in rows.items())
    assert rows[inside].implementation == "torch_context_parallel" and rows[inside].points == 8
    few = rows_of(SEEN, transfers="no transfers")
    assert 0 < max(few.groupby("links").size()) < LEAST and backing(few) == []


def test_a_step_like_published_ones_has_an_interval_and_others_have_none() -> None:
    record = Known(simulate_training(point(*LIKE_TRL)))
    row = row_of(Kind("train", WHOLE, "KV passed on", "NVLink"))
    assert row and record.validation == row.words() and record.validation_error == row.two_of_three
    assert record.step_ms_validated_low < record.step_ms_median < record.step_ms_validated_high
    for changed, says in (
        (("kernel=flash_attn_4",), "whose figures are others"),
        (("gpus=16", "kernel=flash_attn"), "are of implementation=published"),
        (("cluster.device.matmul_tflops.bfloat16=500",), "whose figures are others"),
        (("method=ulysses", "method.layout=contiguous"), "all-to-alls over NVLink"),
    ):
        keys = {override.partition("=")[0] for override in changed}
        kept = [override for override in LIKE_TRL if override.partition("=")[0] not in keys]
        other = simulate_training(point(*kept, *changed))
        assert other.validation_error is None and says in (other.validation or ""), changed
