"""The fused fold: in Triton's interpreter against the fold in torch and against fp64, and compiled for GPUs."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.host_stubs import TritonDriver, triton_stubbed
from sp_bench.kernels import fold
from sp_bench.kernels.contract import empty_output

pytest.importorskip("triton", reason="triton is made for Linux")
# numpy, in the interpreter, of -inf - -inf in the branch that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
MODULE = "sp_bench.kernels.fold_triton"
Part = tuple[Tensor, Tensor]
Shape = tuple[int, int, int, int]
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def imported(monkeypatch: pytest.MonkeyPatch, *, interpreted: bool) -> Any:
    """The module, read anew: triton decides at a kernel's definition whether it is interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


@pytest.fixture(scope="module")
def fused() -> Iterator[Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    """The fold, interpreted on CPU tensors."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield imported(monkeypatch, interpreted=True).fold_fused_
    sys.modules.pop(MODULE, None)


def a_part(seed: int, shape: Shape, dtype: torch.dtype, blind: float, spread: float = 1.0) -> Part:
    """Normal rows, of which a share saw no key."""
    source = torch.Generator().manual_seed(seed)
    out = torch.randn(shape, generator=source)
    lse = torch.randn(shape[0], shape[2], shape[1], generator=source) * spread
    saw_none = torch.rand(lse.shape, generator=source) < blind
    lse[saw_none] = -math.inf
    out[saw_none.transpose(1, 2)] = 0
    return out.to(dtype), lse


def in_fp64(out: Tensor, lse: Tensor, part: Part) -> Part:
    out, lse = out.double(), lse.double()
    fold.fold_unfused_(out, lse, part[0].double(), part[1].double())
    return out, lse


shapes = st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 3), st.sampled_from([1, 5, 8, 24, 64, 128]))


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(NARROW), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1.0, 30.0, 700.0]))
def test_it_is_the_fold(fused: Callable, shape: Shape, dtype: torch.dtype, blind: float, spread: float) -> None:
    """Odd sizes, rows without keys on either side, parts that outweigh the others by e^700; in place."""
    (out, lse), part = a_part(1, shape, torch.float32, blind, spread), a_part(2, shape, dtype, blind, spread)
    kept, where = [x.clone() for x in part], (out.data_ptr(), lse.data_ptr())
    # An lse of this size is known to so much, and so are weights.
    rounding = 1e-6 * max(1.0, spread)
    exact_out, exact_lse = in_fp64(out, lse, part)
    other_out, other_lse = out.clone(), lse.clone()
    fold.fold_unfused_(other_out, other_lse, *part)
    fused(out, lse, *part)
    assert (out.data_ptr(), lse.data_ptr()) == where
    assert all(torch.equal(x, y) for x, y in zip(part, kept, strict=True))
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=rounding)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(out, other_out, rtol=0, atol=2 * rounding)  # each is off by as much
    torch.testing.assert_close(lse, other_lse, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("held_saw", "part_saw"), [(True, False), (False, True), (False, False)])
def test_rows_without_keys_on_either_side(fused: Callable, dtype: torch.dtype, held_saw: bool, part_saw: bool) -> None:
    """A side that saw nothing leaves the other as it is, to the last bit."""
    shape = (2, 33, 3, 24)
    held = a_part(1, shape, torch.float32, blind=0.0 if held_saw else 1.0)
    part = a_part(2, shape, dtype, blind=0.0 if part_saw else 1.0)
    wanted = [x.clone() for x in (held if held_saw else part)]
    fused(*held, *part)
    assert torch.equal(held[0], wanted[0].float()) and torch.equal(held[1], wanted[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(fused: Callable, bad: float) -> None:
    """Only -inf means that a row saw no key; anything else must not vanish."""
    for side in (0, 1):
        sides = [a_part(seed, (1, 4, 1, 8), torch.float32, blind=0.0) for seed in (1, 2)]
        sides[side][1][0, 0, 2] = bad
        out, lse = expected = tuple(x.clone() for x in sides[0])
        fold.fold_unfused_(out, lse, *sides[1])
        fused(*sides[0], *sides[1])
        assert not sides[0][1][0, 0, 2].isfinite()
        for found, wanted in zip(sides[0], expected, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())
            torch.testing.assert_close(found, wanted, equal_nan=True)


def test_strides(fused: Callable) -> None:
    """Half a chunk of an accumulator, as zigzag folds it, and parts with heads first, some heads, a wider head_dim."""
    shape, rows = (2, 40, 3, 16), slice(17, 40)
    part = a_part(2, shape, torch.bfloat16, blind=0.2)
    views = {
        "heads first": part[0].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "some heads": torch.stack((part[0], part[0]), dim=2)[:, :, 0],
        "head_dim": part[0].repeat_interleave(2, dim=3)[..., ::2],
    }
    for name, view in views.items():
        assert torch.equal(view, part[0]) and not view.is_contiguous(), name
        (out, lse), (wanted_out, wanted_lse) = (a_part(1, shape, torch.float32, blind=0.2) for _ in range(2))
        untouched = out[:, :17].clone()
        fold.fold_unfused_(wanted_out[:, rows], wanted_lse[:, :, rows], part[0][:, rows], part[1][:, :, rows])
        fused(out[:, rows], lse[:, :, rows], view[:, rows], part[1][:, :, rows])
        torch.testing.assert_close(out, wanted_out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=3e-7)
        assert torch.equal(out[:, :17], untouched)


def test_64_narrow_parts(fused: Callable) -> None:
    """Only their own rounding shows, none of the accumulator's."""
    parts = [a_part(seed, (1, 5, 2, 8), torch.bfloat16, blind=0.1) for seed in range(64)]
    out, lse = empty_output(parts[0][0].float())
    exact_out, exact_lse = out.double(), lse.double()
    for part in parts:
        fused(out, lse, *part)
        fold.fold_unfused_(exact_out, exact_lse, part[0].double(), part[1].double())
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-5)


def test_no_rows_and_other_dtypes(fused: Callable) -> None:
    for shape in ((1, 0, 2, 8), (0, 3, 2, 8)):
        out, lse = empty_output(torch.zeros(shape))
        fused(out, lse, out.clone(), lse.clone())
    (out, lse), part = a_part(1, (1, 2, 1, 8), torch.float32, blind=0), a_part(2, (1, 2, 1, 8), torch.float32, blind=0)
    with pytest.raises(ValueError, match="the fused fold is for float32"):
        fused(out.double(), lse, *part)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: to machine code, in which rows are read and written 16 bytes at a time."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = imported(monkeypatch, interpreted=False)._fold_kernel
    monkeypatch.delitem(sys.modules, MODULE)
    constants = {"TOKENS": 32, "HEAD_DIM": 128, "out_d": 1, "part_d": 1, "lse_s": 1, "part_lse_s": 1}
    pointers = {"out": "*fp32", "lse": "*fp32", "part_out": "*bf16", "part_lse": "*fp32"}
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n not in constants}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
    assert compiled.asm["cubin"]
    # 32 rows of 512 bytes out and in, and of 256 in, for 128 threads.
    assert (compiled.asm["ptx"].count("ld.global.v4"), compiled.asm["ptx"].count("st.global.v4")) == (12, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = imported(monkeypatch, interpreted=False).fold_fused_
    for shape in ((2, 1, 3, 8), (1, 70, 2, 24), (1, 1000, 4, 64), (2, 4097, 3, 128), (1, 33, 2, 256)):
        held, part = a_part(1, shape, torch.float32, blind=0.2), a_part(2, shape, dtype, blind=0.2)
        exact = in_fp64(*held, part)
        found = [x.cuda() for x in held]
        fused(*found, *(x.cuda() for x in part))
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=2e-6)


def test_fold_takes_it_on_cuda_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that say they are on CUDA."""

    class OnCuda(Tensor):
        device = torch.device("cuda", 0)

    taken = []
    module = type(sys)(MODULE)
    module.fold_fused_ = lambda *_: taken.append("fused")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(fold, "fold_unfused_", lambda *_: taken.append("unfused"))
    monkeypatch.setattr(fold, "triton_fails", lambda device: "")
    fold._fused_on.cache_clear()
    held, part = (a_part(seed, (1, 2, 1, 8), torch.float32, blind=0) for seed in (1, 2))
    fold.fold_(*held, *part)
    fold.fold_(held[0].as_subclass(OnCuda), held[1], *part)
    fold.fold_(held[0].double().as_subclass(OnCuda), held[1].double(), *part)
    monkeypatch.setattr(fold, "_has_triton", lambda: False)
    fold._fused_on.cache_clear()
    fold.fold_(held[0].as_subclass(OnCuda), held[1], *part)
    fold._fused_on.cache_clear()
    assert taken == ["unfused", "fused", "unfused", "unfused"]


@pytest.fixture
def summed(fused: Callable) -> Callable[..., None]:
    """Sums and casts, interpreted on CPU tensors."""
    return vars(sys.modules[MODULE])["sums_fused_"]


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(NARROW), st.booleans(), st.integers(1, 4))
def test_sums_and_casts(fused: Callable, shape: Shape, dtype: torch.dtype, adds: bool, pairs: int) -> None:
    """Rounded once from the exact sum, of one tensor or of two, whose neighbours in memory stay as they are."""
    summed = vars(sys.modules[MODULE])["sums_fused_"]
    source = torch.Generator().manual_seed(sum(shape))
    holders = [torch.randn(shape[0], shape[1] + 2, *shape[2:], generator=source) for _ in range(pairs)]
    parts = [torch.randn(shape, generator=source).to(dtype) for _ in range(pairs)]
    before = [x.clone() for x in holders]
    into = [x[:, 1:-1] for x in holders]
    wanted = [part.double() + (x.double() if adds else 0.0) for x, part in zip(into, parts, strict=True)]
    summed(into, parts, added=2**pairs - 1 if adds else 0)
    for x, holder, exact, was in zip(into, holders, wanted, before, strict=True):
        assert torch.equal(x, exact.float())
        assert torch.equal(holder[:, :1], was[:, :1]) and torch.equal(holder[:, -1:], was[:, -1:])


def test_strided_slices_become_contiguous(summed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads first, as some kernels leave them, and every other head: cast and packed by one launch for a chunk."""
    monkeypatch.setattr(fold, "fused_on", lambda device: sys.modules[MODULE])
    x = torch.randn(2, 33, 4, 24).bfloat16()
    for view in (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), x.repeat_interleave(2, dim=2)[:, :, ::2]):
        assert torch.equal(view, x) and not view.is_contiguous()
        found = fold.packed_in((view, view), torch.float32)
        assert all(each.is_contiguous() and torch.equal(each, x.float()) for each in found)
    whole = (torch.zeros(2, 3),)
    assert fold.packed_in(whole, torch.float32) is whole


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from(NARROW), st.sampled_from([0.0, 0.5, 1.0]), st.integers(2, 4))
def test_several_folds_are_each_its_own(
    fused: Callable, shape: Shape, dtype: torch.dtype, blind: float, results: int
) -> None:
    """In every bit what one kernel for each gives, and near the exact fold, of parts of one result."""
    totals = [a_part(seed, shape, torch.float32, blind) for seed in range(results)]
    parts = [a_part(10 + seed, shape, dtype, blind) for seed in range(results)]
    whole_out, whole_lse = (torch.cat([part[i] for part in parts], dim=1 + i) for i in (0, 1))
    tokens = shape[1]
    cut = [(whole_out.narrow(1, i * tokens, tokens), whole_lse.narrow(2, i * tokens, tokens)) for i in range(results)]
    exact = [in_fp64(*total, part) for total, part in zip(totals, parts, strict=True)]
    one_by_one = [(out.clone(), lse.clone()) for out, lse in totals]
    for total, part in zip(one_by_one, cut, strict=True):
        fused(*total, *part)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fold, "fused_on", lambda device: sys.modules[MODULE])
        fold.fold_each_(totals, cut)
    for total, other, wanted in zip(totals, one_by_one, exact, strict=True):
        assert torch.equal(total[0], other[0]) and torch.equal(total[1], other[1])
        torch.testing.assert_close(total[0].double(), wanted[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(total[1].double(), wanted[1], rtol=2e-7, atol=2e-7)


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from(NARROW), st.sampled_from([0.0, 0.5, 1.0]), st.integers(2, 5), st.data())
def test_all_parts_but_one_are_merged(
    fused: Callable, shape: Shape, dtype: torch.dtype, blind: float, parts: int, data: st.DataObject
) -> None:
    """By one kernel as by one fold after another, whatever stands in the place that is left out."""
    own = data.draw(st.integers(0, parts - 1))
    each = [a_part(seed, shape, dtype, blind) for seed in range(parts)]
    outs, lses = (torch.stack([part[i] for part in each]) for i in (0, 1))
    outs[own], lses[own] = math.nan, math.nan
    results = [(torch.empty(shape, dtype=dtype), torch.empty(lses.shape[1:])) for _ in range(2)]
    fold.merge_(results[0], (outs, lses), own)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fold, "fused_on", lambda device: sys.modules[MODULE])
        fold.merge_(results[1], (outs, lses), own)
    torch.testing.assert_close(results[1][0].float(), results[0][0].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=2e-6, atol=2e-6)


def test_folds_that_differ_are_folded_one_by_one(fused: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[MODULE]
    monkeypatch.setattr(fold, "fused_on", lambda device: module)
    together, told = module.folds_fused_, list[bool]()
    monkeypatch.setattr(module, "folds_fused_", lambda *given: told.append(together(*given)) or told[-1])
    shapes_of = (1, 5, 2, 8), (1, 6, 2, 8)
    totals = [a_part(i, shape, torch.float32, 0.2) for i, shape in enumerate(shapes_of)]
    parts = [a_part(10 + i, shape, torch.bfloat16, 0.2) for i, shape in enumerate(shapes_of)]
    exact = [in_fp64(*total, part) for total, part in zip(totals, parts, strict=True)]
    fold.fold_each_(totals, parts)
    assert told == [False]
    for total, wanted in zip(totals, exact, strict=True):
        torch.testing.assert_close(total[0].double(), wanted[0], rtol=0, atol=2e-6)


def test_gradients_are_added_alike_with_and_without_triton(
    summed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit; two of different shapes by torch's operations."""
    source = torch.Generator().manual_seed(5)
    for shapes_of in (((1, 9, 2, 8),), ((1, 9, 2, 8),) * 2, ((1, 9, 2, 8), (1, 9, 1, 8)), ((2, 5, 1, 16),) * 3):
        parts = tuple(torch.randn(shape, generator=source).bfloat16() for shape in shapes_of)
        totals = tuple(torch.randn(shape, generator=source) for shape in shapes_of)
        others = tuple(x.clone() for x in totals)
        fold.add_(totals, parts)
        with monkeypatch.context() as patch:
            patch.setattr(fold, "fused_on", lambda device: sys.modules[MODULE])
            fold.add_(others, parts)
        assert all(map(torch.equal, totals, others))


def test_a_second_launch_is_what_triton_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, grid and arguments, for each alignment: only the hooks of profilers are left out."""
    imported(monkeypatch, interpreted=False)
    with triton_stubbed() as module:
        launched = TritonDriver.launched
        memory = torch.zeros(4096)

        def launch(offset: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
            out, lse = memory[offset:][: tokens * 16].view(1, tokens, 2, 8), torch.zeros(1, 2, tokens)
            module.fold_fused_(out, lse, out.to(dtype), lse)
            fold_given = launched[0]
            module.sums_fused_((out, out), (out.to(dtype),) * 2, added=0b11)
            sum_given = launched[0]
            module.folds_fused_(((out, lse), (out, lse)), ((out.to(dtype), lse),) * 2)
            return fold_given, sum_given, launched[0]

        for key in ((0, 5, torch.bfloat16), (1, 5, torch.bfloat16), (0, 16, torch.float32), (4, 1, torch.float16)):
            module._launches.clear()
            first, second = launch(*key), launch(*key)
            assert len(module._launches) == 3
            for one, other in zip(first, second, strict=True):
                assert [x is None for x in other].count(True) == 3
                assert all(_alike(a, b) for a, b in zip(one, other, strict=True) if b is not None)


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments of launches are the same, tensors in size and place in memory."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if not isinstance(one, Tensor):
        return one == other
    return (one.shape, one.stride(), one.dtype, one.data_ptr() % 16) == (
        other.shape, other.stride(), other.dtype, other.data_ptr() % 16,
    )  # fmt: skip


def test_bytes_of_a_fold() -> None:
    out, lse = torch.zeros(2, 5, 3, 64), torch.zeros(2, 3, 5)
    rows = lse.numel()
    assert fold.fold_bytes(out, lse, out.bfloat16()) == (10 * 64 + 12) * rows
    assert fold.fold_bytes(out, lse, out) == (12 * 64 + 12) * rows
