"""What a record says of measured times."""

from __future__ import annotations

import pytest

from sp_bench.point.timed import exposed
from sp_bench.records.quantities import Breakdown


def test_communication_is_exposed_for_no_less_than_no_time() -> None:
    """On overloaded cores blocks alone may take longer than the step. The record says so in a note."""
    alone = Breakdown(compute_ms=7.0, compute_only_ms_median=9.0)
    assert exposed(alone, 10.5) == (Breakdown(compute_ms=7.0, compute_only_ms_median=9.0, exposed_comm_ms=1.5), [])
    found, (note,) = exposed(alone, 8.75)
    assert found.exposed_comm_ms == 0
    assert note.startswith("exposed_comm_ms is 0: the step took 0.25 ms less than its blocks alone")
    assert exposed(Breakdown(compute_ms=7.0), 8.0)[0].exposed_comm_ms == pytest.approx(1)
    assert exposed(Breakdown(), 8.0) == (Breakdown(), [])
