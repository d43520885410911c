"""Sizes of a problem, and problems that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_bench.errors import RequestError
from sp_bench.plan import Problem
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, TENSORS, Kind, O, Q
from tests.support.problems import mask_of


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
        "out": 1440 * element,
        "do": 1440 * element,
        "odoq": 3 * 1440 * element + lse,
        "doq": 2 * 1440 * element + 2 * lse,
        "dq": 1440 * wire,
        "dkv": 2 * 480 * wire,
    }
    held = on_wire | {"o": 1440 * accumulator + lse, "dq": 1440 * accumulator, "dkv": 2 * 480 * accumulator}
    unsummed = on_wire | {"o": 1440 * element + lse, "dq": 1440 * element, "dkv": 2 * 480 * element}
    statistics = dict.fromkeys(on_wire, 0) | {"o": lse, "odoq": lse, "doq": 2 * lse}
    casts = dict.fromkeys(on_wire, False) | dict.fromkeys(("o", "dq", "dkv"), wire != accumulator)
    assert {*on_wire, *(f"{tensor}_h" for tensor in on_wire)} == {*TENSORS}
    for tensor in TENSORS.values():
        plain = tensor.by_tokens.name  # By heads, a chunk that no ranks share is the same.
        assert p.chunk_bytes(tensor, wire=True) == on_wire[plain]
        assert p.chunk_bytes(tensor, wire=False) == held[plain]
        assert p.mean_wire_bytes(tensor) == on_wire[plain]
        assert p.mean_wire_bytes(tensor, statistics=False) == on_wire[plain] - statistics[plain]
        assert p.needs_cast(tensor) == casts[plain]
        assert p.chunk_bytes(tensor, wire=False, summed=False) == unsummed[plain]
        assert p.chunk_bytes(tensor, wire=True, summed=False) == on_wire[plain]
        assert p.needs_cast(tensor, summed=False) == (unsummed[plain] != on_wire[plain])


@pytest.mark.parametrize(("degree", "kv_heads_each"), [(1, 2), (2, 1), (6, 1)])
def test_what_ranks_that_share_a_chunk_hold_by_heads(degree: int, kv_heads_each: int) -> None:
    """All tokens of the chunk and a share of the heads; of key heads at least one, so that all may weigh more."""
    p = problem(n=12, seqlen=96, layout=replace(LAYOUTS["striped"], head_parallel=degree))
    assert (p.queries.most, p.queries.largest, p.block_heads) == (8, 8 * degree, 6 // degree)
    (q,), (k, _), (_, lse) = Q.by_heads.fields, KV.by_heads.fields, O.by_heads.fields
    assert p.field_shape(q) == (3, 8 * degree, 6 // degree, 10)
    assert p.field_shape(k) == (3, 8 * degree, kv_heads_each, 10)
    assert p.field_shape(lse) == (3, 6 // degree, 8 * degree)
    assert p.field_shape(Q.fields[0]) == (3, 8, 6, 10), "its own tokens"
    for tensor in (Q, O, DO, ODOQ, DQ):
        assert p.chunk_bytes(tensor.by_heads, wire=True) == p.chunk_bytes(tensor, wire=True)
    for tensor in (KV, DKV):
        assert p.chunk_bytes(tensor.by_heads, wire=True) * 2 == p.chunk_bytes(tensor, wire=True) * max(2, degree)


def test_slices_of_heads() -> None:
    p = problem(head_slices=2)
    assert p.block_heads == 3
    assert [p.field_shape(tensor.fields[0]) for tensor in (Q, KV)] == [(3, 8, 3, 10), (3, 8, 1, 10)]
    for tensor in (Q, KV, O, ODOQ, DQ, DKV):
        assert 2 * p.chunk_bytes(tensor, wire=True) == problem().chunk_bytes(tensor, wire=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_seen_are_those_that_see_a_key(layout: str, causal: bool) -> None:
    """Only zigzag's second half of a chunk sees chunks above; rows are not left out where no row sees any."""
    p = problem(layout=LAYOUTS[layout], mask=mask_of(causal))
    pairs = {"below": (0, 1), "equal": (1, 1), "above": (1, 0)}
    rows = {name: p.blocks.rows_seen[p.blocks.of(i, j)] for name, (i, j) in pairs.items()}
    skips = causal and layout == "zigzag"
    assert rows == {"below": range(4 if skips else 0, 8), "equal": range(8), "above": range(8)}
    assert p.blocks.skips_queries == skips
    assert p.rows_seen(0, 1) == (4 if skips else 8)


def test_shapes() -> None:
    p = problem()
    (q,), (k, _), (_, lse) = Q.fields, KV.fields, O.fields
    assert p.queries.most == 8
    assert p.field_shape(q) == (3, 8, 6, 10)
    assert p.field_shape(k) == (3, 8, 2, 10)
    assert p.field_shape(lse) == (3, 6, 8)
    assert p.field_shape(q, 4) == (3, 4, 6, 10)
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
        ({"seqlen": 3}, "seqlen=3: .* for 4 ranks has at least a token in every chunk .*; seqlen=4 or more would work"),
        ({"layout": LAYOUTS["zigzag"], "seqlen": 7}, "seqlen=7: .* each of 2 pieces .*; seqlen=8 or more would"),
        (
            {"layout": replace(LAYOUTS["zigzag"], head_parallel=4), "seqlen": 3},
            "seqlen=3: .*; seqlen=4 or more would work",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        problem(**changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uneven_chunks(layout: str) -> None:
    """Buffers are as large as the largest chunk needs; the mean is what the closed forms count in."""
    p = problem(layout=LAYOUTS[layout], seqlen=33)
    owned = [int(p.queries.tokens(rank)) for rank in range(4)]
    assert sorted(owned) == [8, 8, 8, 9]
    assert (p.queries.most, p.queries.largest) == (9, 9)
    for tensor in TENSORS.values():
        by_owner = [
            sum(int(p.field_tokens(field, rank)) * p.token_bytes(field, wire=True) for field in tensor.fields)
            for rank in range(4)
        ]
        assert max(by_owner) == p.chunk_bytes(tensor, wire=True)
        assert sum(by_owner) == 4 * p.mean_wire_bytes(tensor)


def test_wire_dtype_defaults_to_the_compute_dtype() -> None:
    assert problem(dtype="float16").wire_dtype == "float16"
    assert problem(dtype="float64").accumulate_dtype == "float64"
    assert problem(dtype="float16").accumulate_dtype == "float32"
