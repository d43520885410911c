"""Folding partial outputs by their lse."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sp_bench.kernels import fold, fold_
from sp_bench.kernels.contract import empty_output

Part = tuple[Tensor, Tensor]
B, S, H, D = 2, 5, 3, 4


def a_part(seed: int, dtype: torch.dtype = torch.float64, blind: float = 0.0, spread: float = 1.0) -> Part:
    """A partial output of which a share of rows saw no key."""
    source = torch.Generator().manual_seed(seed)
    out = torch.randn(B, S, H, D, generator=source, dtype=torch.float64)
    lse = torch.randn(B, H, S, generator=source, dtype=torch.float64) * spread
    saw_none = torch.rand(B, H, S, generator=source) < blind
    lse[saw_none] = -math.inf
    out[saw_none.transpose(1, 2)] = 0
    return out.to(dtype), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def folded(parts: list[Part]) -> Part:
    out, lse = empty_output(parts[0][0])
    for part in parts:
        fold_(out, lse, *part)
    return out, lse


def by_definition(parts: list[Part]) -> Part:
    """All parts at once: weights exp(lse) over their sum."""
    lse = torch.stack([part_lse.double() for _, part_lse in parts]).logsumexp(dim=0)
    weights = [torch.exp(part_lse.double() - lse).nan_to_num(0.0) for _, part_lse in parts]
    outs = [out.double() * w.transpose(1, 2)[..., None] for w, (out, _) in zip(weights, parts, strict=True)]
    return torch.stack(outs).sum(dim=0), lse


def assert_close(got: Part, wanted: Part, tolerance: float) -> None:
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=8, unique=True),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1.0, 30.0, 700.0]),
)
def test_fold_is_the_softmax_over_all_keys(seeds: list[int], blind: float, spread: float) -> None:
    """Also where some rows or all saw no key, and where one part outweighs the others by e^700."""
    parts = [a_part(seed, blind=blind, spread=spread) for seed in seeds]
    rounding_of_an_lse = torch.finfo(torch.float64).eps * max(1.0, 4 * spread)
    assert_close(folded(parts), by_definition(parts), 8 * len(parts) * rounding_of_an_lse)


@given(st.permutations(range(6)), st.sampled_from([torch.float32, torch.float64]))
def test_order_changes_no_more_than_rounding(order: list[int], dtype: torch.dtype) -> None:
    parts = [a_part(seed, dtype, blind=0.3) for seed in range(6)]
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    assert_close(folded([parts[i] for i in order]), folded(parts), tolerance)


@given(st.integers(1, 5))
def test_grouping_changes_no_more_than_rounding(cut: int) -> None:
    """A ring folds partials of partials."""
    parts = [a_part(seed, blind=0.3) for seed in range(6)]
    assert_close(folded([folded(parts[:cut]), folded(parts[cut:])]), folded(parts), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("held_saw", "part_saw"), [(True, False), (False, True), (False, False)])
def test_rows_without_keys_on_either_side(dtype: torch.dtype, held_saw: bool, part_saw: bool) -> None:
    """A side that saw nothing leaves the other as it is, to the last bit."""
    held, part = (a_part(seed, dtype, blind=0.0 if saw else 1.0) for seed, saw in ((1, held_saw), (2, part_saw)))
    wanted = [x.clone() for x in (held if held_saw else part)]
    fold_(*held, *part)
    assert torch.equal(held[0], wanted[0]) and torch.equal(held[1], wanted[1])
    assert not torch.isnan(held[0]).any() and not torch.isnan(held[1]).any()


def test_fold_is_in_place_and_leaves_the_part_alone() -> None:
    (out, lse), part = a_part(1), a_part(2)
    kept = [x.clone() for x in part]
    where = (out.data_ptr(), lse.data_ptr())
    fold_(out, lse, *part)
    assert (out.data_ptr(), lse.data_ptr()) == where
    assert_close((out, lse), by_definition([a_part(1), a_part(2)]), 1e-13)
    assert all(torch.equal(x, y) for x, y in zip(part, kept, strict=True))


@pytest.mark.parametrize("lie", list(itertools.product([False, True], repeat=2)))
def test_an_lse_may_lie_tokens_first(lie: tuple[bool, bool]) -> None:
    """As the kernel of CPUs leaves it; of the accumulator, of the part or of both."""
    (out, lse), (part_out, part_lse) = a_part(1, blind=0.3), a_part(2, blind=0.3)
    lse, part_lse = (
        x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x
        for x, tokens_first in zip((lse, part_lse), lie, strict=True)
    )
    fold_(out, lse, part_out, part_lse)
    assert lse.is_contiguous() != lie[0]
    assert_close((out, lse), by_definition([a_part(1, blind=0.3), a_part(2, blind=0.3)]), 1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_lse_that_is_not_finite_shows(bad: float) -> None:
    """In the output of its row, and in no other."""
    (out, lse), (part_out, part_lse) = a_part(1), a_part(2)
    part_lse[0, 1, 2] = bad
    fold_(out, lse, part_out, part_lse)
    wanted = torch.zeros(B, S, H, D, dtype=torch.bool)
    wanted[0, 2, 1] = True
    assert torch.equal(out.isnan(), wanted)


def test_fold_into_some_rows_of_an_accumulator() -> None:
    """Half a chunk, as zigzag folds it: a view that is not contiguous, and the other rows stay."""
    (out, lse), (part_out, part_lse) = a_part(1), a_part(2)
    rows = slice(2, S)
    fold_(out[:, rows], lse[:, :, rows], part_out[:, rows], part_lse[:, :, rows].contiguous())
    whole = by_definition([a_part(1), a_part(2)])
    assert_close((out[:, rows], lse[:, :, rows]), (whole[0][:, rows], whole[1][:, :, rows]), 1e-13)
    assert torch.equal(out[:, :2], a_part(1)[0][:, :2]) and torch.equal(lse[:, :, :2], a_part(1)[1][:, :, :2])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_parts_into_an_fp32_accumulator(narrow: torch.dtype) -> None:
    """64 of them: only their own rounding shows, none of the accumulator's."""
    parts = [a_part(seed, narrow) for seed in range(64)]
    out, lse = empty_output(parts[0][0].float())
    for part in parts:
        fold_(out, lse, *part)
    assert out.dtype == lse.dtype == torch.float32
    assert_close((out, lse), by_definition(parts), 2e-5)


@pytest.mark.parametrize("broken", ["", "it can't compile", "its second launch is another's"])
def test_triton_is_tried_by_compiling_once(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations fold where Triton is installed and can't compile, or is wrong, and it says so once."""
    tried = []

    def fused(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
        tried.append(part_out.dtype)
        if broken == "it can't compile":
            raise RuntimeError("ptxas fatal: value 'sm_121a' is not defined for option 'gpu-name'")
        if not broken or len(tried) == 1:
            fold.fold_unfused_(out, lse, part_out, part_lse)

    def summed(into: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], *, added: int) -> bool:
        for x, part in zip(into, parts, strict=True):
            x.add_(part)
        return True

    def folded(totals: Sequence[Part], parts: Sequence[Part]) -> bool:
        for total, part in zip(totals, parts, strict=True):
            fold.fold_unfused_(*total, *part)
        return True

    def merged(into: Part, parts: Part, own: int) -> None:
        fold.merge_(into, parts, own)

    module = ModuleType("sp_bench.kernels.fold_triton")
    vars(module).update(fold_fused_=fused, folds_fused_=folded, sums_fused_=summed, merge_fused_=merged)
    monkeypatch.setitem(sys.modules, "sp_bench.kernels.fold_triton", module)
    fold.triton_fails.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [bool(fold.triton_fails(torch.device("cpu"))) for _ in range(2)] == [bool(broken)] * 2
    fold.triton_fails.cache_clear()
    assert tried == [torch.bfloat16] * (1 if broken == "it can't compile" else 2)
    assert [str(warning.message)[:34] for warning in said] == ["triton can't compile the fold, whi"] * bool(broken)
