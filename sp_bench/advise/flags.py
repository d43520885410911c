"""The settings of frameworks that have a method under a mask, with the versions that they were checked against.

A framework that can't do the mask, the heads or the lengths is left out: all of these train, with as many keys as
queries. Of sinks it isn't known whether they take them. What is Python is executed by tests/advise/test_settings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sp_bench.advise.code import Wanted, module_code
from sp_bench.plan.documents import Documents, Window
from sp_bench.plan.mask import CAUSAL, FULL, Mask

OURS = "sp_bench"
YUNCHANG = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}
"""The names of layouts in yunchang. Its zigzag and striped rings take a causal mask only."""


Setting = Callable[[Wanted], str | None]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework with sequence parallelism of its own."""

    checked: str
    """The version whose source says that the setting exists and what it does."""
    setting: Setting
    """The setting; None where the framework doesn't have the method, or not under the mask."""


def torchtitan(wanted: Wanted) -> str | None:
    """Its context parallelism gathers KV for FlexAttention (models/common/decoder_sharding.py), whose masks are causal.

    headtail is the zigzag layout, ptrr assigns blocks of a BlockMask by work (distributed/context_parallel/api.py).
    """
    documents = _plain_documents(wanted.mask)
    balancer = {"zigzag": "headtail", "blocks": "ptrr" if documents else None}.get(wanted.layout)
    if wanted.method.name != "all_gather" or not balancer or not (wanted.mask == CAUSAL or documents):
        return None
    degree = f"--parallelism.context_parallel_degree {wanted.gpus} --parallelism.spmd_backend spmd_types"
    return f"{degree} --parallelism.context_parallel_load_balancer {balancer}"


def megatron(wanted: Wanted) -> str | None:
    """Its GPT models are causal. Transformer Engine 2.18 takes windows with a2a and all_gather, and key heads that a2a
    splits evenly (context_parallel.py); ranks own zigzag pieces (get_batch_on_this_cp_rank).
    """
    comm = _megatron_comm(wanted)
    window = isinstance(wanted.mask, Window) and wanted.mask.causal
    if comm is None or not (wanted.mask == CAUSAL or (window and comm in ("a2a", "all_gather"))):
        return None
    sizes = [f"--context-parallel-size {wanted.gpus} --cp-comm-type {comm}"]
    if comm == "a2a+p2p":
        sizes.append(f"--hierarchical-context-parallel-sizes {wanted.ulysses} {wanted.gpus // wanted.ulysses}")
    if isinstance(wanted.mask, Window):
        sizes.append(f"--window-size {-1 if wanted.mask.left is None else wanted.mask.left},0")
    return " ".join(sizes)


def _megatron_comm(wanted: Wanted) -> str | None:
    name, u = wanted.method.name, wanted.ulysses
    if name in ("ulysses", "usp") and u == wanted.gpus:
        return "a2a" if wanted.splits_heads(u) else None
    if wanted.layout != "zigzag":
        return None
    if name == "usp" and u > 1:
        return "a2a+p2p" if wanted.splits_heads(u) else None
    return {"all_gather": "all_gather", "zigzag": "p2p", "ring": "p2p", "usp": "p2p"}.get(name)


def deepspeed(wanted: Wanted) -> str | None:
    """It drops the attention mask: position_ids say where documents start (runtime/sequence_parallel/ulysses_sp.py),
    which flash_attention_2 of transformers reads for a batch of one.
    """
    documents = _plain_documents(wanted.mask) and wanted.batch == 1
    if wanted.method.name != "ulysses" or not (wanted.mask == CAUSAL or documents):
        return None
    options = f"sequence_parallel_size={wanted.gpus}"
    if documents:
        options += ', core_attn_implementation="flash_attention_2"; position_ids that restart with each document'
    return f"UlyssesSPAttentionHF.register_with_transformers with {options}"


def diffusers(wanted: Wanted) -> str | None:
    """Full masks and as many key heads as heads only; its rings gather (models/attention_dispatch.py)."""
    if wanted.mask != FULL or wanted.heads != wanted.kv_heads:
        return None
    u, gpus = wanted.ulysses, wanted.gpus
    match wanted.method.name:
        case "ulysses":
            degrees = f"ulysses_degree={gpus}"
        case "all_gather":
            degrees = f"ring_degree={gpus}"
        case "ulysses_all_gather":
            split = {"ulysses_degree": u, "ring_degree": gpus // u}
            degrees = ", ".join(f"{name}={degree}" for name, degree in split.items() if degree > 1)
        case _:
            return None
    return f"enable_parallelism with a ContextParallelConfig of {degrees}"


def yunchang(wanted: Wanted) -> str | None:
    """Whole sequences only: windows are those of a ring's blocks, and its rings for documents are no part of it."""
    name, u = wanted.method.name, wanted.ulysses
    if name not in ("ring", "striped", "zigzag", "ulysses", "usp") or wanted.mask not in (CAUSAL, FULL):
        return None
    if not wanted.splits_heads(u):
        return None
    call = f"out = attention(q, k, v, causal={wanted.mask == CAUSAL})"
    if u == wanted.gpus:
        return "\n".join(
            (
                "import torch.distributed as dist",
                "from yunchang import UlyssesAttention",
                "attention = UlyssesAttention(dist.group.WORLD)",
                call,
            )
        )
    if wanted.mask == FULL and wanted.layout != "contiguous":
        return None
    return "\n".join(
        (
            "import torch.distributed as dist",
            "from yunchang import LongContextAttention, set_seq_parallel_pg",
            f"set_seq_parallel_pg({u}, {wanted.gpus // u}, dist.get_rank(), {wanted.gpus})",
            f'attention = LongContextAttention(ring_impl_type="{YUNCHANG[wanted.layout]}")',
            call,
        )
    )


FRAMEWORKS: dict[str, Framework] = {
    "torchtitan": Framework(checked="main of 2026-08-21, b5bcd76", setting=torchtitan),
    "Megatron-LM": Framework(checked="core 0.19.0", setting=megatron),
    "DeepSpeed": Framework(checked="0.19.5", setting=deepspeed),
    "diffusers": Framework(checked="0.40.0", setting=diffusers),
    "yunchang": Framework(checked="0.6.4", setting=yunchang),
}
"""Every framework with its settings."""


def settings(wanted: Wanted) -> dict[str, str]:
    """The settings of the frameworks that have the method under the mask, by name, and the code of this suite."""
    texts = {}
    # torchtitan and Megatron-LM ask for such lengths, the others for even shards.
    if wanted.seqlen % (2 * wanted.gpus) == 0 and not (wanted.kv_seqlen or wanted.sinks):
        texts = {name: framework.setting(wanted) for name, framework in FRAMEWORKS.items()}
    return {name: text for name, text in texts.items() if text} | {OURS: module_code(wanted)}


def _plain_documents(mask: Mask) -> bool:
    """Whether the mask is causal inside documents, and nothing else."""
    return isinstance(mask, Documents) and mask.causal and not mask.windowed
