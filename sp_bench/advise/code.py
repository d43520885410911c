"""Python that runs an attention of this suite as advised: the method with its options, the layout and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sp_bench.plan.documents import Chunked, Documents, Packed
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.plan.method import Method
from sp_bench.point.masks import mask_of
from sp_bench.records import Record
from sp_bench.workload.base import SINKS


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The method, layout and options that a setting must run."""

    method: Method
    """With all its options chosen."""
    gpus: int
    layout: str
    """The name of the layout."""
    mask: Mask
    heads: int
    kv_heads: int
    batch: int
    seqlen: int
    kv_seqlen: int | None
    seed: int
    config: Mapping[str, Any]
    """The composed config that the point was asked for with."""

    @classmethod
    def of(cls, method: Method, record: Record) -> Wanted:
        """The point of a record, with the method that was chosen for it."""
        config = record.config or {}
        return cls(
            method=method,
            gpus=record.gpus,
            layout=record.layout or "contiguous",
            mask=mask_of(config, record.seed or 0, record.seqlen, record.kv_seqlen),
            heads=record.heads,
            kv_heads=record.kv_heads,
            batch=record.batch,
            seqlen=record.seqlen,
            kv_seqlen=record.kv_seqlen,
            seed=record.seed or 0,
            config=config,
        )

    @property
    def sinks(self) -> bool:
        """Whether softmaxes have learned scores besides those of keys: a tensor (H,) `sinks`."""
        return self.config.get(SINKS) is True

    @property
    def ulysses(self) -> int:
        """The head-parallel degree."""
        return self.method.head_parallel(self.gpus)

    def splits_heads(self, degree: int) -> bool:
        """Whether so many ranks each get as many whole heads, and whole key heads."""
        return self.heads % degree == 0 and self.kv_heads % degree == 0


def module_code(wanted: Wanted) -> str:
    """Lines that make `attention` and call it with q, k and v of this rank's tokens, as `attention.shard` cuts them."""
    options = {"mask": _mask(wanted)} | _options(wanted)
    given = "".join(f", {name}={value}" for name, value in options.items() if value)
    names = ["SequenceParallelAttention", *(["documents"] if isinstance(wanted.mask, Packed) else [])]
    lines = [f"from sp_bench import {', '.join(names)}"]
    if "lengths_of(" in given:
        lines.append("from sp_bench.packing import lengths_of")
    knows = isinstance(wanted.mask, Packed)  # its lengths
    length = f", seqlen={wanted.seqlen}" if wanted.seqlen % wanted.gpus and not knows else ""
    if wanted.kv_seqlen and not knows:
        length = f", seqlen={wanted.seqlen}, kv_seqlen={wanted.kv_seqlen}"
    length += ", sinks=sinks" if wanted.sinks else ""
    lines += [
        f'attention = SequenceParallelAttention("{wanted.method.name}"{given})',
        f"out = attention(q, k, v{length})",
    ]
    return "\n".join(lines)


def _options(wanted: Wanted) -> dict[str, str]:
    """The options that differ from the defaults, as Python."""
    options = _chosen(wanted)
    options["wire_dtype"] = wanted.config.get("wire_dtype")
    kernel = (wanted.config.get("kernel") or {}).get("name")
    options["kernel"] = None if kernel == "auto" else kernel
    return {name: repr(value).replace("'", '"') for name, value in options.items() if value is not None}


def command_options(wanted: Wanted) -> list[str]:
    """The method and its chosen options as keys of `python -m sp_bench`."""
    words = (f"method.{name}={_as_key(value)}" for name, value in _chosen(wanted).items() if value is not None)
    return [f"method={wanted.method.name}", *words]


def _chosen(wanted: Wanted) -> dict[str, Any]:
    """The method's options that differ from their defaults, and its layout where there are several."""
    method = wanted.method
    options = {f.name: vars(method)[f.name] for f in fields(method)}
    options = {f.name: options[f.name] for f in fields(method) if options[f.name] not in (f.default, "auto")}
    return options | ({"layout": wanted.layout} if len(method.layouts) > 1 else {})


def _as_key(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_as_key, value)) + "]"
    return str(value)


def _mask(wanted: Wanted) -> str:
    """The mask as Python; empty for the causal one, which is the default."""
    mask = wanted.mask
    if not isinstance(mask, Packed):
        return "" if mask == CAUSAL else f'"{mask.name}"'
    causal = "" if mask.causal else ", causal=False"
    sides = (mask.left, 0 if mask.causal else mask.right)
    window = f", window={sides}" if mask.windowed else ""
    cached = map(sum, mask.cached)
    if isinstance(mask, Chunked):  # of the first chunk what is cached in it
        cached = [keys - new for keys, new in zip(mask.lengths, mask.queries, strict=True)]
    histories = f", histories={[*cached]}" if mask.new else ""
    return f"documents({_lengths(wanted, mask)}{causal}{window}{histories})"


def _lengths(wanted: Wanted, mask: Packed) -> str:
    """The documents' lengths; those that are drawn or read from a file by what draws or reads them."""
    data = wanted.config.get("data") or {}
    if isinstance(mask, Documents) and data.get("kind") != "lengths":
        return f"lengths_of({data!r}, {wanted.seqlen}, {wanted.seed})"
    if isinstance(mask, Chunked) and not mask.new:
        first, rest = mask.lengths[0], mask.seqlen % mask.lengths[0]
        return f"[{first}] * {mask.seqlen // first}" + (f" + [{rest}]" if rest else "")
    return str(list(mask.queries))
