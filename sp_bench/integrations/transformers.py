"""Hugging Face models with sequence-parallel attention: `attn_implementation="sp_bench"`.

    parallel = register("mesh", tile=(2, 2))               # in each rank of torch.distributed
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sp_bench")
    loss = model(**parallel.shard(input_ids)).loss          # this rank's part: those of all ranks add up
    loss.backward()                                        # then sum the gradients over the ranks

Every rank passes the whole batch to `shard` and gets its own tokens of it. Labels are shifted before tokens are
sharded, and the loss is divided by the number of labels of all ranks. What `shard` returns carries the batch's
documents to the layers, so that batches may be under way together.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.integrations.batches import IGNORED, Batch, batch_in, batch_of, documents, in_words, shifted
from sp_bench.integrations.layer_masks import OTHERWISE, Sees, mask_function, refuse_padding
from sp_bench.integrations.layers import NAME, refuse_cross
from sp_bench.integrations.models import under_way, watch
from sp_bench.plan.documents import Documents
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.run.attention import SequenceParallelAttention
from sp_bench.run.calls import agreement_of
from sp_bench.run.groups import world

NOT_DONE = ("softcap", "position_bias", "attention_bias", "head_mask", "indices", "block_indices")
"""Arguments of a model's attention that change its result."""
RULE = "every rank passes the whole batch and gets its own tokens of it, so that all must have the same one"
MOST_MASKS = 16
"""Masks, and lengths, whose layouts are kept."""


class Parallel:
    """A method on a group of ranks."""

    def __init__(self, method: str, group: dist.ProcessGroup | None, options: dict[str, Any]) -> None:
        """Raises RequestError for an unknown method or option."""
        self._whole = SequenceParallelAttention(method, mask=CAUSAL, group=group, **options)
        self._method, self._group, self._options = method, group, options
        self._attentions: OrderedDict[Mask, SequenceParallelAttention] = OrderedDict()
        self._agreement = agreement_of(group or world(), "batches") if self._whole.n > 1 else None
        self._sharded: OrderedDict[int, Batch | None] = OrderedDict()
        """Tokens of this rank -> a batch with so many; None if they were sharded in several ways."""
        self._met: set[int] = set()
        """Numbers of this rank's tokens in sequences that the caller sharded."""

    def attention(self, mask: Mask) -> SequenceParallelAttention:
        """The method's attention under a mask, of tokens sharded as suits it."""
        if mask not in self._attentions:
            made = SequenceParallelAttention(self._method, mask=mask, group=self._group, **self._options)
            made.share(self._whole)
            self._attentions[mask] = made
        self._attentions.move_to_end(mask)
        while len(self._attentions) > MOST_MASKS:
            self._attentions.popitem(last=False)
        return self._attentions[mask]

    def shard(
        self, input_ids: Tensor, *, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """This rank's arguments of a causal language model, of a whole batch (B, seqlen). All ranks must call it.

        `labels` are not shifted, and are the input_ids by default. Where `position_ids` (1 or B, seqlen) begin again at
        0, a packed document begins; rows with different documents are laid end to end in one. Raises RequestError on
        all ranks if positions are not those of packed documents, if there are too few tokens, or if ranks have
        different batches.
        """
        batch: Batch | None = None
        try:
            labels = input_ids if labels is None else labels
            rows = documents(position_ids) if position_ids is not None else ((input_ids.shape[1],),)
            _refuse_shapes(input_ids, labels, position_ids)
            batch = self._batch(rows)
            batch.attention.positions(batch.seqlen)  # refuses too few tokens
            mine: str | RequestError = in_words(input_ids, labels, rows)
        except RequestError as error:
            mine = error
        if self._agreement:
            self._agreement.make(mine, RULE, "the same on all ranks (no sampler that splits data) would work")
        if isinstance(mine, RequestError):
            raise mine
        assert batch is not None
        assert labels is not None
        if batch.rows:
            input_ids, labels = input_ids.reshape(1, -1), labels.reshape(1, -1)
        whole = shifted(labels, batch.lengths)
        batch.count = int((whole != IGNORED).sum())
        batch.labels = batch.shard(whole)
        positions = torch.cat([torch.arange(length, device=input_ids.device) for length in batch.lengths])[None]
        ids = batch.shard(input_ids)
        self._note(Batch(batch.lengths, batch.rows, batch.attention))
        return {
            "input_ids": ids,
            "position_ids": batch.shard(positions).expand_as(ids),
            "use_cache": False,
            "labels": batch.labels,
            "shift_labels": batch.labels,
            "num_items_in_batch": batch.count,
            NAME: batch,
        }

    def _batch(self, rows: tuple[tuple[int, ...], ...]) -> Batch:
        differ = len(set(rows)) > 1
        lengths = tuple(length for row in rows for length in row) if differ else rows[0]
        attention = self.attention(CAUSAL if len(lengths) == 1 else Documents(lengths))
        return Batch(lengths, len(rows) if differ else 0, attention)

    def gather(self, x: Tensor, sharded: dict[str, Any] | Batch | None = None) -> Tensor:
        """The whole sequence of what ranks have by token, such as logits: (B, S, ...) -> (B, seqlen, ...).

        `sharded` is what `shard` returned for the batch. Without it, `x` must be a model's logits, or all batches so
        far must be sharded alike. Raises RequestError if that is not so.
        """
        batch = batch_in(sharded) or batch_of(x) or self._alike(x)
        if batch is None:
            rule = f"batches with {x.shape[1]} tokens a rank were sharded in several ways, and this may be of any"
            raise RequestError(
                f"gather of {tuple(x.shape)}", rule, "gather(x, sharded), with what shard returned, would work"
            )
        return batch.gather(x)

    def _alike(self, x: Tensor) -> Batch | None:
        """A batch sharded as all with so many tokens a rank were; None if they differ, or were too many to know."""
        if not self._sharded:
            return Batch((x.shape[1] * self._whole.n,), 0, self._whole)
        return self._sharded.get(x.shape[1])

    def _note(self, batch: Batch) -> None:
        """Keep how a batch is sharded, or that batches with so many tokens differ."""
        before = self._sharded.setdefault(batch.tokens, batch)
        if before is not None and before.told != batch.told:
            self._sharded[batch.tokens] = None
        self._sharded.move_to_end(batch.tokens)
        while len(self._sharded) > MOST_MASKS:
            self._sharded.popitem(last=False)

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Sees | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """A layer's attention: q (B, H, S, D), k and v (B, kv_heads, S, D) -> (B, S, H, D).

        Raises RequestError for padding, a cache, dropout, or what no method computes.
        """
        if getattr(module, "is_cross_attention", False):
            refuse_cross(type(module).__name__, "is_cross_attention")
        _refuse(query, key, dropout, given)
        sees = _sees(module, attention_mask, given)
        batch = self._batch_of(module, query, given)
        if batch is None:
            attention, seqlen = self._whole.under(sees.mask((query.shape[2] * self._whole.n,))), None
        else:
            attention, seqlen = batch.under(sees), batch.seqlen
        if scaling is not None and scaling != query.shape[-1] ** -0.5:
            query = query * (scaling * math.sqrt(query.shape[-1]))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, seqlen=seqlen, sinks=_sinks(given)), None

    def _batch_of(self, module: torch.nn.Module, query: Tensor, given: dict[str, Any]) -> Batch | None:
        """The batch that the layer was told of; None if the caller sharded tokens without `shard`."""
        told, call = given.get(NAME), under_way.get()
        if told is None and call is not None:
            batch = call.batch
            if batch is not None and (len(batch.lengths) > 1 or batch.seqlen % self._whole.n):
                rule = "passes no keyword arguments on to its attention, so that it isn't told of documents and lengths"
                would_work = f"one document, whose length {self._whole.n} divides, would work"
                raise RequestError(type(module).__name__, rule, would_work)
            told = batch
        if told is not None and query.shape[2] != (mine := told.tokens):
            rule = f"this rank has {mine} tokens of the batch: the layer is not one of those that see sharded tokens"
            would_work = (
                f'attn_implementation={{"text_config": "{NAME}"}}, which leaves out towers of images, would work'
            )
            raise RequestError(f"{type(module).__name__} on {query.shape[2]} tokens", rule, would_work)
        return told

    def batch_of_caller(self, tokens: int, position_ids: Tensor | None) -> Batch:
        """The one sequence of which a caller has sharded so many tokens to this rank by himself.

        Raises RequestError if their positions are not those of this rank's tokens; on all ranks if `tokens` is new.
        """
        batch = Batch((tokens * self._whole.n,), 0, self._whole)
        if self._agreement is None or (position_ids is not None and position_ids.ndim != 2):
            return batch
        mine = self._whole.positions(batch.seqlen)
        given = torch.arange(tokens)[None] if position_ids is None else position_ids.cpu()
        batch.first_position = int(given[0, 0] - mine[0])
        said: str | RequestError = f"position_ids from {batch.first_position} on"
        if position_ids is None or batch.first_position < 0 or not bool((given - batch.first_position == mine).all()):
            rule = "are not those of this rank's tokens, or begin again at 0"
            said = RequestError("position_ids", rule, "model(**shard(input_ids)) would work")
        if tokens not in self._met:
            self._agreement.make(said, "all ranks must number one sequence", "positions(seqlen) of each would work")
            self._met.add(tokens)
        if isinstance(said, RequestError):
            raise said
        return batch


def _refuse_shapes(input_ids: Tensor, labels: Tensor, position_ids: Tensor | None) -> None:
    if input_ids.ndim != 2 or labels.shape != input_ids.shape:
        rule = "must be (B, seqlen), and of one shape"
        raise RequestError(f"input_ids {tuple(input_ids.shape)}, labels {tuple(labels.shape)}", rule, "that would work")
    if position_ids is not None and position_ids.shape not in ((1, input_ids.shape[1]), input_ids.shape):
        value, rule = f"position_ids {tuple(position_ids.shape)}", f"input_ids are {tuple(input_ids.shape)}"
        raise RequestError(value, rule, "(1, seqlen), or (B, seqlen) for rows that differ, would work")


def _sees(module: torch.nn.Module, attention_mask: Tensor | Sees | None, given: dict[str, Any]) -> Sees:
    """The keys that a layer's queries see: by the model's mask or, where it makes none, by what the layer says."""
    if isinstance(attention_mask, Sees):
        return attention_mask
    refuse_padding(attention_mask)
    if attention_mask is not None and attention_mask.ndim != 2:
        rule = f"is a tensor of shape {tuple(attention_mask.shape)}, for the tokens of this rank only"
        raise RequestError("attention_mask", rule, f"no mask, or {OTHERWISE}")
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window, chunk = given.get("sliding_window"), getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if window is not None and not causal:
        return Sees(unknown=f"a window of {window} tokens to both sides")
    return Sees(bool(causal), None if window is None else int(window) - 1, chunk=chunk if causal else None)


def _sinks(given: dict[str, Any]) -> Tensor | None:
    """The learned scores that a layer's softmax has besides those of keys, by the names that models give them: (H,)."""
    scores = [x for name in ("s_aux", "sinks") if (x := given.get(name)) is not None]
    if len(scores) > 1:
        raise RequestError("s_aux and sinks", "are two names of one thing", "one of them would work")
    return scores[0] if scores else None


def _refuse(query: Tensor, key: Tensor, dropout: float, given: dict[str, Any]) -> None:
    if query.shape[2] != key.shape[2]:
        rule = f"{query.shape[2]} queries and {key.shape[2]} keys: a cache of keys is not sharded"
        raise RequestError("use_cache=True", rule, "use_cache=False would work")
    if dropout:
        would_work = "model.eval(), training with attention_dropout=0.0, or one process would work"
        raise RequestError(f"attention_dropout={dropout}", "is not computed", would_work)
    for name in NOT_DONE:
        if given.get(name) is not None:
            x = given[name]
            value = f" {tuple(x.shape)}" if isinstance(x, Tensor) else f"={x}"
            raise RequestError(f"{name}{value}", "is not computed, and changes the scores of the layer", OTHERWISE)


def register(method: str = "mesh", *, group: dist.ProcessGroup | None = None, **options: Any) -> Parallel:
    """Make `attn_implementation="sp_bench"` this method on this group; a later call replaces it.

    `options` are those of SequenceParallelAttention. Raises RequestError for an unknown method or option, and without
    the transformers package.
    """
    require("transformers", "sp_bench.integrations.transformers")
    from transformers import AttentionInterface, AttentionMaskInterface

    parallel = Parallel(method, group, options)
    AttentionInterface.register(NAME, parallel)
    AttentionMaskInterface.register(NAME, mask_function)
    watch(parallel.batch_of_caller)
    return parallel
