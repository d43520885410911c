"""A step's FLOPs and the device's peak, from a record's fields alone: what its rates are checked against.

They are found anew, and not by the code that wrote the record (account.model_flops, workload.model).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from sp_bench.cluster.device import same_model
from sp_bench.errors import RequestError
from sp_bench.packing import documents, histories_of, lengths_of
from sp_bench.plan.documents import Chunked, Documents, Window
from sp_bench.plan.problem import PRODUCTS, flops_per_pair
from sp_bench.reading import Tokens, read
from sp_bench.records.record import Record
from sp_bench.resources import CONF, conf_content

MATRICES = {"forward": 1.0, "backward": 2.0, "forward_backward": 3.0}
"""FLOPs of a model's matrices in a step over those of its forward, by phase."""


class Peak(NamedTuple):
    """The dense peak of a device in a record's dtype."""

    device: str
    tflops: float


def step_flops(record: Record) -> float | None:
    """The model FLOPs of one step on all GPUs together, from shape, mask and model; None where they can't be told.

    A causal mask counts half, a backward 2.5 times its forward, and what is recomputed nothing.
    """
    if record.phase not in PRODUCTS or record.workload not in ("attention", "train", "dit", "prefill"):
        return None
    try:
        pairs = _pairs(record)
        of_full = _pairs(record, whole=True) if record.full_layers else pairs
    except (KeyError, RequestError, TypeError):
        return None
    if pairs is None or of_full is None:
        return None
    per_pair = flops_per_pair(record.phase, record.head_dim, value_dim(record))
    attention = float(record.batch * pairs * record.heads * per_pair)
    if record.workload == "dit" and record.phase == "forward":
        return _denoising_flops(record, pairs)
    if record.workload == "attention":
        return attention
    model = (record.config or {}).get("model") or {}
    if record.workload == "prefill" and model.get("name") == "none":
        return attention
    if not {"kind", "layers", "width", "ffn"} <= {*model}:
        return None
    tokens = record.seqlen * _weights(record, model)
    if record.workload == "prefill":  # the last token alone has its logits computed
        tokens -= (record.seqlen - 1) * model["vocab"] * model["width"]
    matrices = 2.0 * record.batch * tokens * MATRICES[record.phase]
    full = record.full_layers or 0
    return matrices + (model["layers"] - full + full * of_full / pairs) * attention


def peak_of(record: Record) -> Peak | None:
    """The peak of the record's device; None where it isn't known.

    It is that of the record's own cluster, else that of the suite's cluster files with such a device.
    """
    device = ((record.config or {}).get("cluster") or {}).get("device")
    own = [(str(device["name"]), device["peak_tflops"])] if device and {"name", "peak_tflops"} <= {*device} else []
    for name, tflops in (*own, *_shipped_peaks()):
        known = record.device_name and (record.device_name == name or same_model(record.device_name, name))
        if known and tflops.get(record.dtype):
            return Peak(name, float(tflops[record.dtype]))
    return None


def _pairs(record: Record, *, whole: bool = False) -> float | None:
    """(query, key) pairs of one head of one sequence, as MFU counts them; `whole`: without its window or chunks."""
    seqlen, config = record.seqlen, record.config or {}
    left, right = (None, None) if whole or not record.window else record.window
    cached = (record.kv_seqlen or seqlen) - seqlen
    if record.mask == "full":
        return seqlen * (record.kv_seqlen or seqlen)
    if record.mask == "causal" or (whole and record.mask in (Window.name, Chunked.name)):
        return seqlen * cached + seqlen**2 * (0.5 if record.causal else 1.0)
    if record.mask == Window.name:
        return Window((seqlen,), record.causal, left, right).behind([(cached,)]).pairs(seqlen)
    if record.mask == Chunked.name:
        tokens = read(Tokens, config["chunk"], "chunk")
        return Chunked.of(tokens, seqlen, causal=record.causal, cached=(cached,)).pairs(seqlen)
    if record.mask == Documents.name and record.seed is not None:
        lengths, histories = lengths_of(config["data"], seqlen, record.seed), histories_of(config["data"])
        return documents(lengths, causal=record.causal, window=(left, right), histories=histories).pairs(seqlen)
    return None


def _denoising_flops(record: Record, pairs: float) -> float | None:
    """Those of a denoising step on patches and, once, the text that all ranks hold."""
    model, patches, text = (record.config or {}).get("model") or {}, record.seqlen, record.text_tokens or 0
    if not {"layers", "width", "ffn", "channels"} <= {*model}:
        return None
    both_ends = 2 * model["channels"] * model["width"]
    of_layers, wide = _weights(record, model) - both_ends, record.heads * record.head_dim
    joint = text if record.text == "joint" else 0
    pairs *= ((patches + joint) / patches) ** 2
    matrices = both_ends * patches + of_layers * (patches + joint)
    if record.text == "cross":
        narrow = record.kv_heads * record.head_dim
        matrices += model["layers"] * 2 * model["width"] * (wide * patches + narrow * text)
        pairs += patches * text
    return record.batch * (2.0 * matrices + 4.0 * model["layers"] * pairs * wide)


def _weights(record: Record, model: Mapping[str, Any]) -> float:
    """How many weights each token is multiplied with: of all layers, and of what maps it in and out."""
    decoder, width = model["kind"] == "decoder", model["width"]
    q, kv, out = record.heads * record.head_dim, record.kv_heads * record.head_dim, record.heads * value_dim(record)
    attention = 2 * width * (q + kv)
    if latent := model.get("kv_latent"):
        rope, of_queries = model["kv_rope"], model.get("q_latent") or 0
        attention = width * of_queries + (of_queries or width) * q + width * (latent + rope)
        attention += latent * (q - record.heads * rope + out) + out * width
    layer = attention + width * (3 if decoder else 2) * model["ffn"]
    # The embedding of a decoder is looked up; a patch is multiplied at both ends.
    return model["layers"] * layer + width * (model["vocab"] if decoder else 2 * model["channels"])


def value_dim(record: Record) -> int:
    """Elements of a head of values."""
    return record.v_head_dim or record.head_dim


@cache
def _shipped_peaks() -> tuple[tuple[str, Mapping[str, float]], ...]:
    """(device, its peaks by dtype) of the suite's cluster files."""
    files = {path.stem: path for path in sorted((CONF / "cluster").glob("*.yaml"))}
    devices = [conf_content(path, files)["device"] for path in files.values()]
    return tuple((str(device["name"]), device["peak_tflops"]) for device in devices)
