"""Hugging Face models with sequence-parallel attention: `attn_implementation="sp_bench"`.

    parallel = register("mesh", tile=(2, 2))               # in each rank of torch.distributed
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sp_bench")
    loss = model(**parallel.deal(input_ids)).loss          # this rank's part: those of all ranks add up
    loss.backward()                                        # then sum the gradients over the ranks

Every rank passes the whole batch to `deal` and gets its own tokens of it. Labels are shifted before tokens are dealt,
and the loss is divided by the number of labels of all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.plan.documents import Documents
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.run.attention import SequenceParallelAttention
from sp_bench.run.sharding import shard

NAME = "sp_bench"
"""The value of attn_implementation."""
IGNORED = -100
"""The label of a token that has no next one, as Hugging Face has it."""
NOT_DONE = ("softcap", "s_aux", "position_bias")
"""Arguments of a model's attention that change its result."""


class Parallel:
    """A method on a group of ranks, and the documents of the batch under way."""

    def __init__(self, method: str, group: dist.ProcessGroup | None, options: dict[str, Any]) -> None:
        """Raises RequestError for an unknown method or option."""
        self._method, self._group, self._options = method, group, options
        self._attentions: dict[Mask, SequenceParallelAttention] = {}
        self._causal: Mask = CAUSAL
        """The mask of causal layers: that of the documents which were dealt last."""
        self._seqlen: int | None = None
        self.attention(CAUSAL)

    def attention(self, mask: Mask) -> SequenceParallelAttention:
        """The method's attention under a mask."""
        if mask not in self._attentions:
            made = SequenceParallelAttention(self._method, mask=mask, group=self._group, **self._options)
            self._attentions[mask] = made
        return self._attentions[mask]

    def deal(
        self, input_ids: Tensor, *, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """This rank's arguments of a causal language model, of a whole batch (B, seqlen).

        `labels` are not shifted, and are the input_ids by default. Where `position_ids` (1, seqlen) begin again at 0, a
        packed document begins. Raises RequestError if they are not those of packed documents, or too few tokens.
        """
        seqlen = input_ids.shape[1]
        whole = torch.arange(seqlen, device=input_ids.device)[None]
        position_ids = whole if position_ids is None else position_ids[:1]
        lengths = _lengths(position_ids[0])
        self._causal, self._seqlen = CAUSAL if len(lengths) == 1 else Documents(lengths), seqlen
        attention = self.attention(self._causal)
        shifted = torch.full_like(input_ids, IGNORED)
        shifted[:, :-1] = (input_ids if labels is None else labels)[:, 1:]
        shifted[:, torch.tensor(lengths).cumsum(0) - 1] = IGNORED
        count = int((shifted != IGNORED).sum())
        ids, shifted, position_ids = (
            shard(x, attention.layout, attention.rank, attention.n) for x in (input_ids, shifted, position_ids)
        )
        given = {"input_ids": ids, "position_ids": position_ids.expand_as(ids), "use_cache": False}
        return given | {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": count}

    def gather(self, x: Tensor) -> Tensor:
        """The whole sequence of what ranks have by token, such as logits: (B, S, ...) -> (B, seqlen, ...)."""
        return self.attention(self._causal).unshard(x)

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """A layer's attention: q (B, H, S, D), k and v (B, kv_heads, S, D) -> (B, S, H, D).

        Raises RequestError for padding, a cache, dropout, or what no method computes.
        """
        self._refuse(query, key, attention_mask, dropout, given)
        causal = given.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if scaling is not None and scaling != query.shape[-1] ** -0.5:
            query = query * (scaling * math.sqrt(query.shape[-1]))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.attention(self._causal if causal else FULL)(q, k, v, seqlen=self._seqlen), None

    def _refuse(
        self, query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float, given: dict[str, Any]
    ) -> None:
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            rule = "padding is not masked: packed documents are told by position_ids that begin again at 0"
            raise RequestError("attention_mask", rule, "deal(input_ids, position_ids=...) would work")
        if query.shape[2] != key.shape[2]:
            rule = f"{query.shape[2]} queries and {key.shape[2]} keys: a cache of keys is not dealt"
            raise RequestError("use_cache=True", rule, "use_cache=False would work")
        if dropout:
            raise RequestError(f"attention_dropout={dropout}", "is not computed", "attention_dropout=0.0 would work")
        window = given.get("sliding_window")
        if window is not None and window < (self._seqlen or query.shape[2]):
            rule = f"is shorter than the sequence of {self._seqlen} tokens, and layers have windows of their own"
            raise RequestError(f"sliding_window={window}", rule, "sliding_window=None would work")
        for name in NOT_DONE:
            if given.get(name) is not None:
                raise RequestError(f"{name}={given[name]}", "is not computed", f"{name}=None would work")


def register(method: str = "mesh", *, group: dist.ProcessGroup | None = None, **options: Any) -> Parallel:
    """Make `attn_implementation="sp_bench"` this method on this group; a later call replaces it.

    `options` are those of SequenceParallelAttention. Raises RequestError for an unknown method or option, and without
    the transformers package.
    """
    require("transformers", "sp_bench.integrations.transformers")
    from transformers import AttentionInterface

    parallel = Parallel(method, group, options)
    AttentionInterface.register(NAME, parallel)
    return parallel


def _lengths(positions_S: Tensor) -> tuple[int, ...]:
    """The lengths of packed documents by their positions. Raises RequestError if they don't count on from 0."""
    begins = (positions_S == 0).nonzero().flatten().tolist()
    edges = [*begins, positions_S.numel()]
    lengths = tuple(stop - start for start, stop in zip(edges[:-1], edges[1:], strict=True))
    counted = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.empty(0)
    if not torch.equal(counted, positions_S.cpu()):
        rule = "must count on from 0 in every document of the whole sequence"
        raise RequestError("position_ids", rule, "[0, 1, 2, 0, 1] would work for documents of 3 and 2 tokens")
    return lengths
