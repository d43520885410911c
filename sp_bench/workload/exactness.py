"""How far tensors are from exact ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")
"""The tensors that are compared, in the order in which kernels and engines give them."""


def squared_norms(found: Tensor, exact: Tensor) -> Tensor:
    """(2,): the squared L2 norms, in fp64, of the error and of the exact result. Those of parts add up."""
    return torch.stack([x.square().sum() for x in (found.double() - exact, exact)])


def relative_error(squares: Tensor, elements: Tensor | int) -> Tensor:
    """The L2 error over the norm, or over that of unit elements where the exact result is rounding noise.

    `squares` is (2, ...), of so many `elements` each; what isn't finite is infinitely far off.
    """
    error2, norm2 = squares
    error = (error2 / torch.where(norm2 > 1e-20 * elements, norm2, elements)).sqrt()
    return torch.where(error.isfinite(), error, math.inf)
