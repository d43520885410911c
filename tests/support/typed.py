"""Values that a test relies on, by the types that they have there: where one is missing or another, the test fails.

Fields of a record are optional, since no point has all of them. `Known` reads those that a test's point has.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sp_bench.records import Record

T = TypeVar("T")


def of_kind(kind: type[T], value: object) -> T:
    """`value`, which is a `kind`."""
    assert isinstance(value, kind), f"{value!r} is no {kind.__name__}"
    return value


def there(value: T | None) -> T:
    """`value`, which isn't None."""
    assert value is not None
    return value


class Known:
    """The fields of a record that are known. The test fails that reads another, and says which.

    Fields that aren't declared here are numbers, which a test compares and computes with.
    """

    alone_ranks: list[int]
    bound_by: str
    candidates: list[dict[str, Any]]
    chunk_ms: list[float]
    clocks_held_down: list[str]
    cluster: str
    comm_bytes_by_lane: dict[str, float]
    comm_bytes_by_link: dict[str, float]
    config: dict[str, Any]
    device_name: str
    dtype: str
    error: str
    impl: str
    implementation: str
    kernel: str
    layout: str
    linears: str
    losses: list[float]
    mask: str
    method: str
    mode: str
    model: str
    notes: list[str]
    peak_mem_source: str
    phase: str
    provenance: dict[str, Any]
    recompute: str
    run_id: str
    source: str
    status: str
    stragglers: dict[str, Any]
    text: str
    transport: str
    validation: str
    validation_kind: dict[str, str]
    variant: str
    window: list[int | None]
    wire_dtype: str
    workload: str
    workload_id: str

    def __init__(self, record: Record) -> None:
        self.record = record
        """The record itself, of which fields may be None."""

    def __getattr__(self, name: str) -> float:
        value = getattr(self.record, name)
        assert value is not None, f"{name} isn't known: {self.record.status}, {self.record.error}"
        return value
