"""The keys that the queries of a model's layer see: read from the mask function that the model itself composes.

transformers composes a mask of functions of positions (masking_utils) and hands it to the mask function registered for
an attention. That of the suite makes no tensor: it reads what the parts are, and the layer gets a `Sees`. A part that
it doesn't know makes the layer refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.plan.documents import Chunked, Documents, Window
from sp_bench.plan.mask import CAUSAL, FULL, Mask

OTHERWISE = 'attn_implementation="sdpa" on sequences that fit one process would work'
"""An advice that keeps a model's meaning, whatever it is."""


class NoTensor(RequestError, AttributeError):
    """A model does something of its own with the mask of its layers."""


@dataclass(frozen=True)
class Sees:
    """The keys that a query of a layer sees, within its document."""

    causal: bool = False
    left: int | None = None
    """How many keys before its own position; None: all."""
    right: int | None = None
    """How many keys behind its own position; None: all, if not causal."""
    chunk: int | None = None
    """Only keys of the same run of so many tokens."""
    chunks_restart: bool = True
    """Whether every document begins a chunk."""
    unknown: str = ""
    """The part of the mask that was not understood."""

    def __getattr__(self, name: str) -> Any:
        """Raise NoTensor: a model that asks for it would make another mask, of the tokens of one rank."""
        raise NoTensor(f"mask.{name}", "the model makes a mask of its own of that of its layers", OTHERWISE)

    def both(self, other: Sees) -> Sees:
        """The mask under which a query sees what it sees under both."""
        return Sees(
            self.causal or other.causal,
            _least(self.left, other.left),
            _least(self.right, other.right),
            _least(self.chunk, other.chunk),
            self.chunks_restart and other.chunks_restart,
            self.unknown or other.unknown,
        )

    def mask(self, lengths: tuple[int, ...]) -> Mask:
        """The mask of documents of these lengths. Raises RequestError for one that the suite doesn't have."""
        if self.unknown:
            rule = f"{self.unknown}: it is none of causal, full, a window and chunks"
            raise RequestError("the mask that the model makes for its layers", rule, OTHERWISE)
        longest = max(lengths)
        if self.chunk is not None and self.chunk < longest:
            return self._in_chunks(lengths, self.chunk)
        left = None if self.left is None or self.left >= longest - 1 else self.left
        right = None if self.causal or self.right is None or self.right >= longest - 1 else self.right
        if len(lengths) > 1:
            return Documents(lengths, self.causal, left, right)
        if left is None and right is None:
            return CAUSAL if self.causal else FULL
        return Window(lengths, self.causal, left, right)

    def _in_chunks(self, lengths: tuple[int, ...], chunk: int) -> Mask:
        if not self.chunks_restart and len(lengths) > 1:
            rule = f"chunks of {chunk} tokens are counted through all documents by this version of transformers"
            raise RequestError(f"{len(lengths)} documents", rule, "transformers 5, or one document a batch, would work")
        if self.left is not None or self.right is not None:
            raise RequestError(f"chunks of {chunk} tokens with a window", "there is no such mask", OTHERWISE)
        chunks = [Chunked.of(chunk, length, causal=self.causal) for length in lengths]
        if len(chunks) == 1:
            return chunks[0]
        return Documents(tuple(chain.from_iterable(each.lengths for each in chunks)), self.causal)


def _restart() -> bool:
    """Whether transformers begins chunks anew in every document: from version 5 on."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def mask_function(
    *_: Any, mask_function: Callable | None = None, attention_mask: Tensor | None = None, **given: Any
) -> Sees:
    """The function that transformers calls for the mask of layers whose attention is that of the suite.

    Raises RequestError for a padded batch.
    """
    refuse_padding(attention_mask)
    if mask_function is None:
        return Sees(causal=True)  # the default of transformers' own
    if given.get("use_vmap"):
        return Sees(unknown="the model lays a mask of its own over it")
    return _read(mask_function)


def refuse_padding(attention_mask: Tensor | None) -> None:
    """Raise RequestError if some token is padding."""
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and not bool(attention_mask.bool().all()):
        rule = "padding is not masked: documents are packed end to end, and told by position_ids that begin again at 0"
        raise RequestError("attention_mask", rule, "shard(input_ids, position_ids=...) without padding would work")


def _read(function: Callable) -> Sees:
    name = getattr(function, "__qualname__", str(function))
    held = getclosurevars(function).nonlocals if hasattr(function, "__code__") else {}
    match name:
        case "causal_mask_function":
            sees = Sees(causal=True)
        case "bidirectional_mask_function":
            sees = Sees()
        case "and_masks.<locals>.and_mask":
            sees = Sees()
            for part in held["mask_functions"]:
                sees = sees.both(_read(part))
            return sees
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return Sees()  # the documents are the batch's
        case "remap_positions_for_packed_sequence.<locals>.inner_mask":
            return _read(held["mask_function"])
        case "sliding_window_overlay.<locals>.inner_mask":
            sees = Sees(left=int(held["sliding_window"]) - 1)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            sees = Sees(left=int(held["sliding_window"]), right=int(held["sliding_window"]))
        case "chunked_overlay.<locals>.inner_mask" | "_legacy_chunked_overlay.<locals>.inner_mask":
            return Sees(chunk=int(held["chunk_size"]), chunks_restart=_restart())
        case _:
            return Sees(unknown=f"a part of it is {name}")
    return sees if _is(function, sees) else Sees(unknown=f"{name} is not what it was")


def _is(function: Callable, sees: Sees) -> bool:
    """Whether a part of a mask sees what was read of it, at and beside the edges."""
    edges = [0, *(x for side in (sees.left, sees.right) if side is not None for x in (side, -side))]
    apart = torch.tensor(sorted({edge + by for edge in edges for by in (-1, 0, 1)}))
    query = int(apart.abs().max()) + 1
    wanted = torch.ones_like(apart, dtype=torch.bool)
    if sees.causal:
        wanted &= apart <= 0
    if sees.left is not None:
        wanted &= apart >= -sees.left
    if sees.right is not None:
        wanted &= apart <= sees.right
    answers = function(0, 0, torch.tensor(query), query + apart)
    return bool((answers == wanted).all())
