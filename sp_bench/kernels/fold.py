"""Fold a partial output into an accumulator, in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fold_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge (part_out, part_lse) into (out, lse): the softmax over the keys of both.

    out_BSHD and part_out_BSHD, lse_BHS and part_lse_BHS; out and lse are accumulators (fp32, or fp64), part_out may
    be narrower. Weights are exp(lse - total), as in online softmax (Milakov, Gimelshein 2018). Rows that saw no key
    on either side stay out = 0, lse = -inf.
    """
    total = torch.logaddexp(lse, part_lse)
    # Only what saw no key weighs nothing; any other lse that is not finite must show in the result.
    weight = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - total))
    out.lerp_(part_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    lse.copy_(total)
