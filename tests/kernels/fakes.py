"""Stand-ins for GPU kernels: their signatures and conventions, as their packages have them, with fp64 maths on a CPU.

Each refuses what the real one can't take, and breaks where the real one would compute rubbish: a statistic that is not
contiguous is read through its pointer, and a row whose lse is -inf is exp(score - lse) = inf, or exp(score).

Shapes: q, out (B, S, H, D), k, v (B, T, K, D), or heads before tokens where a function says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.kernels.fake_maths import (
    BOTTOM_RIGHT,
    TOP_LEFT,
    backward,
    backward_varlen,
    check,
    forward,
    forward_pages,
    forward_varlen,
    heads_first,
    minus_inf_as_zero,
    through_pointer,
)

FA3_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""hopper/flash_api_stable.cpp of flash-attention."""


def aten_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Heads before tokens."""
    check(query, key, value)
    assert not dropout_p and not return_debug_mask and scale is None
    q, k, v = heads_first(query, key, value)
    out, lse = forward(q, k, v, q.shape[3] ** -0.5, is_causal, BOTTOM_RIGHT)
    state = torch.zeros(2, dtype=torch.uint64)
    return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], state, state[0], torch.empty(0)


def aten_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Heads before tokens. Cumulative lengths would make it take packed sequences."""
    check(grad_out, query, key, value, out)
    assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (query.shape[2], key.shape[2])
    assert not dropout_p and philox_seed.dtype == philox_offset.dtype == torch.uint64
    dout, q, k, v, out = heads_first(grad_out, query, key, value, out)
    lse = through_pointer(logsumexp)
    return heads_first(*backward(dout, q, k, v, out, lse, q.shape[3] ** -0.5, is_causal, BOTTOM_RIGHT))


def aten_varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Any, ...]:
    """Packed sequences, (T, H, D); the lse is (H, T)."""
    check(query, key, value)
    assert cum_seq_q is not None and cum_seq_k is not None and not any(rest.values())
    assert not dropout_p and not return_debug_mask and scale is None
    longest = (max_q, max_k)
    out, lse = forward_varlen(query, key, value, cum_seq_q, cum_seq_k, longest, query.shape[2] ** -0.5, is_causal)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def aten_varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Tensor, ...]:
    """The backward of packed sequences, by torch's signature."""
    check(grad_out, query, key, value, out)
    assert not dropout_p and scale is None and not any(rest.values())
    scaled = (max_q, max_k), query.shape[2] ** -0.5, is_causal
    return backward_varlen(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, *scaled)


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Heads before tokens; no single key; the lse is (B, H, S, 1)."""
    check(query, key, value)
    assert attn_bias is None and compute_log_sumexp and not dropout_p and not return_debug_mask
    assert key.shape[2] > 1, "cudnn SDPA does not support key/value sequence length 1"
    q, k, v = heads_first(query, key, value)
    out, lse = forward(q, k, v, q.shape[3] ** -0.5, is_causal, TOP_LEFT)
    state = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2), lse[..., None], None, None, q.shape[1], k.shape[1], state, state.clone(), None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Heads before tokens. It takes max_q and max_k for the lengths, and cumulative ones for packed sequences."""
    check(grad_out, query, key, value, out)
    assert attn_bias is None and cum_seq_q is None and cum_seq_k is None and not dropout_p
    assert key.shape[2] > 1 and (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.shape == (*query.shape[:3], 1)
    dout, q, k, v, out = heads_first(grad_out, query, key, value, out)
    lse = through_pointer(logsumexp)
    return heads_first(*backward(dout, q, k, v, out, lse, q.shape[3] ** -0.5, is_causal, TOP_LEFT))


class FlashAttnInterface(ModuleType):
    """flash_attn.flash_attn_interface of flash_attn 2.7 and 2.8."""

    deterministic = False
    """The arguments of the last backward."""

    def _flash_attn_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Any, ...]:
        """A window of (-1, -1) is none; causal is aligned to the last key."""
        check(q, k, v)
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is None and not return_softmax
        out, lse = forward(q, k, v, softmax_scale, causal, BOTTOM_RIGHT)
        return out, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)

    def _flash_attn_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """Into dq, dk and dv; what it returns is no gradient."""
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is None and dq is not None and dk is not None and dv is not None
        check(dout, q, k, v, out, dq, dk, dv)
        self.deterministic = deterministic
        grads = backward(dout, q, k, v, out, through_pointer(softmax_lse), softmax_scale, causal, BOTTOM_RIGHT)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)
        return torch.empty(0)

    splits = -1
    """num_splits of the last call with a cache."""

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Pages of a multiple of 256 tokens, a table and lengths in int32; an lse only if it is asked for."""
        check(q, k_cache, v_cache)
        nothing = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
        assert all(x is None for x in nothing) and (causal, window_size, softcap) == (False, (-1, -1), 0.0)
        assert isinstance(cache_seqlens, Tensor) and block_table is not None
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        assert cache_seqlens.is_contiguous() and block_table.stride(-1) == 1
        assert k_cache.shape == v_cache.shape and k_cache.shape[3] == q.shape[3] <= 256
        assert len(block_table) == len(cache_seqlens) == len(q)
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        self.splits = num_splits
        scale = softmax_scale or q.shape[3] ** -0.5
        out, lse = forward_pages(q, k_cache, v_cache, cache_seqlens, block_table, scale)
        return (out, lse) if return_softmax_lse else out

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Any, ...]:
        """Packed sequences, (T, H, D); the lse is (H, T)."""
        check(q, k, v)
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert not any((return_softmax, zero_tensors)) and block_table is leftpad_k is seqused_k is alibi_slopes is None
        longest = (max_seqlen_q, max_seqlen_k)
        out, lse = forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal)
        return out, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        """Packed sequences, into dq, dk and dv."""
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is rng_state is None and not zero_tensors
        assert dq is not None and dk is not None and dv is not None
        check(dout, q, k, v, out, dq, dk, dv)
        self.deterministic = deterministic
        longest = (max_seqlen_q, max_seqlen_k)
        grads = backward_varlen(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal
        )
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)
        return torch.empty(0)


VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Causal is aligned to the last key."""
    check(q, k, v)
    options = _all_arguments(FA3_FWD, (q, k, v, *given))
    scale, causal = options.pop("softmax_scale"), options.pop("is_causal")
    vars(sys.modules["flash_attn_interface"])["splits"] = options.pop("num_splits")
    _note_margin(options)
    cu_q, cu_k, *longest = (options.pop(name) for name in VARLEN)
    counts, table, q_v = (options.pop(name) for name in ("seqused_k", "page_table", "q_v"))
    if q_v is not None:  # scores are sums of both products, as of tensors end to end
        assert q.shape[-1] <= 64 and v.shape[-1] >= 256 and q_v.shape == (*q.shape[:-1], v.shape[-1])
        assert q_v.stride(-1) == 1 and q_v.dtype == q.dtype
        q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
    assert options == {name: default for name, default in _all_arguments(FA3_FWD).items() if name in options}
    if table is not None:
        assert cu_q is None and cu_k is None and not causal
        assert counts.dtype == table.dtype == torch.int32 and table.stride(-1) == 1 and counts.is_contiguous()
        assert len(table) == len(counts) == len(q) and (k.shape == v.shape or q_v is not None)
        return *forward_pages(q, k, v, counts, table, scale), torch.empty(0), torch.empty(0)
    assert counts is None
    if cu_q is not None:
        return *forward_varlen(q, k, v, cu_q, cu_k, tuple(longest), scale, causal), torch.empty(0), torch.empty(0)
    return *forward(q, k, v, scale, causal, BOTTOM_RIGHT), torch.empty(0), torch.empty(0)


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """Into dq, dk and dv."""
    options = _all_arguments(FA3_BWD, (dout, q, k, v, out, softmax_lse, *given))
    dq, dk, dv = grads = tuple(options.pop(name) for name in ("dq", "dk", "dv"))
    scale, causal = options.pop("softmax_scale"), options.pop("is_causal")
    vars(sys.modules["flash_attn_interface"])["deterministic"] = options.pop("deterministic")
    _note_margin(options)
    cu_q, cu_k, *longest = (options.pop(name) for name in VARLEN)
    assert options == {name: default for name, default in _all_arguments(FA3_BWD).items() if name in options}
    check(dout, q, k, v, out, dq, dk, dv)
    if cu_q is not None:
        found = backward_varlen(dout, q, k, v, out, softmax_lse, cu_q, cu_k, tuple(longest), scale, causal)
    else:
        lse = minus_inf_as_zero(through_pointer(softmax_lse))
        found = backward(dout, q, k, v, out, lse, scale, causal, BOTTOM_RIGHT)
    for into, grad in zip(grads, found, strict=True):
        into.copy_(grad)
    return (dq, dk, dv, *(torch.empty(0) for _ in range(5)))


def _note_margin(options: dict[str, Any]) -> None:
    """Keep what was to be left free in the module that stands for the package."""
    vars(sys.modules["flash_attn_interface"]).setdefault("margins", []).append(options.pop("sm_margin"))


def _all_arguments(schema: str, given: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The optional arguments by name; the dispatcher leaves those at the end out that have their defaults."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    values = {x.name: given[i] if i < len(given) else x.default_value for i, x in enumerate(arguments)}
    return {x.name: values[x.name] for x in arguments if x.has_default_value()}


class CuteInterface(ModuleType):
    """flash_attn.cute.interface of flash-attn-4 4.0, for what is asked of it here."""

    deterministic = False
    """The arguments of the last backward."""

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_lse: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> tuple[Any, ...]:
        """Without return_lse there is no lse; more than two results."""
        check(q, k, v)
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            longest = (max_seqlen_q or 0, max_seqlen_k or 0)
            scale = softmax_scale or q.shape[2] ** -0.5
            out, lse = forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, scale, causal)
            return out, lse if return_lse else None, None, None, None
        out, lse = forward(q, k, v, softmax_scale or q.shape[3] ** -0.5, causal, BOTTOM_RIGHT)
        return out, lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, ...]:
        """dout comes fifth here."""
        check(dout, q, k, v, out)
        self.deterministic = deterministic
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            assert q.shape[-1] % 32 == 0, "4.0.0b36 has wrong gradients"
            longest = (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
            scale = softmax_scale or q.shape[2] ** -0.5
            return backward_varlen(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, longest, scale, causal)
        lse = minus_inf_as_zero(through_pointer(lse))
        return backward(dout, q, k, v, out, lse, softmax_scale or q.shape[3] ** -0.5, causal, BOTTOM_RIGHT)


class FlashInferModule(ModuleType):
    """flashinfer 0.6, for what is asked of it here."""

    class BatchDecodeWithPagedKVCacheWrapper:
        """One query token an entry; its heads in groups that share a key head. `made` counts plans."""

        made = 0

        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
            *,
            backend: str = "auto",
        ) -> None:
            assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
            assert (kv_layout, use_cuda_graph, use_tensor_cores, backend) == ("NHD", False, True, "fa2")
            self._plan: tuple[Any, ...] = ()

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            sm_scale: float | None = None,
            q_data_type: torch.dtype = torch.float16,
            kv_data_type: torch.dtype | None = None,
        ) -> None:
            """All in int32; the last page of an entry has one key at least."""
            assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
            assert indptr[0] == 0 and indptr[-1] == len(indices) and len(indptr) == len(last_page_len) + 1
            assert ((last_page_len > 0) & (last_page_len <= page_size)).all() and (indptr.diff() > 0).all()
            assert num_qo_heads % num_kv_heads == 0 and head_dim in (64, 128, 256) and sm_scale is None
            shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
            self._plan = (indptr.tolist(), indices, last_page_len, *shape, q_data_type, kv_data_type or q_data_type)
            type(self).made += 1

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
            """The lse is a logarithm to the base 2, (E, heads)."""
            ends, indices, last, heads, kv_heads, width, page, *dtypes = self._plan
            k, v = paged_kv_cache
            check(q, k, v)
            assert [q.dtype, k.dtype] == dtypes and q.shape == (len(last), heads, width)
            assert k.shape == v.shape and k.shape[1:] == (page, kv_heads, width) and k.stride() == v.stride()
            counts = torch.tensor(ends).diff().sub(1).mul(page) + last
            places = [indices[start:stop].tolist() for start, stop in zip(ends, ends[1:], strict=False)]
            most = max(map(len, places))
            table = torch.tensor([[*each, *[0] * (most - len(each))] for each in places])
            out, lse = forward_pages(q[:, None], k, v, counts, table, width**-0.5)
            return (out[:, 0], lse[..., 0] / math.log(2)) if return_lse else out[:, 0]

    class mla:  # noqa: N801  # a module there
        """Latent keys in pages, by the rules of flashinfer/mla/_core.py."""

        class BatchMLAPagedAttentionWrapper:
            """The latent and the rotated part of keys and queries are apart; `made` counts plans."""

            made = 0

            def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False) -> None:
                assert float_workspace_buffer.nbytes == 128 * 2**20 and not use_cuda_graph

            def plan(
                self,
                qo_indptr: Tensor,
                kv_indptr: Tensor,
                kv_indices: Tensor,
                kv_len_arr: Tensor,
                num_heads: int,
                head_dim_ckv: int,
                head_dim_kpe: int,
                page_size: int,
                causal: bool,
                sm_scale: float,
                q_data_type: torch.dtype,
                kv_data_type: torch.dtype,
            ) -> None:
                """All in int32. One query token an entry here."""
                given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
                assert all(x.dtype == torch.int32 for x in given) and (qo_indptr.diff() == 1).all() and not causal
                assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and kv_indptr[-1] == len(kv_indices)
                assert (kv_indptr.diff() == -(-kv_len_arr // page_size)).all()
                self._plan = (kv_indptr.tolist(), kv_indices, kv_len_arr, page_size, sm_scale)
                self._shapes = (num_heads, head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type)
                type(self).made += 1

            def run(
                self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, return_lse: bool = False
            ) -> Any:
                """The lse is a logarithm to the base 2, (E, heads)."""
                (ends, indices, counts, page, scale), (heads, ckv, kpe, *dtypes) = self._plan, self._shapes
                assert q_nope.shape == (len(counts), heads, ckv) and q_pe.shape == (len(counts), heads, kpe)
                assert ckv_cache.shape[1:] == (page, ckv) and kpe_cache.shape == (len(ckv_cache), page, kpe)
                assert [q_nope.dtype, ckv_cache.dtype] == dtypes == [q_pe.dtype, kpe_cache.dtype]
                assert {x.stride(-1) for x in (q_nope, q_pe, ckv_cache, kpe_cache)} == {1}
                q, k = torch.cat([q_nope, q_pe], -1)[:, None], torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]
                places = [indices[start:stop].tolist() for start, stop in zip(ends, ends[1:], strict=False)]
                most = max(map(len, places))
                table = torch.tensor([[*each, *[0] * (most - len(each))] for each in places])
                out, lse = forward_pages(q, k, ckv_cache[:, :, None], counts, table, scale)
                return (out[:, 0], lse[..., 0] / math.log(2)) if return_lse else out[:, 0]


class FlashMlaModule(ModuleType):
    """flash_mla of 2026, with the rules of csrc/api/dense_decode.h."""

    class FlashMLASchedMeta:
        """Made anew by get_mla_metadata; it is for the shapes and lengths of its first call alone."""

        config: tuple[Any, ...] = ()

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
        """Take arguments, of which releases before needed some."""
        vars(self)["made"] = vars(self).get("made", 0) + 1
        return self.FlashMLASchedMeta(), None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(out (E, S, H, 512), natural lse (E, H, S))."""
        assert num_splits is None and q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32 and block_table.stride(-1) == 1
        assert q.stride(-1) == k_cache.stride(-1) == 1 and q.shape[3] in (512, 576) and head_dim_v == 512
        assert k_cache.shape[1:] == (64, 1, q.shape[3]) and len(block_table) == len(cache_seqlens) == len(q) > 0
        config = (*q.shape, tuple(cache_seqlens.tolist()), causal)
        assert tile_scheduler_metadata.config in ((), config), "inconsistent with sched_meta"
        tile_scheduler_metadata.config = config
        assert not causal
        return forward_pages(
            q, k_cache, k_cache[..., :head_dim_v], cache_seqlens, block_table, softmax_scale or q.shape[3] ** -0.5
        )


@contextmanager
def installed(name: str) -> Iterator[None]:
    """While it lasts, the kernel of that name finds what it calls."""
    with _INSTALL[name]():
        yield


@contextmanager
def _aten(operator: str, run: Callable, run_backward: Callable) -> Iterator[None]:
    """CPU kernels for operators that torch has for GPUs only, behind their own schemas."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, run, "CPU")
    library.impl(f"{operator}_backward", run_backward, "CPU")
    if operator == "_scaled_dot_product_flash_attention":
        library.impl("_flash_attention_forward", aten_varlen_forward, "CPU")
        library.impl("_flash_attention_backward", aten_varlen_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def _module(module: ModuleType) -> Iterator[None]:
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


@contextmanager
def _fa3() -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    if not hasattr(torch.ops.flash_attn_3, "fwd"):  # the real package is not here
        library.define(FA3_FWD)
        library.define(FA3_BWD)
    library.impl("fwd", fa3_forward, "CPU")
    library.impl("bwd", fa3_backward, "CPU")
    try:
        with _module(ModuleType("flash_attn_interface")):
            yield
    finally:
        library._destroy()


_INSTALL: dict[str, Callable[[], Any]] = {
    "aten_flash": lambda: _aten("_scaled_dot_product_flash_attention", aten_flash_forward, aten_flash_backward),
    "cudnn": lambda: _aten("_scaled_dot_product_cudnn_attention", cudnn_forward, cudnn_backward),
    "flash_attn": lambda: _module(FlashAttnInterface("flash_attn.flash_attn_interface")),
    "flash_attn_3": _fa3,
    "flash_attn_4": lambda: _module(CuteInterface("flash_attn.cute.interface")),
    "flashinfer": lambda: _module(FlashInferModule("flashinfer")),
    "flash_mla": lambda: _module(FlashMlaModule("flash_mla")),
}
OF_CACHES = ("flash_attn", "flash_attn_3", "flashinfer")
"""Those that read pages."""
OF_LATENTS = ("flash_mla", "flash_attn_3", "flashinfer")
"""Those that take latent keys with values that are a part of them."""
FAKED = sorted({*_INSTALL} - {"flashinfer", "flash_mla"})
"""Those of blocks, forward and backward."""
