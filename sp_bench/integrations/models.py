"""Models of transformers whose tokens are dealt over ranks: which are refused, and the sum of their losses.

A layer sees the tokens of its rank only. That is right for what works on each token alone and for attention that goes
through the interface of transformers, where the suite's is registered. Whatever else mixes tokens would mix those that
happen to be on one rank. `refuse` finds it by the modules of each layer and the code of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sp_bench.errors import RequestError
from sp_bench.integrations.batches import Batch, batch_in, remember
from sp_bench.integrations.layer_masks import OTHERWISE

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

_seen: WeakSet[nn.Module] = WeakSet()
"""Models that have been looked through."""


class Call:
    """A call of a model with a batch, while it runs."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.loss: Tensor | None = None
        self.version = 0
        """That of the loss when it was computed: adding to it in place raises it."""


under_way: ContextVar[Call | None] = ContextVar("under_way", default=None)
"""The outermost call of a model with a batch."""


def watch() -> None:
    """Look at each model of transformers before it is called, if its attention is the suite's. Later calls do nothing.

    A model without attention never calls the attention that is registered, so that nothing else would see it.
    """
    from transformers import PreTrainedModel

    if getattr(PreTrainedModel.__call__, "of", "") == NAME:
        return

    def called(self: Any, *args: Any, **given: Any) -> Any:
        return _called(self, super(PreTrainedModel, self).__call__, args, given)

    called.of = NAME
    PreTrainedModel.__call__ = called


def _called(model: Any, call: Callable, args: tuple, given: dict[str, Any]) -> Any:
    if getattr(model.config, "_attn_implementation", None) != NAME and NAME not in given:
        return call(*args, **given)
    _look(model)
    batch = given.get(NAME)
    if batch is None or under_way.get() is not None:
        return call(*args, **given)
    _refuse_rope(model, batch)
    if given.get("labels") is not None:
        _count_labels(model)
    token = under_way.set(mine := Call(batch))
    try:
        out = call(*args, **given)
    finally:
        under_way.reset(token)
    _after(model, given, out, mine)
    return out


@torch.compiler.disable
def _look(model: Any) -> None:
    from transformers import PreTrainedModel

    if model not in _seen:
        refuse(model)
        _seen.update(part for part in model.modules() if isinstance(part, PreTrainedModel))


def refuse(model: Any) -> None:
    """Raise RequestError for a model that would compute something else on dealt tokens."""
    name, config = type(model).__name__, model.config
    if not any(_is_ours(getattr(part, "config", None)) for part in model.modules()):
        rule = (
            f"its attention is {getattr(config, '_attn_implementation', None)}, which sees the tokens of its rank only"
        )
        raise RequestError(name, rule, f'attn_implementation="{NAME}" would work')
    if getattr(config, "is_encoder_decoder", False):
        raise RequestError(name, "has two sequences, an encoder's and a decoder's, and one is dealt", OTHERWISE)
    for path, layer, kind in _layers(model):
        _refuse_layer(name, path, layer, kind)
    if not any(_is_attention(type(module)) for module in model.modules()):
        raise RequestError(name, "has no attention that goes through the interface of transformers", OTHERWISE)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        rule = "takes no position_ids, and would number the tokens of each rank from 0"
        raise RequestError(name, rule, OTHERWISE)


def _is_ours(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


def _layers(model: Any) -> list[tuple[str, nn.Module, str]]:
    """(path, layer, its type by the config) of the layers that are repeated, of the parts that read text."""
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    parts = {path: part.config for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    text = model.config.get_text_config()
    found: list[tuple[str, nn.Module, str]] = []
    others: list[tuple[str, nn.Module, str]] = []
    for path, modules in model.named_modules():
        inside = any(path.startswith(layer + ".") for layer, *_ in found)
        if not isinstance(modules, nn.ModuleList) or inside:
            continue
        config = parts[max((p for p in parts if not p or path.startswith(p + ".")), key=len)]
        if config is not model.config and config is not text:
            continue
        types = getattr(text, "layer_types", None) or []
        named = types if len(types) == len(modules) else [""] * len(modules)
        layers = [(f"{path}.{i}", layer, named[i]) for i, layer in enumerate(modules)]
        if any(isinstance(layer, GradientCheckpointingLayer) for layer in modules):
            found += layers
        elif len(modules) == getattr(text, "num_hidden_layers", None):
            others += [each for each in layers if not type(each[1]).__module__.startswith("torch.")]
    return found or others


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
    if not any(_is_attention(type(module)) for module in layer.modules()):
        rule = "has no attention that goes through the interface of transformers, mixes tokens by code of its own"
        raise no(f"{path} ({type(layer).__name__})", rule)


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


@torch.compiler.disable
def _refuse_rope(model: Any, batch: Batch) -> None:
    """Raise RequestError if ranks would take different frequencies, chosen by the last position that each one has."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind not in ("dynamic", "longrope"):
                continue
            limit = _trained_length(module.config)
            least = batch.last_positions()
            if max(least) >= limit and (min(least) < limit or (kind == "dynamic" and min(least) < max(least))):
                ranks = f"{min(least)} to {max(least)}"
                rule = f"chooses its frequencies by the last position of a rank, and ranks have {ranks}"
                raise RequestError(f"rope_type={kind} beyond {limit} tokens", rule, OTHERWISE)


def _trained_length(config: Any) -> int:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    name = "original_max_position_embeddings"
    lengths = [each.get(name) for each in (given, *given.values()) if isinstance(each, dict)]
    return min([x for x in (*lengths, getattr(config, name, None)) if x] or [config.max_position_embeddings])


class Losses:
    """The loss function of a model, which gets the labels of a batch however much of it the model passes on.

    Models of transformers 4 drop `shift_labels` or `num_items_in_batch` on the way; the loss would then shift labels
    that are shifted, and divide by the labels of one rank.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        """The loss of this rank's tokens, divided by the labels of all ranks."""
        call, batch = under_way.get(), batch_in(given.pop(NAME, None))
        batch = batch or (call.batch if call else None)
        if batch is not None and batch.labels is not None:
            given = {"shift_labels": batch.labels, "num_items_in_batch": batch.count} | {
                key: value for key, value in given.items() if value is not None
            }
        loss = self.function(*args, **given)
        if call is not None:
            call.loss, call.version = loss, loss._version
        return loss


@torch.compiler.disable
def _count_labels(model: Any) -> None:
    function = model.loss_function
    if not isinstance(function, Losses):
        model.loss_function = Losses(function)


@torch.compiler.disable
def _after(model: Any, given: dict[str, Any], out: Any, call: Call) -> None:
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        remember(logits, call.batch)
    _refuse_loss(model, given, out, call)


def _refuse_loss(model: Any, given: dict[str, Any], out: Any, call: Call) -> None:
    """Raise RequestError if the loss is another than that of the labels: the ranks' losses must add up."""
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(out, tuple) and given.get("labels") is not None:
        loss = out[0]
    if loss is None or given.get("labels") is None or torch.compiler.is_compiling():
        return
    if call.loss is None:
        rule = "computes its loss by code of its own, from labels that are shifted and dealt"
        raise RequestError(type(model).__name__, rule, "a call without labels, and a loss of its logits, would work")
    if loss is not call.loss or loss._version != call.version:
        rule = (
            "adds to the loss what is no sum over tokens (the balance of a router), so that ranks' losses don't add up"
        )
        raise RequestError(type(model).__name__, rule, "output_router_logits=False, and that loss apart, would work")
