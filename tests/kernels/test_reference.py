"""The exact attention of whole sequences, which the gates of training compare with."""

from __future__ import annotations

import math

import pytest
import torch

from sp_bench.kernels.reference import exact
from sp_bench.plan.mask import CAUSAL, FULL
from tests.support.dense import HEADS, block_of


@pytest.mark.parametrize("causal", [True, False])
def test_the_exact_attention_with_sinks_is_autograds(causal: bool) -> None:
    """A column more in every softmax, whose value is 0."""
    block, sinks = (
        block_of(12, 12, 2, torch.float64),
        torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True),
    )
    q, k, v = (x.clone().requires_grad_() for x in block[:3])
    wide = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    k_BSHD, v_BSHD = wide
    scores = torch.einsum("bshd,bthd->bhst", q, k_BSHD) / math.sqrt(q.shape[3])
    if causal:
        scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf)
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, column], dim=3).softmax(3)[..., :-1]
    out = torch.einsum("bhst,bthd->bshd", shares, v_BSHD)
    wanted = out, *torch.autograd.grad(out, (q, k, v, sinks), block.dout.double())
    found = exact(*block[:3], block.dout, CAUSAL if causal else FULL, sinks.detach())
    for x, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, one.detach(), rtol=0, atol=1e-12)
