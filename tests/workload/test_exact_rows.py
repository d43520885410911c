"""Exact results of single rows are those of the reference kernel, and samples are bounded in time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.kernels.reference import exact
from sp_bench.plan.documents import Documents, Packed, Window
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, MASKS, Mask
from sp_bench.plan.problem import Problem
from sp_bench.workload import RankContext
from sp_bench.workload.attention_step import random_inputs
from sp_bench.workload.exact_rows import KEYS, ROWS, WORK, all_rows, errors_of_rows, sampled
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import TOLERANCE
from sp_bench.workload.seen import Seen
from tests.support.packs import packs
from tests.support.seen import seen

CPU = torch.device("cpu")
ALONE = RankContext(0, CPU, lambda plans, _: pytest.fail("no transport is needed"), alive=lambda: None)
MASKED: tuple[Mask, ...] = (*MASKS.values(), Documents((700, 1, 300, 199)), Window((1200,), True, 100, None))


def problem_of(mask: Mask, seqlen: int, **more: object) -> Problem:
    shape = {"n": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 2, "dtype": "float64"} | more
    return Problem(seqlen=seqlen, mask=mask, layout=LAYOUTS["contiguous"], **shape)  # pyright: ignore


@pytest.mark.parametrize("mask", MASKED, ids=lambda mask: mask.name)
@pytest.mark.parametrize("every", [True, False])
def test_rows_are_those_of_the_reference(mask: Mask, every: bool) -> None:
    """Each of out, dq, dk and dv; and one row of a head that is off is off by what it is off by."""
    problem = problem_of(mask, 1200)
    inputs = random_inputs(problem, 0, 3, CPU)
    results = dict(zip(NAMES, exact(*inputs, mask=mask), strict=True))
    sample = all_rows(problem, 0) if every else sampled(problem, 0, 3, "cpu")
    found = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)  # pyright: ignore
    assert tuple(found.overall) == NAMES and max(found.worst_head.values()) < 1e-13
    assert found.rows == ((2 * 4 * 1200, 2 * 2 * 1200) if every else (2 * 4 * ROWS, KEYS))
    entry, head = sample.key_units[0]
    for name in NAMES:
        wrong = results[name].clone()
        wrong[entry, int((sample.mine if name in ("dk", "dv") else sample.rows)[-1]), head] += 1.0
        errors = errors_of_rows(problem, ALONE, inputs, sample.of({**results, name: wrong}), sample)  # pyright: ignore
        assert [other for other in NAMES if errors.overall[other] > 1e-6] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_among_thousands_is_not_lost_unseen(name: str) -> None:
    """In bfloat16 the last row of a causal mask is less than what roundings make of all rows together."""
    problem = problem_of(CAUSAL, 2048, batch=1, heads=2, kv_heads=1, dtype="bfloat16")
    inputs = random_inputs(problem, 0, 3, CPU)
    wide = [x.double() for x in inputs]
    results = {key: x.bfloat16() for key, x in zip(NAMES, exact(*wide, mask=CAUSAL), strict=True)}
    sample = all_rows(problem, 0)
    right = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)  # pyright: ignore
    assert not right.wrong("bfloat16") and not any(right.lost.values())
    wrong = results[name].clone()
    wrong[:, -1] = 0.0
    found = errors_of_rows(problem, ALONE, inputs, sample.of({**results, name: wrong}), sample)  # pyright: ignore
    rows = 2 if name in ("out", "dq") else 1
    assert found.lost[name] == rows and f"{rows} rows of {name} are wrong" in found.wrong("bfloat16")


def test_the_heads_of_a_sample_are_those_of_many_ranks() -> None:
    """Ranks that split heads are each seen by some of theirs; which heads, differs from shape to shape."""
    shape = {"n": 8, "batch": 1, "heads": 32, "kv_heads": 32, "head_dim": 128}
    first = set()
    for seqlen in (2**20, 2**20 + 8, 2**20 + 16, 2**20 + 24):
        sample = sampled(problem_of(CAUSAL, seqlen, **shape), 0, 0, "cpu")
        heads = [head for _, head in sample.units]
        assert len(heads) == 8 and {head // 4 for head in heads} == {*range(8)}
        assert set(sample.key_units) <= set(sample.units)
        first.add((heads[0], sample.key_units))
    assert len(first) > 1


@given(st.sampled_from([*MASKS.values()]) | packs(), st.data())
def test_what_is_seen_is_the_masks_definition(mask: Mask, data: st.DataObject) -> None:
    seqlen = mask.seqlen if isinstance(mask, Packed) else data.draw(st.integers(1, 40))
    at = np.arange(seqlen)
    causal = at <= at[:, None]
    wanted = seen(mask) if isinstance(mask, Packed) else {"full": causal | True, "causal": causal}[mask.name]
    found, everything = Seen(mask, seqlen), torch.arange(seqlen)
    np.testing.assert_array_equal(found.of(everything, range(seqlen), CPU).numpy(), wanted)
    some = torch.tensor(sorted(data.draw(st.sets(st.integers(0, seqlen - 1), min_size=1))))
    np.testing.assert_array_equal(found.see_any(some).numpy(), wanted[:, some.numpy()].any(1))
    keys = found.range_of(some)
    assert wanted[some.numpy()].sum() == wanted[some.numpy(), keys.start : keys.stop].sum()
    np.testing.assert_array_equal(found.pairs_of_keys().numpy(), wanted.sum(1) @ wanted)


def test_keys_of_long_sequences_are_those_that_can_be_computed() -> None:
    """The last ones of a causal sequence, all of a window, none where all queries see all keys; queries always."""
    shape = {"n": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 1, "dtype": "bfloat16"}
    causal = sampled(problem_of(CAUSAL, 2**20, **shape), 7, 0, "cpu")
    assert 0 < len(causal.keys) < KEYS and int(causal.keys[-1]) == 2**20 - 1
    rows = 2**20 - int(causal.keys[0])
    assert 4 * 128 / 8 * rows * (2**20 - rows / 2) <= WORK["cpu"]
    assert set(causal.key_units) <= set(causal.units) and len(causal.rows) == ROWS
    window = sampled(problem_of(Window((2**20,), True, 64, None), 2**20, **shape), 0, 0, "cpu")
    assert len(window.keys) == KEYS
    full = sampled(problem_of(FULL, 2**20, **shape), 0, 0, "cpu")
    assert len(full.keys) == len(full.mine) == 0 and len(full.rows) == ROWS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seqlen", [2, 3, 64])
def test_torchs_own_attention_is_never_called_wrong(dtype: str, seqlen: int) -> None:
    """Not by a draw either: what cancellation leaves of a few tokens passes, and a wrong scale of it doesn't."""
    problem = replace(problem_of(CAUSAL, seqlen, kv_heads=1, batch=1), dtype=dtype)
    for seed in range(25):
        inputs = random_inputs(problem, 0, seed, CPU)
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3]]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(out, leaves, inputs[3].transpose(1, 2))
        results = {name: x.transpose(1, 2) for name, x in zip(NAMES, (out, *gradients), strict=True)}
        sample = all_rows(problem, 0)
        found = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)  # pyright: ignore
        assert not found.wrong(dtype), (seed, found)
        if seqlen == 64:
            assert all(found.limit(name, dtype) < 3 * TOLERANCE[dtype] for name in NAMES), "little cancels"
        spoiled = {name: x * 1.2 for name, x in results.items()}
        spoiled = errors_of_rows(problem, ALONE, inputs, sample.of(spoiled), sample)  # pyright: ignore
        assert all(name in spoiled.wrong(dtype) for name in NAMES if found.limit(name, dtype) < 0.1)
