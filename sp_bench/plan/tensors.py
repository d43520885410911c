"""Tensors: what chunks are pieces of. Each has a name, its fields, and a role in attention.

TENSORS is the registry: every tensor that a plan may name. Each is one object, so that tensors are compared and hashed
by identity, which is what plans of thousands of ranks do most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """The kind of content of a field, which decides its dtype."""

    COMPUTE = "compute"
    """Inputs of a kernel: in the compute dtype, held and on the wire."""
    PARTIAL = "partial"
    """A partial output or gradient: accumulated in fp32, sent in the wire dtype. If nothing is ever added to it, it is
    held in the compute dtype (lower.staging)."""
    STATISTIC = "statistic"
    """One number per row (the lse), in fp32."""


@dataclass(frozen=True)
class Field:
    """One torch tensor of a chunk: (B, S, H, D), or (B, H, S) for a statistic."""

    name: str
    kind: Kind
    of_keys: bool = False
    """Whether it has a row for each key, of kv_heads heads; otherwise one for each query, of all heads."""
    of_values: bool = False
    """Whether its heads have as many elements as those of values, v_head_dim; otherwise head_dim."""
    by_heads: bool = False
    """Whether it has one rank's heads of all tokens of a layout chunk that ranks share."""


class Role(Enum):
    """The part that a tensor has in attention."""

    OPERAND = "operand"
    """Blocks read it, or it is put into what they read."""
    OUTPUT = "output"
    """Partial outputs with their lse, which are merged by weight."""
    GRADIENT = "gradient"
    """Partial gradients, which are added."""
    RESULT = "result"
    """The complete output."""


@dataclass(frozen=True, eq=False, repr=False)
class Tensor:
    """A tensor of one attention, of which chunks are the pieces."""

    name: str
    fields: tuple[Field, ...]
    role: Role
    of_keys: bool = False
    """Whether it has a row for each key rather than for each query."""
    is_by_heads: bool = False
    """Whether a chunk has one rank's heads of all tokens of the ranks that share a layout chunk (DeepSpeed-Ulysses,
    section 3.1), rather than all heads of one rank's tokens."""

    @cached_property
    def is_partial(self) -> bool:
        """Whether its chunks are partial sums over blocks, which are folded."""
        return self.role in (Role.OUTPUT, Role.GRADIENT)

    @cached_property
    def is_output(self) -> bool:
        """Whether its chunks are partial outputs, which are merged by their lse."""
        return self.role is Role.OUTPUT

    @cached_property
    def has_statistics(self) -> bool:
        """Whether a number per row travels with it."""
        return any(field.kind is Kind.STATISTIC for field in self.fields)

    @cached_property
    def by_heads(self) -> Tensor:
        """The same tensor by heads; itself if it is."""
        return self if self.is_by_heads else _COUNTERPARTS[self]

    @cached_property
    def by_tokens(self) -> Tensor:
        """The same tensor with all heads of one rank's tokens; itself if it is."""
        return _COUNTERPARTS[self] if self.is_by_heads else self

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self):  # the copy that another process unpickles is its own one
        return named, (self.name,)


_Q = Field("q", Kind.COMPUTE)
_OUT, _DOUT = (Field(name, Kind.COMPUTE, of_values=True) for name in ("out", "dout"))
_LSE, _DELTA = (Field(name, Kind.STATISTIC) for name in ("lse", "delta"))
_K, _V = (Field(name, Kind.COMPUTE, of_keys=True, of_values=name == "v") for name in ("k", "v"))
_DK, _DV = (Field(name, Kind.PARTIAL, of_keys=True, of_values=name == "dv") for name in ("dk", "dv"))

Q = Tensor("q", (_Q,), Role.OPERAND)
KV = Tensor("kv", (_K, _V), Role.OPERAND, of_keys=True)
O = Tensor("o", (Field("out", Kind.PARTIAL, of_values=True), _LSE), Role.OUTPUT)  # noqa: E741  # the papers' letter
OUT = Tensor("out", (_OUT,), Role.RESULT)
"""A complete O."""
DO = Tensor("do", (_DOUT,), Role.OPERAND)
ODOQ = Tensor("odoq", (_Q, _OUT, _DOUT, _LSE), Role.OPERAND)
"""OdOQ of the Mesh paper, section 3.6."""
DOQ = Tensor("doq", (_Q, _DOUT, _LSE, _DELTA), Role.OPERAND)
"""OdOQ with rowsum(dO * O), delta, in the place of O: all that the backward of FlashAttention-2 (Dao 2023, algorithm 2)
needs of O."""
DQ = Tensor("dq", (Field("dq", Kind.PARTIAL),), Role.GRADIENT)
DKV = Tensor("dkv", (_DK, _DV), Role.GRADIENT, of_keys=True)


def _split(tensor: Tensor) -> Tensor:
    fields = tuple(replace(field, by_heads=True) for field in tensor.fields)
    return replace(tensor, name=f"{tensor.name}_h", fields=fields, is_by_heads=True)


_BY_TOKENS = (Q, KV, O, OUT, DO, ODOQ, DOQ, DQ, DKV)
_BY_HEADS = tuple(map(_split, _BY_TOKENS))
_COUNTERPARTS = dict(zip((*_BY_TOKENS, *_BY_HEADS), (*_BY_HEADS, *_BY_TOKENS), strict=True))
TENSORS = {tensor.name: tensor for tensor in _COUNTERPARTS}
"""Every tensor by its name; names of tensors by heads end in _h."""


def named(name: str) -> Tensor:
    """The tensor of that name."""
    return TENSORS[name]
