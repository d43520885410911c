"""The O that is put in the place of the one that was not sent has its row sums, and gives its gradients."""

from __future__ import annotations

import pytest
import torch

from sp_bench.kernels import KERNELS
from sp_bench.kernels.row_sums import projection, row_sums
from sp_bench.plan.regions import RegionKind

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    return [(scale * torch.randn(2, 32, 4, 16, generator=source, dtype=torch.float64)).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_sums_stay(dtype: torch.dtype, scale: float) -> None:
    """Also of gradients whose squares are 0 in fp32; relative to delta itself, which cancels in no term."""
    out, (dout, *_) = drawn(dtype)[0], drawn(dtype, scale)[1:]
    delta = row_sums(out, dout)
    assert delta.shape == (2, 4, 32) and delta.is_contiguous()
    put_back = projection(dout, delta)
    assert put_back.shape == dout.shape and put_back.dtype == dout.dtype
    if dtype is torch.float16 and scale < 1e-3:
        assert not dout.any() and not put_back.any(), "too small for the dtype"
        return
    again = (put_back.double() * dout.double()).sum(-1).transpose(1, 2)
    exact = torch.finfo(dtype).eps
    rounding = exact if dtype.itemsize == 2 else 32 * exact
    """Row sums of O that is put back; of sums in fp32 or fp64."""
    assert ((again - delta.double()).abs() <= rounding * delta.abs()).all()
    lengths = [x.double().square().sum(-1) for x in (put_back, out)]
    assert (lengths[0] <= lengths[1] * (1 + 32 * exact)).all(), "no row is longer than that of O"


def test_rows_without_a_gradient_are_zero() -> None:
    out, dout, *_ = drawn(torch.float32)
    dout[:, 3] = 0
    put_back = projection(dout, row_sums(out, dout))
    assert not put_back[:, 3].any() and put_back[:, 4].any() and put_back.isfinite().all()


@pytest.mark.parametrize("kind", [RegionKind.FULL, RegionKind.CAUSAL, RegionKind.STRICT])
@pytest.mark.parametrize("kernel", ["reference", "aten_cpu"])
def test_kernels_find_the_same_gradients(kernel: str, kind: RegionKind) -> None:
    q, k, v, dout = drawn(torch.float64)
    backend = KERNELS[kernel]()
    out, lse = backend.forward(q, k, v, kind)
    wanted = backend.backward(dout, q, k, v, out, lse, kind)
    found = backend.backward(dout, q, k, v, projection(dout, row_sums(out, dout)), lse, kind)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-13)
