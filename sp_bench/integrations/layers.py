"""Models whose layers mix tokens otherwise than by the attention that is registered, which are refused.

A layer sees the tokens of its rank only. That is right for what works on each token alone, and for attention that goes
through the interface of transformers, where the suite's is registered. Whatever else mixes tokens would mix those that
happen to be on one rank. It is found by the modules of each layer, by the code of their classes, and by trying them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn

from torch import Tensor, nn

from sp_bench.errors import RequestError
from sp_bench.integrations.layer_masks import OTHERWISE
from sp_bench.integrations.parts import parts_of, refuse_part

NAME = "sp_bench"
"""The value of attn_implementation, and the keyword argument that carries a batch."""
MIXES_TOKENS = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.padding._ConstantPadNd,
    nn.Fold,
    nn.Unfold,
)
"""Layers of torch whose result for a token depends on other tokens. Convolutions are told by their kernels."""
MIXING_CALLS = ("conv1d", "scan", "scan_combined", "delta_rule", "fft", "fftn", "rfft", "roll")
"""How names of functions end that mix tokens: causal_conv1d, selective_scan, chunk_gated_delta_rule, ..."""
MIXING_TYPES = ("linear", "conv", "mamba", "recurrent", "hybrid", "sparse_attention", "_sparse", "indexed")
"""Parts of the names in `layer_types` of layers that mix tokens otherwise, or choose which ones they see."""

SCALED_FROM = "floor_scale"
"""The attribute of attentions that number tokens by their place too, but only to scale queries from so many on."""
OTHERS = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "context_hidden_states")
"""Arguments of an attention that are keys of another sequence than the queries'."""
OTHER_KEYS = {"key": "query", "keys": "queries", "k": "q"}
"""Those that are keys, and those that are the queries."""


def refuse(model: Any) -> None:
    """Raise RequestError for a model that would compute something else on sharded tokens."""
    name, config = type(model).__name__, model.config
    if not any(_is_ours(getattr(part, "config", None)) for part in model.modules()):
        rule = (
            f"its attention is {getattr(config, '_attn_implementation', None)}, which sees the tokens of its rank only"
        )
        raise RequestError(name, rule, f'attn_implementation="{NAME}" would work')
    if getattr(config, "is_encoder_decoder", False):
        raise RequestError(name, "has two sequences, an encoder's and a decoder's, and one is sharded", OTHERWISE)
    tried: set[type] = set()
    for path, layer, kind in _layers(model):
        _refuse_layer(name, path, layer, kind)
        _try_parts(name, path, layer, getattr(config.get_text_config(), "hidden_size", 0), tried)
    if not any(_is_attention(type(module)) for module in model.modules()):
        raise RequestError(name, "has no attention that goes through the interface of transformers", OTHERWISE)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        rule = "takes no position_ids, and would number the tokens of each rank from 0"
        raise RequestError(name, rule, OTHERWISE)
    for module in model.modules():
        if _is_attention(type(module)) and {*OTHERS, *OTHER_KEYS} & inspect.signature(module.forward).parameters.keys():
            module.register_forward_pre_hook(_refuse_other_keys, with_kwargs=True)


def _refuse_other_keys(module: nn.Module, args: tuple, given: dict[str, Any]) -> None:
    """Raise RequestError for an attention that is called with keys of another sequence, which is not sharded."""
    if not _is_ours(getattr(module, "config", None)):
        return
    arguments = inspect.signature(module.forward).bind_partial(*args, **given).arguments
    own = next((x for x in arguments.values() if isinstance(x, Tensor)), None)
    for key, x in arguments.items():
        queries = arguments.get(OTHER_KEYS[key]) if key in OTHER_KEYS else own
        if (key in OTHERS or key in OTHER_KEYS) and x is not None and x is not queries:
            refuse_cross(type(module).__name__, key)


def refuse_cross(name: str, key: str) -> NoReturn:
    """Raise RequestError for an attention to another sequence."""
    rule = "its keys are of another sequence than its queries, which is not sharded over ranks"
    raise RequestError(f"{name} with {key}", rule, OTHERWISE)


def _is_ours(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


def _layers(model: Any) -> list[tuple[str, nn.Module, str]]:
    """(path, layer, its type by the config) of the layers that are repeated, of the parts that read text."""
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    parts = {path: part.config for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    text = model.config.get_text_config()
    repeated: list[tuple[str, nn.Module, str]] = []
    others: list[tuple[str, nn.Module, str]] = []
    for path, modules in model.named_modules():
        inside = any(path.startswith(layer + ".") for layer, *_ in repeated)
        if not isinstance(modules, nn.ModuleList) or inside:
            continue
        config = parts[max((p for p in parts if not p or path.startswith(p + ".")), key=len)]
        if config is not model.config and config is not text:
            continue
        types = getattr(text, "layer_types", None) or []
        named = types if len(types) == len(modules) else [""] * len(modules)
        layers = [(f"{path}.{i}", layer, named[i]) for i, layer in enumerate(modules)]
        if any(isinstance(layer, GradientCheckpointingLayer) for layer in modules):
            repeated += layers
        elif len(modules) == getattr(text, "num_hidden_layers", None):
            others += [each for each in layers if not type(each[1]).__module__.startswith("torch.")]
    return repeated or others


def _refuse_layer(name: str, path: str, layer: nn.Module, kind: str) -> None:
    def no(what: str, rule: str) -> RequestError:
        return RequestError(f"{name}, {what}", f"{rule}, and would see the tokens of its rank only", OTHERWISE)

    if any(part in str(kind) for part in MIXING_TYPES):
        raise no(f"{path} of type {kind}", "mixes tokens in another way than by attention to all that the mask shows")
    for place, module in layer.named_modules(prefix=path):
        shown = f"{place} ({type(module).__name__})"
        kernel = getattr(module, "kernel_size", 1) if isinstance(module, nn.modules.conv._ConvNd) else 1
        if isinstance(module, MIXES_TOKENS) or any(size > 1 for size in _tuple(kernel)):
            raise no(shown, "mixes tokens")
        if mixing := _mixing_calls(type(module)):
            raise no(shown, f"mixes tokens by {mixing}")
        if _numbers_tokens(type(module)) and not hasattr(module, SCALED_FROM):
            raise no(shown, "numbers tokens by their place in the tensor")
    if not any(_is_attention(type(module)) for module in layer.modules()):
        rule = "has no attention that goes through the interface of transformers, mixes tokens by code of its own"
        raise no(f"{path} ({type(layer).__name__})", rule)


def _try_parts(name: str, path: str, layer: nn.Module, width: int, tried: set[type]) -> None:
    """Raise RequestError if a part of a layer other than its attention mixes tokens, now or when it is first called."""
    for place, part in parts_of(layer):
        if type(part) in tried or any(_is_attention(type(module)) for module in part.modules()):
            continue
        tried.add(type(part))
        refuse_part(f"{name}, {path}.{place} ({type(part).__name__})", part, width)


def _tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


@cache
def _is_attention(cls: type) -> bool:
    """Whether the code of a module asks for the attention that is registered."""
    from transformers import AttentionInterface

    for function in _functions(cls):
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        if "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
            return True
        if any(x is AttentionInterface or isinstance(x, AttentionInterface) for x in named):
            return True
    return False


@cache
def _numbers_tokens(cls: type) -> bool:
    """Whether an attention counts the tokens of the tensor that it gets, which are not those of the sequence."""
    return _is_attention(cls) and any("arange" in function.__code__.co_names for function in _functions(cls))


@cache
def _mixing_calls(cls: type) -> str:
    """The function that mixes tokens among those that the code of a module names; empty if there is none."""
    names = (name for function in _functions(cls) for name in function.__code__.co_names)
    return next((name for name in names if any(name == end or name.endswith(f"_{end}") for end in MIXING_CALLS)), "")


def _functions(cls: type) -> Iterator[Any]:
    """The functions of a class of modules, without those of torch."""
    for each in cls.__mro__:
        if each.__module__.startswith("torch.") or each is object:
            continue
        for x in vars(each).values():
            function = inspect.unwrap(x) if callable(x) else None
            if hasattr(function, "__code__"):
                yield function
