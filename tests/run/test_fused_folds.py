"""Executions whose folds and sums are those of GPUs: several results at once, casts in them, rows that are cut once.

What a kernel of kernels/fold_triton.py does is done here by torch's operations, on devices that work behind the caller;
tests/kernels/test_fold_triton.py has the kernels themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sp_bench.kernels import fold
from sp_bench.plan.layout import LAYOUTS
from sp_bench.run.partials import Partials, Sums
from tests.run.executions import CPU, fitting, small
from tests.support.problems import all_methods, of_each_name

Pair = tuple[Tensor, Tensor]


class Fused:
    """The functions of kernels/fold_triton.py, and how many results each launch has had."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def fold_fused_(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        assert out.dtype == lse.dtype == part_lse.dtype == torch.float32
        self.launches.append(1)
        fold.fold_unfused_(out, lse, part_out, part_lse)

    def folds_fused_(self, totals: Sequence[Pair], parts: Sequence[Pair]) -> bool:
        if not all(alike(x) for pairs in (totals, parts) for x in zip(*pairs, strict=True)):
            return False
        self.launches.append(len(totals))
        for total, part in zip(totals, parts, strict=True):
            fold.fold_unfused_(*total, *part)
        return True

    def sums_fused_(self, into: Sequence[Tensor], parts: Sequence[Tensor], *, added: int, first: int = 0) -> bool:
        if not (alike(into) and alike(parts)):
            return False
        assert into[0].dtype == torch.float32
        self.launches.append(len(into))
        for i, (x, part) in enumerate(zip(into, parts, strict=True)):
            if not added >> i & 1:
                x.zero_()
            x.narrow(1, first, part.shape[1]).add_(part)
        return True

    def merge_fused_(self, into: Pair, parts: Pair, own: int) -> None:
        (out, lse), (outs, lses) = into, parts
        others = [number for number in range(len(outs)) if number != own]
        total, total_lse = outs[others[0]].to(torch.float32, copy=True), lses[others[0]].clone()
        for number in others[1:]:
            fold.fold_unfused_(total, total_lse, outs[number], lses[number])
        out.copy_(total)
        lse.copy_(total_lse)


def alike(tensors: Sequence[Tensor]) -> bool:
    return len({(x.shape, x.dtype, x.stride()) for x in tensors}) == 1


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    found = Fused()
    monkeypatch.setattr(fold, "fused_on", lambda device: found)
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_method_is_exact(n: int, causal: bool, fused: Fused) -> None:
    """From one to the next another layout, dtype and order of the devices' work."""
    kinds = itertools.cycle([("bfloat16", ""), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "")])
    layouts = itertools.cycle(["zigzag", "striped", "zigzag", "contiguous"])
    for order, method in enumerate(of_each_name(all_methods(small(n, causal=causal)), turn=n + causal)):
        dtype, wire = next(kinds)
        problem = replace(small(n, causal=causal, layout=next(layouts), dtype=dtype, wire=wire), seqlen=4 * n)
        execution = replace(fitting(method, problem), order=order)
        assert execution.wrong() == "", execution
    assert max(fused.launches) > 1, "some had several results"


@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_gradients_of_a_block_are_one_launch(keys_first: bool, strided: bool, fused: Fused) -> None:
    """Those that are added and those that are the first, cast or made contiguous; the sums are exact."""
    problem = replace(small(2, causal=False, dtype="bfloat16"), kv_heads=4)
    sums = Sums(problem, 0, CPU)
    plan = fitting(of_each_name(all_methods(problem), turn=0)[0], problem).plans["backward"]
    dq, dkv = (next(c for op in plan.ops for c in op.writes if c.tensor.name == name) for name in ("dq", "dkv"))
    shape = sums.of(dq).shapes[0]
    assert sums.of(dkv).shapes == (shape, shape)
    partials, blocks = Partials(sums), [[_normal(shape, strided) for _ in range(3)] for _ in range(3)]
    if keys_first:
        partials.add_gradients(sums.of(dkv), tuple(blocks[2][1:]))
        fused.launches.clear()
    for q, k, v in blocks[:2]:
        partials.add_block_gradients(q, sums.of(dq), (k, v), sums.of(dkv))
    assert fused.launches == [3, 3]
    wanted = [x.double() + y.double() for x, y in zip(*blocks[:2], strict=True)]
    if keys_first:
        wanted = [wanted[0], *(x + y.double() for x, y in zip(wanted[1:], blocks[2][1:], strict=True))]
    found = (*partials.get(dq), *partials.get(dkv))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.float32 and x.is_contiguous()
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-6)


def _normal(shape: tuple[int, ...], strided: bool) -> Tensor:
    batch, tokens, heads, width = shape
    x = torch.randn(batch, heads, tokens, width) if strided else torch.randn(shape)
    return (x.transpose(1, 2) if strided else x).bfloat16()


def test_rows_of_a_sum_that_was_sent_are_not_kept(fused: Fused) -> None:
    """A view that is kept would keep the memory, and be of another sum once the chunk is begun anew."""
    problem = replace(small(2, causal=False, layout=sorted(LAYOUTS)[0], dtype="bfloat16"), seqlen=8)
    sums = Sums(problem, 0, CPU)
    plan = fitting(of_each_name(all_methods(problem), turn=0)[0], problem).plans["forward"]
    o = next(c for op in plan.ops for c in op.writes if c.tensor.name == "o")
    half, partials = sums.at(o, range(2, 4)), Partials(sums)
    shape = sums.of(o).shapes[0]
    found = []
    for _ in range(2):
        part = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape[0], shape[2], shape[1])
        partials.add_output(sums.of(o), *part)
        partials.add_output(half, *(x.narrow(dim, 2, 2) for x, dim in zip(part, (1, 2), strict=True)))
        assert partials._cuts
        dropped = partials.drop(o)
        assert dropped is not None and not partials._cuts
        found.append(dropped)
    for out, lse in found:
        assert torch.equal(out, torch.ones(shape))
        torch.testing.assert_close(lse[..., 2:].exp(), torch.full_like(lse[..., 2:], 2.0))
        assert torch.equal(lse[..., :2], torch.zeros_like(lse[..., :2]))


def test_gradients_that_differ_have_launches_of_their_own(fused: Fused) -> None:
    """With fewer key heads, as Llama has them, and with one that lies in memory in another order. Sums that nothing is
    added to stay as they came.
    """
    problem = replace(small(2, causal=False, dtype="bfloat16"), kv_heads=2)
    plan = fitting(of_each_name(all_methods(problem), turn=0)[0], problem).plans["backward"]
    dq, dkv = (next(c for op in plan.ops for c in op.writes if c.tensor.name == name) for name in ("dq", "dkv"))
    for kv_heads, strided, unsummed, launches in (
        (2, False, (), [1, 2]),
        (4, True, (), [1] * 3),
        (4, False, (dkv,), [1]),
    ):
        sums = Sums(replace(problem, kv_heads=kv_heads), 0, CPU, unsummed)
        of_q, of_kv = sums.of(dq), sums.of(dkv)
        q, k, v = _normal(of_q.shapes[0], strided), *(_normal(shape, False) for shape in of_kv.shapes)
        partials = Partials(sums)
        fused.launches.clear()
        partials.add_block_gradients(q, of_q, (k, v), of_kv)
        assert fused.launches == launches
        for x, y in zip((*partials.get(dq), *partials.get(dkv)), (q, k, v), strict=True):
            assert torch.equal(x.float(), y.float()) and x.is_contiguous()
        assert partials.get(dkv)[0].dtype is (torch.bfloat16 if unsummed else torch.float32)
