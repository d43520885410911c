"""A batch of whole sequences: its documents, what every rank must have alike, and this rank's tokens of it."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.integrations.layer_masks import Sees
from sp_bench.run.attention import SequenceParallelAttention
from sp_bench.run.sharding import positions, shard, unshard

IGNORED = -100
"""The label of a token that has no next one, as Hugging Face has it."""
MOST_SHOWN = 4
MOST_OUTPUTS = 8
"""Logits that are remembered with their batch."""


class Batch:
    """The facts of a batch that a model's layers and its loss need; a keyword argument of the model carries it.

    Not a dataclass: FSDP would copy it field by field.
    """

    def __init__(self, lengths: tuple[int, ...], rows: int, attention: SequenceParallelAttention) -> None:
        """`lengths` are those of the documents of one row; `rows` is 0, or how many were laid end to end in it."""
        self.lengths, self.rows, self.attention = lengths, rows, attention
        self.seqlen = sum(lengths)
        self._under: dict[Sees, SequenceParallelAttention] = {}
        self.labels: Tensor | None = None
        """This rank's labels, shifted: (B, S)."""
        self.count = 0
        """The labels of all ranks."""
        self.first_position = 0

    def gather(self, x: Tensor) -> Tensor:
        """The whole of what ranks have by token, in the rows that were given: (B, S, ...) -> (B, seqlen, ...)."""
        attention = self.attention
        whole = unshard(x, attention.layout, attention.group, attention.n)
        return whole.reshape(self.rows, -1, *whole.shape[2:]) if self.rows else whole

    def under(self, sees: Sees) -> SequenceParallelAttention:
        """The attention of layers that see so much. Raises RequestError for a mask that the suite doesn't have."""
        if sees not in self._under:
            self._under[sees] = self.attention.under(sees.mask(self.lengths))
        return self._under[sees]

    @property
    def told(self) -> tuple[Any, ...]:
        """A key that differs for batches whose tokens are assigned to ranks in different ways."""
        return self.seqlen, self.rows, self.attention.layout

    @property
    def tokens(self) -> int:
        """S, the tokens of this rank."""
        attention = self.attention
        return int(attention.layout.tokens(attention.rank, attention.n, self.seqlen))

    def last_positions(self) -> list[int]:
        """The greatest position in a document that each rank has."""
        attention, whole = self.attention, torch.cat([torch.arange(length) for length in self.lengths])
        ranks = range(attention.n)
        last = [int(whole[positions(attention.layout, r, attention.n, self.seqlen)].max()) for r in ranks]
        return [self.first_position + position for position in last]

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens: (B, seqlen) -> (B, S)."""
        return shard(x, self.attention.layout, self.attention.rank, self.attention.n)


def documents(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """The lengths of each row's documents: (B, seqlen). Raises RequestError if positions don't count on from 0."""
    if position_ids.ndim != 2:
        rule = f"has shape {tuple(position_ids.shape)}, and documents are told by one position for each token"
        raise RequestError("position_ids", rule, "(1, seqlen), or (B, seqlen) for rows that differ, would work")
    return tuple(_lengths(row) for row in position_ids.cpu())


def _lengths(positions_S: Tensor) -> tuple[int, ...]:
    begins = (positions_S == 0).nonzero().flatten().tolist()
    edges = [*begins, positions_S.numel()]
    lengths = tuple(stop - start for start, stop in zip(edges[:-1], edges[1:], strict=True))
    counted = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.empty(0)
    if not torch.equal(counted, positions_S):
        rule = "must count on from 0 in every document of the whole sequence"
        raise RequestError("position_ids", rule, "[0, 1, 2, 0, 1] would work for documents of 3 and 2 tokens")
    return lengths


def shifted(labels: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The label of each token is the next one's, but for the last of a document: (B, seqlen)."""
    shifted_labels = torch.full_like(labels, IGNORED)
    shifted_labels[:, :-1] = labels[:, 1:]
    shifted_labels[:, torch.tensor(lengths, device=labels.device).cumsum(0) - 1] = IGNORED
    return shifted_labels


def in_words(input_ids: Tensor, labels: Tensor | None, lengths: tuple[tuple[int, ...], ...]) -> str:
    """The shape, documents and tokens of a batch, which all ranks must have alike."""
    rows = set(lengths)
    told = "rows that differ" if len(rows) > 1 else f"{_shown(next(iter(rows), ()))}"
    tensors = [x.detach().cpu().contiguous() for x in (input_ids, labels) if x is not None]
    content = hashlib.blake2b(b"".join([repr(lengths).encode(), *(x.numpy().tobytes() for x in tensors)]))
    return f"input_ids {tuple(input_ids.shape)} with documents of {told} tokens (contents {content.hexdigest()[:8]})"


def _shown(lengths: tuple[int, ...]) -> str:
    more = f" and {len(lengths) - MOST_SHOWN} more" if len(lengths) > MOST_SHOWN else ""
    return ", ".join(map(str, lengths[:MOST_SHOWN])) + more


_outputs: list[tuple[ref[Tensor], Batch]] = []
"""Logits, and the batch that they are of, as long as they live."""


def remember(logits: Tensor, batch: Batch) -> None:
    """Take note of which batch a model's logits are."""
    _outputs[:] = [each for each in _outputs if each[0]() is not None][1 - MOST_OUTPUTS :]
    _outputs.append((ref(logits), batch))


def batch_of(x: Tensor) -> Batch | None:
    """The batch that a tensor is of, if it is a model's logits or a view of them."""
    for output, batch in reversed(_outputs):
        known = output()
        if known is not None and known.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return batch
    return None


def batch_in(given: Any) -> Any:
    """The batch among what `shard` returned, or the batch itself."""
    return next((x for x in given.values() if isinstance(x, Batch)), None) if isinstance(given, dict) else given
