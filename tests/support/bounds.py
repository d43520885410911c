"""How far results may be from fp64: what roundings of their dtype can make on their very inputs. Imported inside ranks.

A fixed bound for a narrow dtype is one that some random inputs pass: of two tokens, whose probabilities are near 1,
cancellation leaves so little of dq and dk that any attention in bfloat16 is off by several percent. What one call gets
there is itself a draw, so the bound is the most that one can get (exact_rows.errors_of_rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.problem import Problem
from sp_bench.workload import RankContext
from sp_bench.workload.exact_rows import errors_of_rows
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import UNIT_ROUNDOFF
from sp_bench.workload.sampled_rows import all_rows

FLOORS = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative L2 errors that always pass, a few roundings of the dtype, or of sums in it."""


def too_far(
    problem: Problem,
    inputs: Sequence[Tensor],
    errors: Mapping[str, float],
    floors: Mapping[str, float] = FLOORS,
) -> dict[str, float]:
    """Those relative L2 errors of out, dq, dk and dv that roundings can't make on a whole sequence's (q, k, v, dout).

    Roundings of the compute dtype, or of the wire's if that is narrower. They are worked out where an error is above
    the floor, which few are.
    """
    dtype = max(problem.dtype, problem.wire_dtype, key=UNIT_ROUNDOFF.__getitem__)
    suspects = {name: error for name, error in errors.items() if not error <= floors[dtype]}  # NaN is one
    possible = roundings(problem, inputs) if suspects else {}
    return {name: error for name, error in suspects.items() if not error <= UNIT_ROUNDOFF[dtype] * possible[name]}


def roundings(problem: Problem, inputs: Sequence[Tensor]) -> Mapping[str, float]:
    """The largest errors that roundings make on these inputs, in unit roundoffs."""
    one = replace(problem.in_one_slice, n=1, wire_dtype="", layout=LAYOUTS["contiguous"])
    context = RankContext(0, torch.device("cpu"), lambda plans, ctas: _none(), alive=lambda: None)
    q, k, v, dout = inputs
    if isinstance(one.mask, Packed) and one.mask.new:
        k, v = (x[:, one.mask.key_places] for x in (k, v))
    nothing: dict[str, Tensor] = dict(zip(NAMES, map(torch.zeros_like, (dout, q, k, v)), strict=True))
    sample = all_rows(one, 0)
    return errors_of_rows(one, context, (q, k, v, dout), sample.of(nothing), sample).rounding


def _none() -> NoReturn:
    raise AssertionError("exact rows of one rank need no transport")
