"""The mask of a composed config: its keys mask, causal, window, chunk and the group data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from msgspec import Meta

from sp_bench.errors import RequestError, unknown
from sp_bench.packing import documents, histories_of, lengths_of
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.mask import CAUSAL, FULL, MASKS, Mask, WholeMask
from sp_bench.reading import Natural, Tokens, read

Sides = Annotated[
    tuple[Natural | None, Natural | None],
    Meta(description="two numbers of tokens, or null for no limit", examples=["[4095,0]"]),
]
OF_MASKS = {"data": ("document",), "window": ("document", "window"), "chunk": ("chunked",)}
"""The masks that each of these keys says something about."""


def mask_of(config: Mapping[str, Any], seed: int, seqlen: int, kv_seqlen: int | None = None) -> Mask:
    """The mask of so many queries, which are the last of kv_seqlen keys if these are more; documents say themselves
    how many tokens are before theirs.

    Raises RequestError if it is unknown, lacks what it needs, or is contradicted by another key.
    """
    name = str(config["mask"])
    if name not in (*MASKS, Documents.name, Window.name, Chunked.name):
        raise unknown("mask", name, [*MASKS, Documents.name, Window.name, Chunked.name])
    for key, masks in OF_MASKS.items():
        given = config["data"]["kind"] if key == "data" else config[key]
        if given not in (None, "none") and name not in masks:
            would_work = f"mask={' or mask='.join(masks)} would work"
            raise RequestError(
                key if key == "data" else f"{key}={given}", f"says nothing about mask={name}", would_work
            )
    causal = None if config["causal"] is None else read(bool, config["causal"], "causal")
    if name in MASKS:
        return _whole(name, causal)
    cached = max((kv_seqlen or seqlen) - seqlen, 0)
    if name == Chunked.name:
        if config["chunk"] is None:
            raise RequestError("chunk=null", "mask=chunked needs it", "chunk=8k would work")
        return Chunked.of(read(Tokens, config["chunk"], "chunk"), seqlen, causal=causal is not False, cached=(cached,))
    left, right, causal = _window(config["window"], causal)
    if name == Documents.name:
        lengths, histories = lengths_of(config["data"], seqlen, seed), histories_of(config["data"])
        return documents(lengths, causal=causal, window=(left, right), histories=histories)
    if config["window"] is None:
        raise RequestError("window=null", "mask=window needs it", "window=[4095,0] would work")
    return Window((seqlen,), causal, left, right).behind([(cached,)])


def described(mask: Mask) -> dict[str, Any]:
    """The fields of a record that describe a mask."""
    if isinstance(mask, WholeMask):
        return {"mask": mask.name, "causal": mask.causal}
    assert isinstance(mask, Packed)
    window = [mask.left, 0 if mask.causal else mask.right] if mask.windowed else None
    pack = {"documents": len(mask.lengths), "longest_document": max(mask.queries)} if mask.name == "document" else {}
    return {"mask": mask.name, "causal": mask.causal, "window": window, **pack}


def identified(mask: Mask) -> dict[str, Any]:
    """A mask's part of a run_id, in place of the keys that it was made of."""
    numbers = [getattr(mask, each.name) for each in fields(mask)] if isinstance(mask, Packed) else None
    return {"mask": [mask.name, numbers], "causal": None, "data": None, "window": None, "chunk": None}


def _whole(name: str, causal: bool | None) -> Mask:
    """A mask of the whole sequence, which `causal` may say too."""
    short = MASKS[name] if causal is None else CAUSAL if causal else FULL
    if MASKS[name] not in (short, CAUSAL):
        rule = f"is short for mask={short.name}, beside mask={name}"
        raise RequestError(f"causal={causal}", rule, "one of them would work")
    return short


def _window(sides: Any, causal: bool | None) -> tuple[int | None, int | None, bool]:
    """(left, right, causal) of the window inside which queries see keys. It is causal unless it looks ahead."""
    if sides is None:
        return None, None, causal is not False
    left, right = read(Sides, sides, "window")
    if causal and right:
        raise RequestError(
            f"causal=true, window={sides}",
            f"a causal query sees no key behind its own position, and this window has {right} of them",
            f"window=[{'null' if left is None else left},0], or causal=false, would work",
        )
    return left, right, right == 0 if causal is None else causal
