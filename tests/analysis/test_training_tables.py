"""Published training steps beside simulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import training_tables
from tests.support.sections import numbers, sections_of, table_of, words_of


def test_maxtexts_flops_are_those_of_its_printed_step(tmp_path: Path) -> None:
    """8.90 s at 239.4 TFLOP/s a chip on 64 chips, for 2M tokens."""
    row = training_tables.rows_of(training_tables.MAXTEXT)[0]
    record = Runs(tmp_path, workers=1).ask([training_tables.maxtext_step(row)])[0]
    assert (record.gpus, record.batch, record.sharded) == (16, 16, True)
    assert training_tables.maxtext_flops(record) * 64 * 2**15 == pytest.approx(8.90 * 239.4e12 * 64, rel=0.01)


def test_every_row_is_of_a_known_source() -> None:
    known = (training_tables.MAXTEXT, training_tables.PRIME, training_tables.UPIPE)
    assert {row["source"] for row in rows(training_tables.FILE)} == set(known)


@pytest.mark.exhaustive
def test_each_table_states_its_errors_and_the_notebook_runs(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "records")
    maxtext, prime_rl, upipe = sections_of("training_tables", runs)
    for row in (*table_of(maxtext).rows, *table_of(upipe).rows):
        published, simulated, off = numbers(row[-3:])
        assert off.known == pytest.approx(100 * (simulated.known / published.known - 1))
        assert simulated.kind in ("simulated", "computed")
    assert len(table_of(maxtext).rows) == 4 and len(table_of(prime_rl).rows) == 2
    assert "above the dense peak" in words_of(prime_rl)
    assert notebooks.execute("training_tables", tmp_path / "out", tmp_path / "records") == ""
