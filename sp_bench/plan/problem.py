"""The problem that a plan solves: shapes, dtypes, mask, number of ranks, and the bytes of each tensor.

Shape legend, here and everywhere: B batch, S tokens, H heads, D head_dim. A rank owns S = seqlen / n tokens of queries,
and kv_seqlen / n of keys. If n doesn't divide seqlen, ranks differ by a token; functions that depend on it take an
owner's rank, or an array of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from sp_bench.errors import RequestError, impossible, unknown
from sp_bench.plan.blocks import Blocks
from sp_bench.plan.caches import Caches
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.layout import Layout, Shards
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.plan.padded_heads import PaddedHeads
from sp_bench.plan.tensors import Field, Kind, Tensor

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "forward_backward": (4, 3)}
"""By phase, how many matrix products of a block are as wide as keys, and how many as wide as values."""


def flops_per_pair(phase: str, head_dim: int, value_dim: int) -> int:
    """FLOPs of a (query, key) pair of a head, recomputation left out: 4 D forward and 10 D backward for one width."""
    of_keys, of_values = PRODUCTS[phase]
    return 2 * (of_keys * head_dim + of_values * value_dim)


def heads_of_a_key_head(heads: int, kv_heads: int) -> int:
    """How many query heads share a key head. Raises RequestError where these are not as many for each."""
    if heads % kv_heads:
        rule = f"must divide heads={heads} (each key head serves the same number of query heads)"
        raise impossible(f"kv_heads={kv_heads}", rule, (d for d in range(1, heads + 1) if heads % d == 0))
    return heads // kv_heads


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One exact attention on `n` ranks. Raises RequestError where the numbers don't fit together."""

    n: int
    """The number of ranks."""
    seqlen: int
    """Tokens of the whole sequence: queries."""
    kv_seqlen: int | None = None
    """Keys of the whole sequence if there are more or fewer than queries; `keys.seqlen` is their number in any case.
    Under a causal mask the queries are the last of the keys' tokens: a part of a prompt after what is cached of it. So
    they are under a window, and of each document of a pack; what no query sees of a history counts, but is not among
    `keys`. Under mask=full there may be any number: cross-attention."""
    heads: int
    kv_heads: int
    head_dim: int
    """Elements of a head of queries and keys."""
    v_head_dim: int | None = None
    """Elements of a head of values and outputs if they are fewer, as in multi-head latent attention (DeepSeek-V2, Liu
    et al. 2024, section 2.1); `value_dim` is their number in any case."""
    absorbed: bool = False
    """Whether values are the first `value_dim` elements of keys, so that a token has one tensor of both: multi-head
    latent attention with queries that have absorbed the matrix from latents to keys."""
    latent_dim: int | None = None
    """Elements of the latent that a block makes its keys and values of, if ranks hold and send that in their place: one
    head of it, and of `rope_dim` elements of keys that all heads share (run.latents)."""
    rope_dim: int | None = None
    """Elements of a head of keys that are not made of the latent."""
    batch: int = 1
    mask: Mask = CAUSAL
    dtype: str = "bfloat16"
    """The compute dtype: of q, k, v, out and their gradients."""
    wire_dtype: str = ""
    """The dtype in which partial outputs and gradients travel; empty for the compute dtype (the papers' volume)."""
    layout: Layout
    head_slices: int = 1
    """How many equal slices of the heads a method computes one after another; a chunk holds one slice."""
    queries_everywhere: bool = False
    """Whether all ranks start with the queries of all, as where each computes them from the same hidden states."""
    query_parts: int = 1
    """How many slices of the query heads share a slice of the key heads: p of them take every p-th query head in turn,
    so that each has as many of every key head."""
    whole_chunks: bool = False
    """Whether chunks and their partials travel whole where ranks need some rows of them, as in other packages
    (plan.row_runs).
    """
    padded: PaddedHeads | None = None
    """The heads that chunks have if a method adds heads of zeros (plan.padded_heads); None: `heads` and `kv_heads`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_seqlen", None if self.kv_seqlen == self.seqlen else self.kv_seqlen)
        object.__setattr__(self, "v_head_dim", None if self.v_head_dim == self.head_dim else self.v_head_dim)
        for key in ("n", "seqlen", "kv_seqlen", "heads", "kv_heads", "head_dim", "v_head_dim", "batch"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                name = "gpus" if key == "n" else key
                raise RequestError(f"{name}={getattr(self, key)}", "must be at least 1", f"{name}=1 would work")
        if self.dtype not in DTYPE_BYTES:
            raise unknown("dtype", self.dtype, DTYPE_BYTES)
        object.__setattr__(self, "wire_dtype", self.wire_dtype or self.dtype)
        if self.wire_dtype not in DTYPE_BYTES:
            raise unknown("wire_dtype", self.wire_dtype, DTYPE_BYTES)
        heads_of_a_key_head(self.heads, self.kv_heads)
        if self.value_dim > self.head_dim:
            rule = f"kernels pad values to the width of keys, head_dim={self.head_dim}"
            raise RequestError(f"v_head_dim={self.v_head_dim}", rule, f"v_head_dim={self.head_dim} or less would work")
        self._refuse_latents()
        self.mask.refuse(self.seqlen, self.kv_seqlen)
        if not self.decodes:  # caches refuse ranks without keys, and may have few rows
            self.queries.refuse()
            self.keys.refuse("kv_seqlen")
        assert self.head_slices % self.query_parts == 0, "every slice of the key heads has as many of the query heads"
        group = self.padded_heads // self.padded_kv_heads
        assert self.query_parts == 1 or group % self.query_parts == 0, "groups of heads are cut"

    def _refuse_latents(self) -> None:
        if self.latent_dim is None:
            return
        asked = f"latent_dim={self.latent_dim}"
        if self.kv_heads > 1:
            rule = "all heads have their keys of one latent, which is the one head that travels"
            raise RequestError(f"{asked}, kv_heads={self.kv_heads}", rule, "kv_heads=1 would work")
        if self.rope_dim is None or not 0 <= self.rope_dim < self.head_dim:
            rule = f"must be 0 to {self.head_dim - 1}: of head_dim={self.head_dim} one at least is made of the latent"
            raise RequestError(f"rope_dim={self.rope_dim}", rule, f"rope_dim={self.head_dim // 3} would work")
        if self.decodes:
            rule = "a step makes no keys of what is cached: its queries have absorbed the matrices"
            raise RequestError(f"{asked}, workload=decode", rule, "latent_dim=null decode.latent=true would work")

    @cached_property
    def queries(self) -> Shards:
        """The tokens of queries as they are assigned to ranks."""
        return Shards(self.layout, self.n, (self.seqlen,))

    @cached_property
    def keys(self) -> Shards:
        """The tokens of keys as they are assigned to ranks; of a history, those that a query sees."""
        return self.mask.keys(self.layout, self.n, self.seqlen, self.kv_seqlen or self.seqlen)

    @property
    def padded_heads(self) -> int:
        """Query heads that chunks have and blocks compute: `heads`, and those of zeros that a method adds."""
        return self.padded.heads if self.padded else self.heads

    @property
    def padded_kv_heads(self) -> int:
        """Key heads that chunks have: `kv_heads`, and the copies and those of zeros that a method adds."""
        return self.padded.kv_heads if self.padded else self.kv_heads

    @property
    def decodes(self) -> bool:
        """Whether it is a decode step (plan.caches)."""
        return isinstance(self.mask, Caches)

    @property
    def value_dim(self) -> int:
        """Elements of a head of values and outputs."""
        return self.v_head_dim or self.head_dim

    @property
    def made_dim(self) -> int:
        """Elements of a head of keys that are made of a latent; none if none travels."""
        return self.head_dim - (self.rope_dim or 0) if self.latent_dim else 0

    def width(self, field: Field) -> int:
        """Elements of a head of a field; none of values that are part of keys."""
        if field.of_keys and (self.absorbed or self.latent_dim):
            of_keys = (self.latent_dim or 0) + (self.rope_dim or 0) if self.latent_dim else self.head_dim
            return 0 if field.of_values else of_keys
        return self.value_dim if field.of_values else self.head_dim

    @property
    def measured_as(self) -> str:
        """The class of problems whose measurements say how far simulations of this one are off (point.backing)."""
        apart = ["other keys than queries"] if self.kv_seqlen else []
        apart += ["latent keys"] if self.absorbed or self.latent_dim else ["narrow values"] if self.v_head_dim else []
        return ", ".join(apart) or self.mask.measured_as

    @property
    def history(self) -> int:
        """How many keys are before all queries, and are assigned on their own."""
        return self.mask.history(self.seqlen, self.kv_seqlen or self.seqlen)

    @property
    def but_for_documents(self) -> tuple[Hashable, ...]:
        """All that tells apart problems with packs, but for their documents and the sizes of chunks."""
        assert isinstance(self.mask, Packed), "a pack"
        plain = (getattr(self, each.name) for each in fields(self) if each.name not in ("mask", "layout"))
        seen = self.mask.name, self.mask.causal, self.mask.windowed, self.mask.held, self.history
        in_runs = self.queries.in_runs, self.keys.in_runs
        return (*plain, *seen, self.layout.name, self.layout.head_parallel, *in_runs)

    @property
    def largest_chunks(self) -> tuple[int, ...]:
        """Tokens of the rank with most of them and of the largest chunk, of queries and of keys: what is made for these
        is large enough for others.
        """
        return tuple(tokens for each in (self.queries, self.keys) for tokens in (each.most, each.largest))

    def shards_of(self, rows: Field | Tensor) -> Shards:
        """The tokens of which a field or a tensor has rows: keys or queries."""
        return self.keys if rows.of_keys else self.queries

    @cached_property
    def blocks(self) -> Blocks:
        """The classes of blocks between chunks under the mask, and the class of each pair of ranks."""
        return self.mask.blocks(self.layout, self.n, self.seqlen, self.keys.seqlen)

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks own as many tokens, in layout chunks of one size."""
        return self.queries.is_even and self.keys.is_even

    @property
    def pairs(self) -> float:
        """(query, key) pairs of a head of the sequence, as MFU counts them."""
        return self.mask.pairs(self.seqlen, self.keys.seqlen)

    @property
    def key_slices(self) -> int:
        """How many slices of the key heads there are: chunks of keys hold one of them."""
        return self.head_slices // self.query_parts

    def slices_of(self, tensor: Tensor) -> int:
        """How many slices the heads of a tensor are in."""
        return self.key_slices if tensor.of_keys else self.head_slices

    @property
    def without_history(self) -> str:
        """The key and the value by which there are as many keys as queries."""
        of_documents = isinstance(self.mask, Packed) and self.mask.name == Documents.name and self.mask.new
        return "data.cached=[]" if of_documents else "kv_seqlen=null"

    @property
    def in_one_slice(self) -> Problem:
        """The same problem with all heads at once."""
        return replace(self, head_slices=1, query_parts=1)

    @property
    def block_heads(self) -> int:
        """Query heads of one block."""
        return self.padded_heads // (self.layout.head_parallel * self.head_slices)

    @property
    def accumulate_dtype(self) -> str:
        """The dtype of accumulators and statistics."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def kv_ratio(self) -> float:
        """The k of the volume formulas: what a chunk of keys has for what one of queries has, kv_heads / heads where
        there are as many keys as queries. Heads are the padded ones.
        """
        return self.padded_kv_heads * self.keys.seqlen / (self.padded_heads * self.seqlen)

    def field_dtype(self, field: Field, *, wire: bool, summed: bool = True) -> str:
        """The dtype of a field, on the wire or held. `summed` says whether anything is added to a held partial."""
        if field.kind is Kind.COMPUTE or (field.kind is Kind.PARTIAL and not (wire or summed)):
            return self.dtype
        if field.kind is Kind.PARTIAL and wire:
            return self.wire_dtype
        return self.accumulate_dtype

    def field_heads(self, field: Field) -> int:
        """Heads of a field of one chunk. A field by heads has at least one: key heads are replicated if too few."""
        heads = self.padded_kv_heads // self.key_slices if field.of_keys else self.padded_heads // self.head_slices
        return max(heads // self.layout.head_parallel, 1) if field.by_heads else heads

    def true_share(self, tensor: Tensor) -> Fraction:
        """The share of a tensor's bytes that is not of padding, nor of copies of key heads that padding makes.

        By heads, a rank has at least one key head in any case.
        """
        true, padded = (self.kv_heads, self.padded_kv_heads) if tensor.of_keys else (self.heads, self.padded_heads)
        if not tensor.is_by_heads or not tensor.of_keys:
            return Fraction(true, padded)
        degree = self.layout.head_parallel
        return Fraction(max(true, degree), max(padded, degree))

    def field_tokens(self, field: Field, owner=None) -> Any:
        """Tokens of a field of the chunk of one or an array of owners; of the largest chunk if owner is None."""
        shards = self.shards_of(field)
        if owner is None:
            return shards.largest if field.by_heads else shards.most
        if field.by_heads:
            return shards.chunk_tokens(owner // self.layout.head_parallel)
        return shards.tokens(owner)

    def field_shape(self, field: Field, tokens: int | None = None) -> tuple[int, ...]:
        """The shape of `tokens` tokens of a field, (B, S, H, D) or (B, H, S); None for the largest chunk's tokens."""
        count: int = self.field_tokens(field) if tokens is None else tokens
        heads = self.field_heads(field)
        if field.kind is Kind.STATISTIC:
            return (self.batch, heads, count)
        return (self.batch, count, heads, self.width(field))

    def token_bytes(self, field: Field, *, wire: bool, summed: bool = True) -> int:
        """Bytes of one token of a field of a chunk, summed over batch entries."""
        elements = self.batch * self.field_heads(field) * (1 if field.kind is Kind.STATISTIC else self.width(field))
        return elements * DTYPE_BYTES[self.field_dtype(field, wire=wire, summed=summed)]

    def sent_bytes(self, tensor: Tensor) -> Mapping[str, int]:
        """Bytes of one token of each field of a tensor as it is sent. Plans have thousands of messages of few."""
        if tensor not in self._sent_bytes:
            self._sent_bytes[tensor] = {f.name: self.token_bytes(f, wire=True) for f in tensor.fields}
        return self._sent_bytes[tensor]

    @cached_property
    def _sent_bytes(self) -> dict[Tensor, Mapping[str, int]]:
        return {}

    def field_bytes(self, field: Field, *, wire: bool, summed: bool = True) -> int:
        """Bytes of one field of the largest chunk."""
        return self.field_tokens(field) * self.token_bytes(field, wire=wire, summed=summed)

    def chunk_bytes(self, tensor: Tensor, *, wire: bool, summed: bool = True) -> int:
        """Bytes of the largest chunk of `tensor`, statistics included."""
        return sum(self.field_bytes(field, wire=wire, summed=summed) for field in tensor.fields)

    def mean_wire_bytes(self, tensor: Tensor, *, statistics: bool = True) -> Fraction:
        """Mean bytes of a chunk of `tensor` on the wire. Papers leave statistics out."""
        fields = [field for field in tensor.fields if statistics or field.kind is not Kind.STATISTIC]
        ranks = {field: self.layout.head_parallel if field.by_heads else 1 for field in fields}
        total = sum(
            self.shards_of(tensor).seqlen * ranks[field] * self.token_bytes(field, wire=True) for field in fields
        )
        return Fraction(total, self.n)

    def needs_cast(self, tensor: Tensor, *, summed: bool = True) -> bool:
        """Whether the held dtype of a chunk differs from its wire dtype, so that sending it takes a staging buffer."""
        held, sent = ([self.field_dtype(f, wire=w, summed=summed) for f in tensor.fields] for w in (False, True))
        return held != sent

    def rows_seen(self, q_owner: int, kv_owner: int) -> int:
        """Rows of a query chunk from the first to the last that sees a key of the key chunk."""
        return self.blocks.count_seen(self.blocks.of(q_owner, kv_owner))

    def scaled(self, seqlen: int, document_unit: int = 1) -> Problem:
        """The same problem for a shorter sequence, its documents scaled to multiples of a unit and assigned again.

        The keys are scaled alike, as unevenly over ranks as they are. A decode step has all of its rows, and shorter
        caches.
        """
        if isinstance(self.mask, Caches):
            mask = self.mask.shortened(self.n)
            return replace(self, kv_seqlen=mask.kv_seqlen, mask=mask)
        mask = self.mask.scaled(seqlen, document_unit)
        layout = replace(mask.layout(self.layout.name), head_parallel=self.layout.head_parallel)
        keys = seqlen + mask.cached_tokens if isinstance(mask, Packed) else self._scaled_keys(seqlen)
        return replace(self, seqlen=seqlen, kv_seqlen=keys, mask=mask, layout=layout)

    def _scaled_keys(self, seqlen: int) -> int | None:
        if self.kv_seqlen is None:
            return None
        history = self.history > 0
        each, more = divmod(self.kv_seqlen - history * self.seqlen, self.n)
        least = 1 * (each > 0) if history else self.layout.pieces
        return max(each * seqlen // self.seqlen, least) * self.n + more + history * seqlen
