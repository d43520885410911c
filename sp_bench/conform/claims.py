"""What a function claims beyond plain attention, stated beside its code.

@claims(layout="zigzag", sent_bytes=lambda problem, phase: ...)
def my_attention(q, k, v, *, causal, group): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sp_bench.plan.problem import Problem

F = TypeVar("F", bound=Callable)
ATTRIBUTE = "sp_bench_claims"
"""The attribute of a function that holds its claims."""

SentBytes = Callable[[Problem, str], float]
"""(problem, "forward" or "backward") -> the bytes that all ranks together send."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What holds for a function. What isn't claimed isn't checked, and the table says so."""

    layout: str = "auto"
    """Which tokens a rank has; auto is striped with a causal mask, contiguous with a full one."""
    shard: Callable | None = None
    """(x (B, seqlen, H, D), group) -> this rank's (B, S, H, D); None: as `layout` says."""
    unshard: Callable | None = None
    """(x (B, S, H, D), group) -> the whole tensor, on every rank; None: as `layout` says."""
    masks: tuple[str, ...] = ("causal", "full")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    head_parallel: bool = False
    """Whether ranks split the heads, so that n must divide them."""
    sub_groups: bool = True
    """Whether it runs on a part of the ranks, while others run another attention."""
    uneven: bool = False
    """Whether it takes lengths that n doesn't divide. It then gets the keyword `seqlen`, the whole length."""
    documents: bool = False
    """Whether it takes packed documents. It then gets the keyword `documents`, their lengths in tokens."""
    sent_bytes: SentBytes | None = None
    """The claimed volume of one call."""


def claims(**claimed: object) -> Callable[[F], F]:
    """Decorate a function with what it claims: the fields of `Claims`, of which those not given have their default."""
    made = Claims(**claimed)  # pyright: ignore[reportArgumentType]

    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, made)
        return function

    return mark
