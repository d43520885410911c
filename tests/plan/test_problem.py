"""What a problem weighs, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sp_bench.errors import RequestError
from sp_bench.plan import FIELDS, LAYOUTS, Kind, Part, Problem


def problem(**changes: Any) -> Problem:
    defaults: dict[str, Any] = {"n": 4, "seqlen": 32, "heads": 6, "kv_heads": 2, "head_dim": 10, "batch": 3}
    defaults["layout"] = LAYOUTS["striped"]
    return Problem(**(defaults | changes))


# 3 * 8 * 6 * 10 = 1440 elements of a Q chunk, 480 of a K chunk, 3 * 6 * 8 = 144 rows.
@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "element", "wire", "accumulator"),
    [
        ("bfloat16", "", 2, 2, 4),
        ("float16", "", 2, 2, 4),
        ("bfloat16", "float32", 2, 4, 4),
        ("float32", "", 4, 4, 4),
        ("float32", "bfloat16", 4, 2, 4),
        ("float64", "", 8, 8, 8),
    ],
)
def test_chunk_bytes(dtype: str, wire_dtype: str, element: int, wire: int, accumulator: int) -> None:
    p = problem(dtype=dtype, wire_dtype=wire_dtype)
    lse = 144 * accumulator
    on_wire = {
        "q": 1440 * element,
        "kv": 2 * 480 * element,
        "o": 1440 * wire + lse,
        "odoq": 3 * 1440 * element + lse,
        "dq": 1440 * wire,
        "dkv": 2 * 480 * wire,
    }
    held = on_wire | {"o": 1440 * accumulator + lse, "dq": 1440 * accumulator, "dkv": 2 * 480 * accumulator}
    assert {tensor: p.chunk_bytes(tensor, wire=True) for tensor in FIELDS} == on_wire
    assert {tensor: p.chunk_bytes(tensor, wire=False) for tensor in FIELDS} == held
    statistics = dict.fromkeys(FIELDS, 0) | {"o": lse, "odoq": lse}
    assert {tensor: p.wire_statistic_bytes(tensor) for tensor in FIELDS} == statistics
    casts = dict.fromkeys(FIELDS, False) | dict.fromkeys(("o", "dq", "dkv"), wire != accumulator)
    assert {tensor: p.needs_cast(tensor) for tensor in FIELDS} == casts


def test_shapes() -> None:
    p = problem()
    (q,), (k, _), (_, lse) = FIELDS["q"], FIELDS["kv"], FIELDS["o"]
    assert p.local_seqlen == 8
    assert p.field_shape(q) == (3, 8, 6, 10)
    assert p.field_shape(k) == (3, 8, 2, 10)
    assert p.field_shape(lse) == (3, 6, 8)
    assert p.field_shape(q, Part.FIRST) == (3, 4, 6, 10)
    assert p.kv_ratio == pytest.approx(1 / 3)
    assert lse.kind is Kind.STATISTIC


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "gpus=0: must be at least 1; gpus=1 would work"),
        ({"seqlen": 0}, "seqlen=0: must be at least 1"),
        ({"heads": -1}, "heads=-1: must be at least 1"),
        ({"kv_heads": 0}, "kv_heads=0: must be at least 1"),
        ({"head_dim": 0}, "head_dim=0: must be at least 1"),
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"kv_heads": 4}, "kv_heads=4: must divide heads=6 .*; one of 1, 2, 3, 6 would work"),
        ({"kv_heads": 12}, "kv_heads=12: must divide heads=6"),
        ({"dtype": "bfloat"}, "dtype=bfloat: there is no such dtype; did you mean bfloat16"),
        ({"wire_dtype": "float8"}, "wire_dtype=float8: there is no such wire_dtype; did you mean float"),
        ({"seqlen": 30}, "seqlen=30: .* 4 must divide it; seqlen=28 or 32 would work"),
        ({"layout": LAYOUTS["zigzag"], "seqlen": 36}, "seqlen=36: .* 8 must divide it; seqlen=32 or 40 would work"),
        ({"seqlen": 3}, "seqlen=3: .*; seqlen=4 would work"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        problem(**changes)


def test_wire_dtype_defaults_to_the_compute_dtype() -> None:
    assert problem(dtype="float16").wire_dtype == "float16"
    assert problem(dtype="float64").accumulate_dtype == "float64"
    assert problem(dtype="float16").accumulate_dtype == "float32"
