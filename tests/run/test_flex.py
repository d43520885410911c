"""Packs on one rank against torch's flex_attention with a document mask: forward, as it has no backward on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sp_bench import SequenceParallelAttention, documents
from tests.support.attention_cases import difference, relative
from tests.support.bounds import FLOORS

PACKS = (
    ([40, 1, 23], True, (None, None)),
    ([7, 30, 27], False, (None, None)),
    ([33, 31], True, (9, None)),
    ([64], False, (5, 3)),
)


def mask_mod(lengths: list[int], causal: bool, window: tuple[int | None, int | None]) -> Callable[..., Tensor]:
    """Whether a query sees a key, from document ids, as flex_attention asks for it."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    left, right = (10_000 if side is None else side for side in window)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key <= left) & (key - query <= (0 if causal else right))
        return (ids[query] == ids[key]) & near

    return sees


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("lengths", "causal", "window"), PACKS)
def test_agreement_on_one_rank(
    lengths: list[int], causal: bool, window: tuple[int | None, int | None], kv_heads: int
) -> None:
    source, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v = (torch.randn(2, tokens, heads, 16, generator=source) for heads in (4, kv_heads, kv_heads))
    ours = SequenceParallelAttention("ring", mask=documents(lengths, causal=causal, window=window))(q, k, v)
    block_mask = create_block_mask(mask_mod(lengths, causal, window), None, None, tokens, tokens, device="cpu")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    theirs = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert isinstance(theirs, Tensor)
    assert relative([difference(ours, theirs.transpose(1, 2).double())]) <= FLOORS["float32"]
