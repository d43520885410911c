"""Relative errors of tensors against exact ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")
"""The tensors that are compared, in the order that kernels and engines return them."""


def squared_norms(found: Tensor, exact: Tensor) -> Tensor:
    """Squared L2 norms of the error and of the exact result, (2,) in fp64. Those of parts add up."""
    return torch.stack([x.square().sum() for x in (found.double() - exact, exact)])


def relative_error(squares: Tensor, elements: Tensor | int) -> Tensor:
    """The L2 error divided by the exact result's norm or, if that is rounding noise, by that of a tensor of ones.

    `squares` is (2, ...), of tensors of so many `elements`. An error that is not finite counts as infinite.
    """
    error2, norm2 = squares
    error = (error2 / torch.where(norm2 > 1e-20 * elements, norm2, elements)).sqrt()
    return torch.where(error.isfinite(), error, math.inf)
