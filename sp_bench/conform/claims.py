"""Claims of a function beyond plain attention, stated beside its code.

@claims(layout="zigzag", sent_bytes=lambda problem, phase: ...)
def my_attention(q, k, v, *, causal, group): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from sp_bench.errors import RequestError, nearest
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import MASKS
from sp_bench.plan.problem import DTYPE_BYTES, Problem

F = TypeVar("F", bound=Callable)
ATTRIBUTE = "sp_bench_claims"
"""The attribute of a function that holds its claims."""

FLAGS = ("head_parallel", "sub_groups", "uneven", "documents", "window", "scale")
FUNCTIONS = ("shard", "unshard")
ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64",
}  # fmt: skip
"""Other names of dtypes; those of torch may also begin with "torch."."""
CLAIMED_APART = {"document": "documents", "documents": "documents", "window": "window", "sliding": "window"}
"""Masks that are no mask of a whole sequence, and the claim that stands for each."""
SentBytes = Callable[[Problem, str], float]
"""(problem, "forward" or "backward") -> the bytes that all ranks together send."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The properties that a function claims. One that isn't claimed isn't checked, and the table says so.

    Raises RequestError for a layout, mask or dtype that doesn't exist, and for a flag that is neither true nor false.
    """

    layout: str = "auto"
    """The tokens that a rank has; auto is striped with a causal mask, contiguous with a full one."""
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
    window: bool = False
    """Whether it takes sliding windows. It then gets the keyword `window_size`, (left, right): how many keys before and
    behind its own position a query sees."""
    scale: bool = False
    """Whether it takes another scale than 1 / sqrt(D). It then gets the keyword `scale`, which scores are multiplied
    by."""
    sent_bytes: SentBytes | None = None
    """The claimed volume of one call."""

    def __post_init__(self) -> None:
        if self.layout not in (*LAYOUTS, "auto"):
            known = nearest(str(self.layout), [*LAYOUTS, "auto"])
            raise RequestError(f"layout={self.layout}", "there is no such layout", known)
        for key in FLAGS:
            if not isinstance(value := getattr(self, key), bool):
                raise RequestError(f"{key}={value}", "is a claim or not", f"{key}=true would work")
        object.__setattr__(self, "masks", _names("masks", self.masks, _mask))
        object.__setattr__(self, "dtypes", dtypes_named(self.dtypes))


def dtypes_named(given: object) -> tuple[str, ...]:
    """Names of dtypes, from a list of names, aliases or dtypes of torch, or a text with commas between them.

    Raises RequestError for one that is not known.
    """
    return _names("dtypes", given, _dtype)


def _names(key: str, given: object, name: Callable[[str], str]) -> tuple[str, ...]:
    """The names in a list or in a text with commas, each once."""
    words = [str(x).strip() for x in given] if isinstance(given, list | tuple) else str(given).split(",")
    names = tuple(dict.fromkeys(name(word) for word in words if word))
    if not names:
        raise RequestError(f"{key}={given}", "a function takes at least one", f"{key}={name('')} would work")
    return names


def _mask(word: str) -> str:
    if word in CLAIMED_APART:
        claim = f"{CLAIMED_APART[word]}=true"
        rule = "masks are those of a whole sequence"
        raise RequestError(f"masks={word}", rule, f"{claim} would claim it; masks: {', '.join(MASKS)}")
    if word and word not in MASKS:
        raise RequestError(f"masks={word}", "there is no such mask", nearest(word, MASKS))
    return word or "causal"


def _dtype(word: str) -> str:
    name = word.removeprefix("torch.").lower()
    name = ALIASES.get(name, name)
    if name and name not in DTYPE_BYTES:
        raise RequestError(f"dtypes={word}", "is no dtype that is checked", nearest(name, DTYPE_BYTES))
    return name or "float32"


def claims(**claimed: object) -> Callable[[F], F]:
    """Decorate a function with what it claims: the fields of `Claims`, of which those not given have their default.

    Raises RequestError for a claim or a value that doesn't exist.
    """
    known = [each.name for each in fields(Claims)]
    for key in claimed:
        if key not in known:
            raise RequestError(key, "there is no such claim", nearest(key, known))
    made = Claims(**claimed)  # pyright: ignore[reportArgumentType]

    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, made)
        return function

    return mark
