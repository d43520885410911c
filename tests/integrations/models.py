"""Small models of transformers' own classes, and what ranks do with them. Imported inside the ranks: no pytest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import RequestError
from tests.support.ranks import group_of

RANKS = 2
SEQLEN = 48
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
ROPE = {"rope_parameters": MROPE, "rope_scaling": MROPE}
"""As version 5 and version 4 name it."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
LONG |= {"rope_type": "longrope", "original_max_position_embeddings": 24}

LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
RIGHT = ""
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, RIGHT),
    "llama, not causal": ("Llama", {"is_causal": False}, RIGHT),
    "qwen3": ("Qwen3", {}, RIGHT),
    "qwen3, windows in some layers": ("Qwen3", {"use_sliding_window": True, **MIXED}, RIGHT),
    "mistral, a window": ("Mistral", {"sliding_window": 8}, RIGHT),
    "phi3": ("Phi3", {"sliding_window": None}, RIGHT),
    "phi3, frequencies by the length": (
        "Phi3",
        {"sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 24},
        RIGHT,
    ),
    "gemma3, windows in some layers": ("Gemma3Text", {"query_pre_attn_scalar": 16, **MIXED}, RIGHT),
    "gemma2, soft caps": ("Gemma2", MIXED, "softcap=50.0: is not computed"),
    "llama4, chunks": ("Llama4Text", {**LLAMA4, "attention_chunk_size": 8}, RIGHT),
    "llama4, queries scaled by position": (
        "Llama4Text",
        {**LLAMA4, "attention_chunk_size": 8, "floor_scale": 16},
        "attn_temperature_tuning from 16 tokens on: scales queries by the place of tokens",
    ),
    "gpt_oss, sinks and windows": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}, RIGHT),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 1}, RIGHT),
    "qwen3_moe, its router's balance": ("Qwen3Moe", {**MOE, "output_router_logits": True}, "Qwen3MoeForCausalLM: adds"),
    "qwen3_next, linear attention": (
        "Qwen3Next",
        {**MOE, **LINEAR, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32},
        "Qwen3NextForCausalLM, model.layers.0 of type linear_attention: mixes tokens",
    ),
    "lfm2, convolutions": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM, model.layers.0 of type conv: mixes tokens",
    ),
    "falcon_h1, both in a layer": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        "FalconH1ForCausalLM, model.layers.0",
    ),
    "mamba": ("Mamba", {"state_size": 4}, "MambaForCausalLM, backbone.layers.0"),
    "qwen3_vl, its text": ("Qwen3VL", {}, RIGHT),
    "deepseek_v3, values narrower than keys": ("DeepseekV3", LATENT, RIGHT),
}
"""By name: the class, its options, and how the refusal begins."""


def model(case: str, implementation: str) -> Any:
    """A small model, the same on all ranks."""
    import transformers

    family, options, _ = CASES[case]
    torch.manual_seed(0)
    if family == "Qwen3VL":
        parts = {"text_config": {**SIZES, **ROPE}, "vision_config": VISION}
        config = transformers.Qwen3VLConfig(**parts, attn_implementation=implementation)  # pyright: ignore[reportCallIssue]
        return transformers.Qwen3VLForConditionalGeneration(config).train()
    sizes = {**SIZES, **options}
    if family == "Mamba":
        sizes = {key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "state_size")}
    if sizes.get("is_causal", True) is True:
        sizes.pop("is_causal", None)
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=implementation)
    if "is_causal" in sizes:
        config.is_causal = False
    name = f"{family.removesuffix('Text') if family == 'Gemma3Text' or family == 'Llama4Text' else family}ForCausalLM"
    return getattr(transformers, name)(config).float().train()


def ids(rows: int = 1, seqlen: int = SEQLEN, seed: int = 1) -> Tensor:
    """Whole input_ids (rows, seqlen)."""
    return torch.randint(1, VOCAB, (rows, seqlen), generator=torch.Generator().manual_seed(seed))


def positions(*lengths: int) -> Tensor:
    """The position_ids of packed documents: (1, S)."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def eager(alone: Any, input_ids: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, loss and gradients of eager attention on one process, of the causal labels inside documents."""
    alone.zero_grad()
    logits = alone(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    labels = input_ids[:, 1:].clone()
    if position_ids is not None:
        labels[position_ids.expand_as(input_ids)[:, 1:] == 0] = -100
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
    loss.backward()
    return logits.detach(), loss.detach(), gradients(alone)


def gradients(of: Any) -> list[Tensor]:
    """The gradient of every parameter; zero where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in of.parameters()]


def summed(of: Any, group: Any) -> list[Tensor]:
    """The gradients of all ranks together."""
    found = gradients(of)
    for x in found:
        dist.all_reduce(x, group=group)
    return found


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The greatest relative error of a tensor, beside the norm of all of them over the square root of their number."""
    floor = float(torch.stack([x.norm() for x in wanted]).norm()) * len(wanted) ** -0.5
    return max(float((x - y).norm() / max(float(y.norm()), 1e-2 * floor)) for x, y in zip(found, wanted, strict=True))


def against_eager(case: str) -> str | float:
    """How a model is refused, or the greatest relative error of its logits, loss and gradients on two ranks."""
    group = group_of(RANKS, case)
    if group is None:
        return ""
    from sp_bench.integrations.transformers import register

    warnings.simplefilter("ignore")
    parallel = register("ring", group=group)
    ours = model(case, "sp_bench")
    try:
        out = ours(**parallel.shard(ids()))
    except RequestError as error:
        return str(error)
    out.loss.backward()
    logits, loss, wanted = eager(model(case, "eager"), ids())
    total = out.loss.detach().clone()
    dist.all_reduce(total, group=group)
    return max(
        apart([parallel.gather(out.logits)], [logits]), apart([total], [loss]), apart(summed(ours, group), wanted)
    )


def of_a_sequence() -> str:
    """How a model with one result for a sequence is refused."""
    group = group_of(RANKS, "of a sequence")
    if group is None:
        return ""
    import transformers

    from sp_bench.integrations.transformers import NAME, register

    warnings.simplefilter("ignore")
    parallel = register("ring", group=group)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=NAME)  # pyright: ignore[reportCallIssue]
    classifier = transformers.LlamaForSequenceClassification(config).float()
    given = parallel.shard(ids())
    for key in ("labels", "shift_labels", "num_items_in_batch"):
        given.pop(key)
    try:
        return f"computed: {tuple(classifier(**given).logits.shape)}"
    except RequestError as error:
        return str(error)


class Averages(torch.nn.Module):
    """A part of a layer that adds the mean of all tokens, in code that no rule knows."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + x.sum(1, keepdim=True) / x.shape[1]


def changed(part: str) -> str:
    """How a Llama is refused in which a part of the second layer is another."""
    from sp_bench.integrations.layers import refuse
    from sp_bench.integrations.transformers import register

    register("ring")
    ours = model("llama", "sp_bench")
    layer = ours.model.layers[1]
    parts = {
        "a convolution": torch.nn.Conv1d(32, 32, 3, padding=1),
        "one of single tokens": torch.nn.Conv1d(32, 32, 1),
        "a mean": Averages(layer.mlp),
        "a recurrence": torch.nn.GRU(32, 32),
        "its own": layer.mlp,
    }
    if part == "no attention":
        layer.self_attn = torch.nn.Identity()
    else:
        layer.mlp = parts[part]
    return refused(lambda: refuse(ours))


class Beside(torch.nn.Module):
    """An MLP that takes more than hidden states, so that it can't be tried by itself."""

    def __init__(self, part: torch.nn.Module, share: float) -> None:
        super().__init__()
        self.part, self.share = part, share

    def forward(self, x: Tensor, *, beside: Tensor) -> Tensor:
        return self.part(x) + beside + self.share * beside.mean(1, keepdim=True)


def not_tried_alone(how: str, mixes: bool) -> str | float:
    """How a Llama is refused whose MLPs can't be tried by themselves, or its error."""
    group = group_of(RANKS, how)
    if group is None:
        return ""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from sp_bench.integrations.transformers import register

    parallel, alone, ours = register("ring", group=group), model("llama", "eager"), model("llama", "sp_bench")
    for each in (alone, ours):
        for layer in each.model.layers:
            if how == "takes more":
                layer.mlp = Beside(layer.mlp, 1.0 * mixes)
                layer.mlp.register_forward_pre_hook(
                    lambda _, args, given: (args, {"beside": args[0]}), with_kwargs=True
                )
            elif mixes:
                layer.mlp = Averages(layer.mlp)
    if how == "sharded":
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in (*ours.model.layers, ours):
            fully_shard(module, mesh=mesh)
    given = parallel.shard(ids())
    try:
        return apart([parallel.gather(ours(**given).logits.detach())], [eager(alone, ids())[0]])
    except RequestError as error:
        return str(error)


def another_sequence(case: str) -> str:
    """How an attention to states of another sequence is refused that has as many tokens, or what it is without them."""
    group = group_of(RANKS, case)
    if group is None:
        return ""
    import transformers

    from sp_bench.integrations.transformers import register

    warnings.simplefilter("ignore")
    parallel = register("ring", group=group)
    few = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0}
    bert = {**SIZES, "is_decoder": True, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    made = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(_config("GPT2", **few)),
        "bert": lambda: transformers.BertLMHeadModel(_config("Bert", **bert)),
    }
    ours, given = made[case.split(",")[0]](), parallel.shard(ids())
    if "alone" not in case:
        given["encoder_hidden_states"] = torch.randn(1, given["input_ids"].shape[1], 32)
    for key in ("labels", "shift_labels", "num_items_in_batch"):
        given.pop(key)
    return refused(lambda: ours(**given))


def _config(family: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**sizes, add_cross_attention=True, attn_implementation="sp_bench")


def refused(call: Callable[[], Any]) -> str:
    """How a call is refused; empty if it isn't."""
    try:
        call()
    except RequestError as error:
        return str(error)
    return ""
