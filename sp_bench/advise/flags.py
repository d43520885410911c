"""The settings of frameworks that have a method, as of torchtitan 0.2, Megatron-LM core 0.14, DeepSpeed 0.19, diffusers
0.40 and yunchang 0.6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sp_bench.plan.method import Method

RINGS = ("ring", "striped", "zigzag")
YUNCHANG = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}
"""The names of layouts in yunchang."""

Setting = Callable[[Method, int, str], str | None]
"""(method, GPUs, layout) -> the setting, or None where the framework doesn't have the method."""


def torchtitan(method: Method, gpus: int, layout: str) -> str | None:
    rotate = {"all_gather": "allgather", "zigzag": "alltoall", "ring": "alltoall"}.get(method.name)
    if rotate is None:
        return None
    degree = f"--parallelism.context_parallel_degree {gpus}"
    return f"{degree} --parallelism.context_parallel_rotate_method {rotate}"


def megatron(method: Method, gpus: int, layout: str) -> str | None:
    size = f"--context-parallel-size {gpus} --cp-comm-type"
    match method.name:
        case "ulysses":
            return f"{size} a2a"
        case "all_gather":
            return f"{size} all_gather"
        case "zigzag" | "ring":
            return f"{size} p2p"
        case "usp":
            u = _ulysses(method)
            return f"{size} a2a+p2p --hierarchical-context-parallel-sizes {u} {gpus // u}"
    return None


def deepspeed(method: Method, gpus: int, layout: str) -> str | None:
    if method.name != "ulysses":
        return None
    return f"UlyssesSPAttentionHF.register_with_transformers(..., sequence_parallel_size={gpus})"


def diffusers(method: Method, gpus: int, layout: str) -> str | None:
    """Its rings gather: it refuses rotate_method="alltoall" (src/diffusers/models/_modeling_parallel.py)."""
    match method.name:
        case "ulysses":
            degrees = f"ulysses_degree={gpus}"
        case "all_gather":
            degrees = f"ring_degree={gpus}"
        case "ulysses_all_gather":
            u = _ulysses(method)
            degrees = f"ulysses_degree={u}, ring_degree={gpus // u}"
        case _:
            return None
    return f"enable_parallelism(config=ContextParallelConfig({degrees}))"


def yunchang(method: Method, gpus: int, layout: str) -> str | None:
    u = gpus if method.name == "ulysses" else _ulysses(method) if method.name == "usp" else 1
    if method.name not in (*RINGS, "ulysses", "usp"):
        return None
    groups = f"set_seq_parallel_pg({u}, {gpus // u}, rank, world_size)"
    return f'{groups}; LongContextAttention(ring_impl_type="{YUNCHANG[layout]}")'


FRAMEWORKS: dict[str, Setting] = {
    "torchtitan": torchtitan,
    "Megatron-LM": megatron,
    "DeepSpeed": deepspeed,
    "diffusers": diffusers,
    "yunchang": yunchang,
}
"""Every framework with its settings."""


def settings(method: Method, gpus: int, layout: str) -> dict[str, str]:
    """The settings of the frameworks that have the method, and of this suite."""
    given = {f.name: vars(method)[f.name] for f in fields(method) if vars(method)[f.name] not in (f.default, "auto")}
    if len(method.layouts) > 1:
        given["layout"] = layout
    options = "".join(f", {name}={value!r}" for name, value in given.items()).replace("'", '"')
    found = {name: setting(method, gpus, layout) for name, setting in FRAMEWORKS.items()}
    ours = {"sp_bench": f'SequenceParallelAttention("{method.name}"{options})'}
    return {name: text for name, text in found.items() if text} | ours


def _ulysses(method: Any) -> int:
    """The head-parallel degree of a method that splits heads and tokens."""
    return int(method.ulysses)
