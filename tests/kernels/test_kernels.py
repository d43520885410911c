"""Every block kernel that runs on this machine, and fakes of the others, against dense attention in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_bench.kernels import KERNELS, BlockKernel, fold_
from sp_bench.kernels.contract import Kind, empty_output, harmless
from sp_bench.kernels.reference import Reference
from sp_bench.plan.regions import RegionKind
from tests.kernels.cases import ON_CPU, Case, cases, one_dtype_cases
from tests.support.dense import HEADS, LSE_TOLERANCE, TOLERANCE, Block, attention, block_of, relative_error

SIZES = (1, 2, 5, 33, 64)

masks = pytest.mark.parametrize("mask", list(RegionKind), ids=lambda mask: mask.value)


def backward(
    kernel: BlockKernel, block: Block, out: Tensor, lse: Tensor, mask: RegionKind
) -> tuple[Tensor, Tensor, Tensor]:
    return kernel.backward(block.dout, block.q, block.k, block.v, out, lse, mask)


def assert_normal_form(out: Tensor, lse: Tensor, q: Tensor) -> None:
    """Results that every backend must return, however its library computes them."""
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse.is_contiguous() or lse.is_cpu)
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)


@cases
@masks
def test_block(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    """Forward, and backward with the block's own out and lse, MHA and GQA and MQA, odd sizes and one token."""
    for tokens, kv_heads in itertools.product(SIZES, (HEADS, 2, 1)):
        block = block_of(tokens, tokens, kv_heads, case.dtype, device=case.device)
        wanted = attention(block, mask)
        out, lse = kernel.forward(block.q, block.k, block.v, mask)
        which = f"{tokens} tokens, {kv_heads} kv_heads"
        assert_normal_form(out, lse, block.q)
        assert relative_error(out, wanted.out) <= TOLERANCE[case.dtype], which
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=0, atol=LSE_TOLERANCE[case.dtype], msg=which)
        gradients = backward(kernel, block, out, lse, mask)
        for operand, gradient, exact in zip(block[:3], gradients, wanted[2:], strict=True):
            assert gradient.shape == operand.shape and gradient.dtype == operand.dtype
            assert relative_error(gradient, exact) <= TOLERANCE[case.dtype], which


@cases
@masks
def test_values_may_be_narrower_than_keys(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    """Widths of 192 and 128, which some backends take as they are, and of widths that all pad."""
    for head_dim, v_head_dim in ((192, 128), (32, 16)):
        block = block_of(17, 17, 2, case.dtype, device=case.device, head_dim=head_dim, v_head_dim=v_head_dim)
        wanted = attention(block, mask)
        out, lse = kernel.forward(block.q, block.k, block.v, mask)
        assert out.shape == block.dout.shape
        assert relative_error(out, wanted.out) <= TOLERANCE[case.dtype]
        gradients = backward(kernel, block, out, lse, mask)
        for operand, gradient, exact in zip(block[:3], gradients, wanted[2:], strict=True):
            assert gradient.shape == operand.shape and gradient.dtype == operand.dtype
            assert relative_error(gradient, exact) <= TOLERANCE[case.dtype]


@cases
def test_full_blocks_need_not_be_square(kernel: BlockKernel, case: Case) -> None:
    for queries, keys in ((1, 9), (9, 1), (7, 40), (40, 7)):
        block = block_of(queries, keys, 2, case.dtype, device=case.device)
        wanted = attention(block, RegionKind.FULL)
        out, lse = kernel.forward(block.q, block.k, block.v, RegionKind.FULL)
        assert_normal_form(out, lse, block.q)
        assert relative_error(out, wanted.out) <= TOLERANCE[case.dtype]
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=0, atol=LSE_TOLERANCE[case.dtype])
        for gradient, exact in zip(backward(kernel, block, out, lse, RegionKind.FULL), wanted[2:], strict=True):
            assert relative_error(gradient, exact) <= TOLERANCE[case.dtype]


@one_dtype_cases
@pytest.mark.parametrize("mask", [RegionKind.CAUSAL, RegionKind.STRICT], ids=lambda mask: mask.value)
def test_masked_blocks_must_be_square(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    block = block_of(4, 6, 2, case.dtype, device=case.device)
    with pytest.raises(ValueError, match=f"4 queries and 6 keys: a {mask.value} block must be square"):
        kernel.forward(block.q, block.k, block.v, mask)
    out, lse = empty_output(block.q)
    with pytest.raises(ValueError, match="must be square"):
        backward(kernel, block, out, lse, mask)


@cases
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_blocks(kernel: BlockKernel, case: Case, queries: int, keys: int) -> None:
    for mask in RegionKind if queries == keys else (RegionKind.FULL,):
        block = block_of(queries, keys, 2, case.dtype, device=case.device)
        out, lse = kernel.forward(block.q, block.k, block.v, mask)
        assert_normal_form(out, lse, block.q)
        assert (out == 0).all() and (lse == -math.inf).all()
        for operand, gradient in zip(block[:3], backward(kernel, block, out, lse, mask), strict=True):
            assert gradient.shape == operand.shape and gradient.dtype == operand.dtype
            assert (gradient == 0).all()


@cases
def test_the_first_row_of_strict_saw_no_key(kernel: BlockKernel, case: Case) -> None:
    for tokens in SIZES:
        block = block_of(tokens, tokens, 2, case.dtype, device=case.device)
        out, lse = kernel.forward(block.q, block.k, block.v, RegionKind.STRICT)
        assert (out[:, 0] == 0).all() and (lse[:, :, 0] == -math.inf).all()
        assert torch.isfinite(lse[:, :, 1:]).all()
        dq, dk, dv = backward(kernel, block, out, lse, RegionKind.STRICT)
        assert (dq[:, 0] == 0).all() and (dk[:, -1] == 0).all() and (dv[:, -1] == 0).all()


@cases
@masks
def test_rows_that_saw_no_key_add_nothing_backward(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    """Their global lse is -inf; one of them must not turn the gradients of the others into NaN."""
    block = block_of(9, 9, 2, case.dtype, device=case.device)
    blind = torch.zeros(9, dtype=torch.bool, device=case.device)
    blind[[0, 4, 8]] = True
    wanted = attention(block._replace(dout=block.dout * ~blind[:, None, None]), mask)
    out, lse = kernel.forward(block.q, block.k, block.v, mask)
    out[:, blind], lse[:, :, blind] = 0, -math.inf
    for gradient, exact in zip(backward(kernel, block, out, lse, mask), wanted[2:], strict=True):
        assert relative_error(gradient, exact) <= TOLERANCE[case.dtype]
    everyone = torch.full_like(lse, -math.inf)
    for gradient in backward(kernel, block, torch.zeros_like(out), everyone, mask):
        assert (gradient == 0).all()


@pytest.mark.parametrize("name", ON_CPU)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 24), max_size=5), kv_heads=st.sampled_from([HEADS, 2, 1]), causal=st.booleans())
def test_blocks_fold_to_the_whole(name: str, cuts: list[int], kv_heads: int, causal: bool) -> None:
    """Keys in blocks of any size, empty ones too; backward adds up with the global out and lse."""
    kernel, block = KERNELS[name](), block_of(24, 24, kv_heads)
    wanted = attention(block, RegionKind.CAUSAL if causal else RegionKind.FULL)
    out, lse = empty_output(block.q)
    edges = [0, *sorted(cuts), 24]
    pieces = []
    for start, stop in zip(edges, edges[1:], strict=False):
        columns = slice(start, stop)
        # Causal: rows above the piece see none of it, rows below all, and in between it has a diagonal of its own.
        pieces += (
            [(slice(start, stop), columns, RegionKind.CAUSAL), (slice(stop, 24), columns, RegionKind.FULL)]
            if causal
            else [(slice(0, 24), columns, RegionKind.FULL)]
        )
    for rows, columns, mask in pieces:
        part = kernel.forward(block.q[:, rows], block.k[:, columns], block.v[:, columns], mask)
        fold_(out[:, rows], lse[:, :, rows], *part)
    assert relative_error(out, wanted.out) <= 1e-13
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=1e-13)
    sums = [torch.zeros_like(x) for x in block[:3]]
    for rows, columns, mask in pieces:
        inner = Block(block.q[:, rows], block.k[:, columns], block.v[:, columns], block.dout[:, rows])
        parts = backward(kernel, inner, out[:, rows], lse[:, :, rows], mask)
        for total, part, where in zip(sums, parts, (rows, columns, columns), strict=True):
            total[:, where] += part
    for total, exact in zip(sums, wanted[2:], strict=True):
        assert relative_error(total, exact) <= 1e-13


@cases
@pytest.mark.parametrize("mask", [RegionKind.CAUSAL, RegionKind.STRICT], ids=lambda mask: mask.value)
def test_striped_blocks_fold_to_causal_attention(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    """The masks as the layouts use them: even and odd tokens, whose blocks are CAUSAL and STRICT."""
    whole = block_of(18, 18, 2, case.dtype, device=case.device)
    wanted = attention(whole, RegionKind.CAUSAL)
    mine, other = (0, 1) if mask is RegionKind.STRICT else (1, 0)
    q, k, v = (x[:, mine::2] for x in whole[:3])
    out, lse = kernel.forward(q, k, v, RegionKind.CAUSAL)
    out = out.to(lse.dtype)
    fold_(out, lse, *kernel.forward(q, whole.k[:, other::2], whole.v[:, other::2], mask))
    assert relative_error(out, wanted.out[:, mine::2]) <= TOLERANCE[case.dtype]
    torch.testing.assert_close(lse.double(), wanted.lse[:, :, mine::2], rtol=0, atol=LSE_TOLERANCE[case.dtype])


def assert_strides_do_not_matter(kernel: BlockKernel, case: Case, mask: RegionKind, strided: Block) -> None:
    """`strided` holds the numbers of block_of(12, 12, 2) in another memory layout."""
    block = block_of(12, 12, 2, case.dtype, device=case.device)
    rtol, atol = (1e-5, 1e-6) if case.dtype == torch.float32 else (2e-2, 2e-2)
    assert torch.equal(strided.q, block.q) and not strided.q.is_contiguous()
    out, lse = kernel.forward(block.q, block.k, block.v, mask)
    wanted = (out, lse, *backward(kernel, block, out, lse, mask))
    strided_out, strided_lse = kernel.forward(strided.q, strided.k, strided.v, mask)
    assert strided_lse.is_contiguous() or strided_lse.is_cpu
    # Nor does the layout of the lse.
    tokens_first = lse.transpose(1, 2).contiguous().transpose(1, 2)
    got = (strided_out, strided_lse, *backward(kernel, strided, out, tokens_first, mask))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
    for operand, original in zip(strided, block, strict=True):
        assert torch.equal(operand, original), "a kernel must leave its operands as they are"


@one_dtype_cases
@masks
def test_tokens_heads_and_batch_may_have_any_strides(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    heads_first = (x.permute(2, 0, 1, 3).contiguous() for x in block_of(12, 12, 2, case.dtype, device=case.device))
    assert_strides_do_not_matter(kernel, case, mask, Block._make(x.permute(1, 2, 0, 3) for x in heads_first))


@one_dtype_cases
@masks
def test_head_dim_may_have_any_stride(kernel: BlockKernel, case: Case, mask: RegionKind) -> None:
    doubled = [x.repeat_interleave(2, dim=3) for x in block_of(12, 12, 2, case.dtype, device=case.device)]
    # What lies between must not be taken for the operand.
    for x in doubled:
        x[..., 1::2] = 7.0
    assert_strides_do_not_matter(kernel, case, mask, Block._make(x[..., ::2] for x in doubled))


@pytest.mark.parametrize("name", ON_CPU)
def test_large_scores_do_not_overflow(name: str) -> None:
    """Scores of several thousands: exp of any one is infinite in fp32."""
    block = block_of(16, 16, 2, torch.float32)
    block = block._replace(q=block.q * 1000)
    out, lse = KERNELS[name]().forward(block.q, block.k, block.v, RegionKind.CAUSAL)
    q64, k64, v64 = (x.double() for x in block[:3])
    exact_out, exact_lse = KERNELS["reference"]().forward(q64, k64, v64, RegionKind.CAUSAL)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert relative_error(lse, exact_lse) < 1e-5 and float(lse.abs().max()) > 1000
    assert relative_error(out, exact_out) < 1e-2


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "dims", "beneath"),
    [
        (RegionKind.FULL, 4, 6, (8, 8), True),
        (RegionKind.CAUSAL, 4, 4, (8, 8), True),
        (RegionKind.STRICT, 4, 4, (8, 8), False),
        (RegionKind.UPPER, 4, 4, (8, 8), False),
        (RegionKind.FULL, 4, 0, (8, 8), False),
        (RegionKind.FULL, 0, 4, (8, 8), False),
        (RegionKind.FULL, 4, 4, (8, 4), False),
    ],
)
def test_bound_calls_are_the_checked_ones(
    mask: RegionKind, queries: int, keys: int, dims: tuple[int, int], beneath: bool
) -> None:
    """In every bit. Only blocks that are one call of the backend, as they are, go past the checks."""
    kernel = PaddingReference()
    source = torch.Generator().manual_seed(1)
    q, dout, k, v = (
        torch.randn(1, tokens, 2, width, dtype=torch.float64, generator=source)
        for tokens, width in ((queries, dims[0]), (queries, dims[1]), (keys, dims[0]), (keys, dims[1]))
    )
    block = mask, queries, keys, dims
    forward, gradients = kernel.forward_of(*block), kernel.gradients_of(*block)
    assert [getattr(bound, "func", None) for bound in (forward, gradients)] == (
        [kernel._forward, kernel._backward] if beneath else [None, None]
    )
    out, lse = forward(q, k, v)
    for x, y in zip((out, lse), kernel.forward(q, k, v, mask), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(
        gradients(dout, q, k, v, out, harmless(lse)), kernel.backward(dout, q, k, v, out, lse, mask), strict=True
    ):
        assert torch.equal(x, y)


class PaddingReference(Reference):
    """A backend that takes no values narrower than keys."""

    narrow = frozenset()

    def pads(self, head_dim: int, value_dim: int) -> bool:
        return value_dim < head_dim


def test_a_bound_call_of_a_kernel_with_checks_of_its_own_has_them() -> None:
    class Watched(Reference):
        called = 0

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Kind) -> tuple[Tensor, Tensor]:
            self.called += 1
            return super().forward(q, k, v, mask)

    kernel, x = Watched(), torch.zeros(1, 2, 1, 4)
    kernel.forward_of(RegionKind.FULL, 2, 2, (4, 4))(x, x, x)
    assert kernel.called == 1


def test_a_causal_block_that_is_not_square_is_refused_by_its_bound_call() -> None:
    kernel, x = Reference(), torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="must be square"):
        kernel.forward_of(RegionKind.CAUSAL, 2, 1, (4, 4))(x, x[:, :1], x[:, :1])
