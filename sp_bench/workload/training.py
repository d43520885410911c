"""How a transformer is trained, and what its ranks send beside their attention. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from sp_bench.errors import RequestError
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.reading import Count, Positive, Section, Tokens
from sp_bench.resources import point_keys
from sp_bench.workload.model import Model, shard_elements

UPDATE = "update"
"""The phase after the backward: gradients are summed over the ranks, and the optimizer steps."""
SYNC = ("gradients", "all_reduce", "sum")
"""The key of what the summation of gradients sends."""
GATHER = ("parameters", "all_gather", "shards")
"""The key of what gathers of sharded parameters send."""
REDUCE = ("gradients", "reduce_scatter", "sum")
"""The key of what the summation of gradients sends to the ranks that own their shards."""
NORM = ("norm", "all_reduce", "sum")
"""The key of what the loss and the norm of sharded gradients send."""
FLOAT8 = "float8"
"""The value of train.linears, and the name of its figure in device.matmul_tflops."""
MOMENTS = 2
"""Numbers that AdamW keeps beside each parameter."""


class Training(Section, frozen=True, kw_only=True):
    """The section `train` of conf/config.yaml."""

    recompute: Literal["none", "attention", "full"]
    """The part of a layer that the backward computes again (transformer.Recompute)."""
    offload: bool = False
    """Whether what the layers keep for the backward is in the host's memory until then."""
    parameters: Literal["auto", "replicated", "sharded"]
    """sharded: parameters, gradients and moments are split over all ranks (FSDP). auto: only where they don't fit."""
    tensor_parallel: Count = 1
    """How many GPUs share the tokens of a rank of the attention: each has a part of the heads and of the matrices."""
    data_parallel: Count = 1
    """How many groups of ranks train on sequences of their own. Gradients are summed, and sharded parameters split,
    over the ranks of all groups."""
    batch_tokens: Tokens | None = None
    """The tokens of a whole step, over all groups: a rank computes its parts of them one after the other, and adds up
    their gradients. None: those of one such turn."""
    linears: Literal["compute", "float8"] = "compute"
    """The dtype of a layer's matrix products: that of the activations, or float8 with a scale for each tensor."""
    loss_chunk: Tokens
    """The tokens whose logits exist at a time."""
    learning_rate: Positive
    task: Annotated[str, Meta(description="the data of a decoder", examples=["recall", "copy"])]


def refuse_training(config: Mapping[str, Any], what: str) -> None:
    """Raise RequestError for a key of the section `train` that isn't at its default: `what` trains nothing."""
    for key, usual in point_keys()["train"].items():
        if (value := config["train"].get(key)) != usual:
            given, works = (json.dumps(x).strip('"') for x in (value, usual))
            rule = f"is about training, and {what} trains nothing"
            raise RequestError(f"train.{key}={given}", rule, f"train.{key}={works} would work")


def sent_otherwise(
    phase: str, share: Model, problem: Problem, *, sharded: bool, groups: int = 1
) -> Mapping[tuple[str, ...], int]:
    """Bytes each rank sends to sum the gradients and the loss, by a ring: 2 (n - 1) / n of them.

    `share` is what a GPU has of the model, and n the ranks of all data-parallel `groups`. Where parameters are split:
    to gather each layer's, forward and backward, and those outside the layers once, n - 1 times a rank's shard; the
    same to reduce gradients, once each; and for the norm.
    """
    n, wide = problem.n * groups, DTYPE_BYTES[problem.accumulate_dtype]
    if n == 1:
        return {}
    if not sharded:
        size = (share.parameters(problem) + 1) * wide
        return {SYNC: ring_bytes(size, n)} if phase == UPDATE else {}
    if phase == UPDATE:
        return {NORM: ring_bytes(2 * wide, n)}
    layers = (n - 1) * share.layers * shard_elements(share.layer_shapes(problem), n)
    outside = (n - 1) * shard_elements(share.outside_shapes(), n)
    element = DTYPE_BYTES[problem.dtype]
    if phase == "forward":
        return {GATHER: element * (layers + outside)}
    return {GATHER: element * layers, REDUCE: wide * (layers + outside)}


def ring_bytes(size: int, n: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes, to the nearest byte."""
    return round(2 * (n - 1) * size / n)
