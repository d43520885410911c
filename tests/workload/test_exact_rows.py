"""Exact results of single rows are those of the reference kernel, and samples are bounded in time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sp_bench.kernels.reference import exact
from sp_bench.plan.documents import Documents, Packed, Window
from sp_bench.plan.layout import LAYOUTS, Positions
from sp_bench.plan.mask import CAUSAL, FULL, MASKS, Mask, WholeMask
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Regions
from sp_bench.workload import RankContext, exact_rows
from sp_bench.workload.attention_step import random_inputs
from sp_bench.workload.exact_rows import errors_of_rows
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import TOLERANCE
from sp_bench.workload.sampled_rows import KEYS, ROWS, all_rows, sampled
from sp_bench.workload.seen import Seen
from tests.support.packs import packs
from tests.support.seen import seen

CPU = torch.device("cpu")
ALONE = RankContext(0, CPU, lambda plans, _: pytest.fail("no transport is needed"), alive=lambda: None)
MASKED: dict[int, tuple[Mask, ...]] = {
    300: (*MASKS.values(), Documents((175, 1, 75, 49)), Window((300,), True, 25, None)),
    1200: (*MASKS.values(), Documents((700, 1, 300, 199)), Window((1200,), True, 100, None)),
}
"""Masks of sequences of which every row is compared, and of those of which a sample is."""


def problem_of(mask: Mask, seqlen: int, **more: object) -> Problem:
    shape: dict[str, Any] = {"n": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 2, "dtype": "float64"}
    return Problem(seqlen=seqlen, mask=mask, layout=LAYOUTS["contiguous"], **{**shape, **more})


@pytest.mark.parametrize(
    ("seqlen", "mask"),
    [pytest.param(n, mask, id=f"{n}-{mask.name}") for n, masks in MASKED.items() for mask in masks],
)
def test_rows_are_those_of_the_reference(seqlen: int, mask: Mask) -> None:
    """Each of out, dq, dk and dv; and one row of a head that is off is off by what it is off by."""
    problem, every = problem_of(mask, seqlen), seqlen == 300
    inputs = random_inputs(problem, 0, 3, CPU)
    results: dict[str, torch.Tensor] = dict(zip(NAMES, exact(*inputs, mask=mask), strict=True))
    sample = all_rows(problem, 0) if every else sampled(problem, 0, 3)
    found = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)
    assert tuple(found.overall) == NAMES and max(found.worst_head.values()) < 1e-13
    assert found.rows == ((2 * 4 * seqlen, 2 * 2 * seqlen) if every else (2 * 4 * ROWS, KEYS))
    entry, head = sample.key_units[0]
    for name in NAMES:
        wrong = results[name].clone()
        wrong[entry, int((sample.mine if name in ("dk", "dv") else sample.rows)[-1]), head] += 1.0
        errors = errors_of_rows(problem, ALONE, inputs, sample.of({**results, name: wrong}), sample)
        assert [other for other in NAMES if errors.overall[other] > 1e-6] == [name]


class Strict(WholeMask):
    """A query sees the keys before its own position: the first one sees none."""

    name = "strict"
    flops_share, causal, balanced = 0.5, True, ()

    def regions(self, q: Positions, kv: Positions) -> Regions:
        return CAUSAL.regions(q, tuple(range(run.start + 1, run.stop + 1, run.step) for run in kv))

    def relation(self, q_chunk: Any, kv_chunk: Any) -> Any:
        return CAUSAL.relation(q_chunk, kv_chunk)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_query_that_sees_no_key_is_right_as_zeros(dtype: str) -> None:
    problem = problem_of(Strict(), 64, dtype=dtype)
    inputs = random_inputs(problem, 0, 3, CPU)
    wide = [x.double() for x in inputs]
    results = {key: x.to(inputs[0]) for key, x in zip(NAMES, exact(*wide, mask=Strict()), strict=True)}
    sample = all_rows(problem, 0)
    found = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)
    assert not results["out"][:, 0].any() and not found.wrong(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_among_thousands_is_not_lost_unseen(name: str) -> None:
    """In bfloat16 the last row of a causal mask is less than what roundings make of all rows together."""
    problem = problem_of(CAUSAL, 2048, batch=1, heads=2, kv_heads=1, dtype="bfloat16")
    inputs = random_inputs(problem, 0, 3, CPU)
    wide = [x.double() for x in inputs]
    results = {key: x.bfloat16() for key, x in zip(NAMES, exact(*wide, mask=CAUSAL), strict=True)}
    sample = all_rows(problem, 0)
    right = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)
    assert not right.wrong("bfloat16") and not any(right.lost.values())
    wrong = results[name].clone()
    wrong[:, -1] = 0.0
    found = errors_of_rows(problem, ALONE, inputs, sample.of({**results, name: wrong}), sample)
    rows = 2 if name in ("out", "dq") else 1
    assert found.lost[name] == rows and f"{rows} rows of {name} are wrong" in found.wrong("bfloat16")


def test_the_heads_of_a_sample_are_those_of_many_ranks() -> None:
    """Ranks that split heads are each seen by some of theirs; which heads, differs from shape to shape."""
    shape = {"n": 8, "batch": 1, "heads": 32, "kv_heads": 32, "head_dim": 128}
    first = set()
    for seqlen in (2**20, 2**20 + 8, 2**20 + 16, 2**20 + 24):
        sample = sampled(problem_of(CAUSAL, seqlen, **shape), 0, 0)
        heads = [head for _, head in sample.units]
        assert len(heads) == 8 and {head // 4 for head in heads} == {*range(8)}
        assert set(sample.key_units) <= set(sample.units)
        first.add((heads[0], sample.key_units))
    assert len(first) > 1


@given(st.sampled_from([*MASKS.values()]) | packs(), st.data())
def test_what_is_seen_is_the_masks_definition(mask: Mask, data: st.DataObject) -> None:
    seqlen = mask.seqlen if isinstance(mask, Packed) else data.draw(st.integers(1, 40))
    kv_seqlen = seqlen if isinstance(mask, Packed) else data.draw(st.integers(seqlen if mask == CAUSAL else 1, 70))
    causal = np.arange(kv_seqlen) <= np.arange(kv_seqlen - seqlen, kv_seqlen)[:, None]
    wanted = seen(mask) if isinstance(mask, Packed) else {"full": causal | True, "causal": causal}[mask.name]
    found, everything = Seen(mask, seqlen, kv_seqlen), torch.arange(seqlen)
    np.testing.assert_array_equal(found.of(everything, torch.arange(kv_seqlen)).numpy(), wanted)
    some = torch.tensor(sorted(data.draw(st.sets(st.integers(0, kv_seqlen - 1), min_size=1))))
    np.testing.assert_array_equal(found.see_any(some).numpy(), wanted[:, some.numpy()].any(1))
    some = torch.tensor(sorted(data.draw(st.sets(st.integers(0, seqlen - 1), min_size=1))))
    keys = found.range_of(some)
    assert wanted[some.numpy()].sum() == wanted[some.numpy(), keys.start : keys.stop].sum()


@pytest.mark.parametrize("mask", [CAUSAL, FULL, Window((2**20,), True, 64, None)], ids=lambda mask: mask.name)
def test_keys_of_long_sequences_are_from_all_of_it(mask: Mask) -> None:
    """However many queries see them: also the first keys of a causal sequence, and those that every query sees."""
    shape = {"n": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 1, "dtype": "bfloat16"}
    sample = sampled(problem_of(mask, 2**20, **shape), 7, 0)
    parts = sample.keys // (2**20 // KEYS)
    assert parts.tolist() == [*range(KEYS)] and len(sample.mine) == KEYS // 8 and len(sample.rows) == ROWS
    assert set(sample.key_units) <= set(sample.units)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradients_that_are_wrong_for_early_keys_alone_are_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones are right, and in little memory: queries and keys go by in blocks. Others are off where they are."""
    monkeypatch.setattr(exact_rows, "BLOCK", {"cpu": 4096})
    monkeypatch.setattr(exact_rows, "HELD", 64)
    problem = problem_of(CAUSAL, 2048, batch=1, heads=2, kv_heads=1, dtype=dtype)
    inputs = random_inputs(problem, 0, 3, CPU)
    results = dict(zip(NAMES, exact(*(x.double() for x in inputs), mask=CAUSAL), strict=True))
    results = {name: x.to(inputs[0].dtype) for name, x in results.items()}
    sample = sampled(problem, 0, 3)
    right = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)
    assert not right.wrong(dtype) and right.rows == (2 * ROWS, KEYS)
    wrong = {**results, "dk": results["dk"].clone()}
    wrong["dk"][:, :64] *= 1.5
    found = errors_of_rows(problem, ALONE, inputs, sample.of(wrong), sample)
    assert "dk" in found.wrong(dtype) and found.lost["dk"] == 64 // (2048 // KEYS)


def test_a_sample_of_a_long_sequence_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in fp64 have no row for each token; where memory runs out all the same, no errors are said, but why."""
    problem = problem_of(CAUSAL, 2**14, batch=1, heads=1, kv_heads=1, head_dim=64, dtype="bfloat16")
    inputs = random_inputs(problem, 0, 3, CPU)
    sample = replace(sampled(problem, 0, 3), rows=torch.tensor([2**14 - 1]), keys=torch.tensor([2**14 - 1]))
    sample = replace(sample, mine=sample.keys)
    monkeypatch.setattr(exact_rows, "BLOCK", {"cpu": 2**18})
    found = sample.of({name: x[:, :, :1] for name, x in zip(NAMES, (inputs[0], *inputs[:3]), strict=True)})
    with Largest() as largest:
        errors_of_rows(problem, ALONE, inputs, found, sample)
    assert largest.elements[torch.float64] <= exact_rows.BLOCK["cpu"] == 2**18

    def no_memory(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(exact_rows, "_rows", no_memory)
    errors = errors_of_rows(problem, ALONE, inputs, found, sample)
    assert errors.uncompared == "memory ran out on 1 of 1 ranks" and not errors.overall and errors.rows is None


class Largest(TorchDispatchMode):
    """Keeps the elements of the largest tensor of each dtype that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements[x.dtype] = max(self.elements[x.dtype], x.numel())
        return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seqlen", [2, 3, 64])
def test_torchs_own_attention_is_never_called_wrong(dtype: str, seqlen: int) -> None:
    """Not by a draw either: what cancellation leaves of a few tokens passes, and a wrong scale of it doesn't."""
    problem = replace(problem_of(CAUSAL, seqlen, kv_heads=1, batch=1), dtype=dtype)
    for seed in range(25):
        inputs = random_inputs(problem, 0, seed, CPU)
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3]]
        q, k, v = leaves
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(out, leaves, inputs[3].transpose(1, 2))
        results = {name: x.transpose(1, 2) for name, x in zip(NAMES, (out, *gradients), strict=True)}
        sample = all_rows(problem, 0)
        found = errors_of_rows(problem, ALONE, inputs, sample.of(results), sample)
        assert not found.wrong(dtype), (seed, found)
        if seqlen == 64:
            assert all(found.limit(name, dtype) < 3 * TOLERANCE[dtype] for name in NAMES), "little cancels"
        spoiled = {name: x * 1.2 for name, x in results.items()}
        spoiled = errors_of_rows(problem, ALONE, inputs, sample.of(spoiled), sample)
        assert all(name in spoiled.wrong(dtype) for name in NAMES if found.limit(name, dtype) < 0.1)
