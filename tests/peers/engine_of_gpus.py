"""Transformer Engine in small: DotProductAttention with the package's arguments, on CPUs, from gathered tensors.

It takes what the package takes, and nothing else: a rank has chunks r and 2n - 1 - r of 2n, by its place in cp_group.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

from sp_bench.plan.layout import LAYOUTS
from sp_bench.run.sharding import positions


class DotProductAttention(torch.nn.Module):
    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Any = None, bottom_right_diagonal: bool | None = None, sequence_parallel: bool = False,
        tp_size: int = 1, get_rng_state_tracker: Any = None, tp_group: Any = None, layer_number: int | None = None,
        attention_type: str = "self", cp_group: Any = None, cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None, cp_comm_type: str = "p2p", softmax_scale: float | None = None,
        softmax_type: str = "vanilla", return_max_logit: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (qkv_format, attention_dropout, cp_stream) == ("bshd", 0.0, None)
        assert attn_mask_type in ("causal", "no_mask")
        hierarchical = cp_comm_type == "a2a+p2p"
        assert hierarchical == isinstance(cp_group, list)
        assert cp_comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p")
        inner, outer = cp_group if hierarchical else (None, cp_group)
        self._inner_size, place = (dist.get_world_size(inner), dist.get_rank(inner)) if hierarchical else (1, 0)
        self._rank = dist.get_rank(outer) * self._inner_size + place
        self._n = dist.get_world_size(outer) * self._inner_size
        assert cp_global_ranks is not None
        assert (len(cp_global_ranks), cp_global_ranks[self._rank]) == (self._n, dist.get_rank())
        if "a2a" in cp_comm_type:
            split = self._inner_size if hierarchical else self._n
            assert num_attention_heads % split == (num_gqa_groups or num_attention_heads) % split == 0
        self._shape = (num_attention_heads, kv_channels), (num_gqa_groups or num_attention_heads, kv_channels)
        self._causal = attn_mask_type == "causal"

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, *_: Any) -> Tensor:
        assert (query_layer.shape[2:], key_layer.shape[2:]) == self._shape
        assert query_layer.shape[1] % 2 == 0
        n, tokens = self._n, query_layer.shape[1]
        k, v = (torch.cat(all_gather(x.contiguous(), dist.group.WORLD), dim=1) for x in (key_layer, value_layer))
        keys = torch.cat([positions(LAYOUTS["zigzag"], rank, n, n * tokens) for rank in range(n)])
        mine = positions(LAYOUTS["zigzag"], self._rank, n, n * tokens)
        seen = keys[None] <= mine[:, None] if self._causal else None
        heads = query_layer.shape[2]
        q, k, v = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (query_layer, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


def install() -> None:
    """Put it in the package's place in this process."""
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"transformer_engine": package, "transformer_engine.pytorch": module}
