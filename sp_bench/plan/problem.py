"""The problem that a plan solves: shapes, dtypes, mask, how many ranks, and what each tensor weighs.

Shape legend, here and everywhere: B batch, S tokens, H heads, D head_dim; local shapes have S = seqlen / n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.layout import Layout, Mask, Part, Regions

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class Kind(Enum):
    """What a field holds, which fixes its dtype."""

    COMPUTE = "compute"
    """An input of a kernel: the compute dtype, held and on the wire."""
    PARTIAL = "partial"
    """A partial output or gradient: accumulated in fp32, sent in the wire dtype. If nothing is added to it, the compute
    dtype holds it (lower.staging)."""
    STATISTIC = "statistic"
    """One number for each row (the lse): fp32."""


@dataclass(frozen=True)
class Field:
    """One torch tensor of a chunk: (B, S, H, D), or (B, H, S) for a statistic."""

    name: str
    kind: Kind
    kv: bool = False
    """Has kv_heads heads instead of heads."""
    by_heads: bool = False
    """Has all tokens of a layout chunk that ranks share, and one rank's heads of them."""


_Q, _OUT, _DOUT = (Field(name, Kind.COMPUTE) for name in ("q", "out", "dout"))
_LSE = Field("lse", Kind.STATISTIC)

FIELDS = {
    "q": (_Q,),
    "kv": (Field("k", Kind.COMPUTE, kv=True), Field("v", Kind.COMPUTE, kv=True)),
    "o": (Field("out", Kind.PARTIAL), _LSE),
    "out": (_OUT,),
    "do": (_DOUT,),
    "odoq": (_Q, _OUT, _DOUT, _LSE),
    "dq": (Field("dq", Kind.PARTIAL),),
    "dkv": (Field("dk", Kind.PARTIAL, kv=True), Field("dv", Kind.PARTIAL, kv=True)),
}
"""The fields of each tensor that a chunk can be a piece of. `odoq` is the Mesh paper's OdOQ (section 3.6), `out` an o
that is complete. q_h and so on are the same by heads: all tokens of the ranks that share a layout chunk, and the heads
of one of them (DeepSpeed-Ulysses, section 3.1)."""
FIELDS |= {f"{name}_h": tuple(replace(field, by_heads=True) for field in fields) for name, fields in FIELDS.items()}


def is_partial(tensor: str) -> bool:
    """Whether chunks of the tensor are sums of blocks: o, dq, dkv."""
    return any(field.kind is Kind.PARTIAL for field in FIELDS[tensor])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One exact attention, dealt out over `n` ranks. Raises RequestError where the numbers don't fit together."""

    n: int
    """Ranks."""
    seqlen: int
    """Tokens of the whole sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    causal: bool = True
    dtype: str = "bfloat16"
    """The compute dtype: of q, k, v, out and their gradients."""
    wire_dtype: str = ""
    """The dtype in which partial outputs and gradients travel; the compute dtype where empty (the papers' volume)."""
    layout: Layout
    head_slices: int = 1
    """Chunks hold one of so many equal slices of the heads, which a method takes one after the other."""

    def __post_init__(self) -> None:
        for key in ("n", "seqlen", "heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, key) < 1:
                name = "gpus" if key == "n" else key
                raise RequestError(f"{name}={getattr(self, key)}", "must be at least 1", f"{name}=1 would work")
        if self.dtype not in DTYPE_BYTES:
            raise unknown("dtype", self.dtype, DTYPE_BYTES)
        object.__setattr__(self, "wire_dtype", self.wire_dtype or self.dtype)
        if self.wire_dtype not in DTYPE_BYTES:
            raise unknown("wire_dtype", self.wire_dtype, DTYPE_BYTES)
        if self.heads % self.kv_heads:
            divisors = [d for d in range(1, self.heads + 1) if self.heads % d == 0]
            raise RequestError(
                f"kv_heads={self.kv_heads}",
                f"must divide heads={self.heads} (each key head serves the same number of query heads)",
                f"one of {', '.join(map(str, divisors))} would work",
            )
        self.layout.refuse(self.n, self.seqlen)
        assert 1 in (self.head_slices, self.layout.shared), "heads are taken in slices or split among ranks"

    @property
    def local_seqlen(self) -> int:
        """Tokens that a rank owns: S."""
        return self.seqlen // self.n

    @property
    def block_tokens(self) -> int:
        """Queries, and keys, of one whole block: the tokens of a chunk of the layout."""
        return self.local_seqlen * self.layout.shared

    @property
    def block_heads(self) -> int:
        """Query heads of one block."""
        return self.heads // (self.layout.shared * self.head_slices)

    @property
    def accumulate_dtype(self) -> str:
        """The dtype of accumulators and statistics."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def kv_ratio(self) -> float:
        """k of the volume formulas: kv_heads / heads."""
        return self.kv_heads / self.heads

    @property
    def narrows(self) -> bool:
        """Whether the result of some block covers only a part of its chunks."""
        cases = self.layout.cases(self.causal)
        alone = self.n == self.layout.shared  # with one chunk, each block is of that and itself
        regions = [region for case in (cases[1:2] if alone else cases) for region in case]
        return any(r.mask is Mask.STRICT or r.q is not Part.WHOLE or r.kv is not Part.WHOLE for r in regions)

    def field_dtype(self, field: Field, *, wire: bool, summed: bool = True) -> str:
        """The dtype of a field, on the wire or held by a rank; a partial there as a sum, or never `summed`."""
        if field.kind is Kind.COMPUTE or (field.kind is Kind.PARTIAL and not (wire or summed)):
            return self.dtype
        if field.kind is Kind.PARTIAL and wire:
            return self.wire_dtype
        return self.accumulate_dtype

    def field_heads(self, field: Field) -> int:
        """Heads of a field of one chunk. By heads, at least one: key heads are replicated for ranks beyond them."""
        heads = self.kv_heads if field.kv else self.heads
        return max(heads // self.layout.shared, 1) if field.by_heads else heads // self.head_slices

    def field_tokens(self, field: Field) -> int:
        """Tokens of a field of one chunk."""
        return self.block_tokens if field.by_heads else self.local_seqlen

    def field_shape(self, field: Field, part: Part = Part.WHOLE) -> tuple[int, ...]:
        """The shape of a field of one chunk, or of a half of it."""
        tokens = part.tokens(self.field_tokens(field))
        heads = self.field_heads(field)
        if field.kind is Kind.STATISTIC:
            return (self.batch, heads, tokens)
        return (self.batch, tokens, heads, self.head_dim)

    def field_bytes(self, field: Field, *, wire: bool, summed: bool = True) -> int:
        """What one field of a chunk weighs."""
        elements = 1
        for size in self.field_shape(field):
            elements *= size
        return elements * DTYPE_BYTES[self.field_dtype(field, wire=wire, summed=summed)]

    def chunk_bytes(self, tensor: str, *, wire: bool, summed: bool = True) -> int:
        """What one chunk of `tensor` weighs, its statistics included."""
        return sum(self.field_bytes(field, wire=wire, summed=summed) for field in FIELDS[tensor])

    def wire_statistic_bytes(self, tensor: str) -> int:
        """The part of `chunk_bytes(tensor, wire=True)` that is statistics, which the papers leave out."""
        return sum(self.field_bytes(f, wire=True) for f in FIELDS[tensor] if f.kind is Kind.STATISTIC)

    def needs_cast(self, tensor: str, *, summed: bool = True) -> bool:
        """Whether the held form of a chunk differs from its wire form, so that sending it takes a staging buffer."""
        held, sent = ([self.field_dtype(f, wire=w, summed=summed) for f in FIELDS[tensor]] for w in (False, True))
        return held != sent

    def regions(self, q_chunk: int, kv_chunk: int) -> Regions:
        """What is computed between two chunks, by their global indices."""
        return self.layout.regions(q_chunk, kv_chunk, self.causal)

    def rows_seen(self) -> list[Part]:
        """The queries of a block that see any of its keys, by Layout.order; all of them where none does."""
        return [_union([region.q for region in case]) for case in self.layout.cases(self.causal)]


def _union(parts: list[Part]) -> Part:
    return parts[0] if len(set(parts)) == 1 else Part.WHOLE
