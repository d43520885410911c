"""Calls of transformers' models on tokens sharded over ranks: what is refused before, and the sum of losses."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from inspect import signature
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from sp_bench.errors import RequestError
from sp_bench.integrations.batches import Batch, batch_in, remember
from sp_bench.integrations.layer_masks import OTHERWISE
from sp_bench.integrations.layers import NAME, SCALED_FROM, refuse
from sp_bench.run.differentiable import untraced

_seen: WeakSet[nn.Module] = WeakSet()
"""Models that have been looked through."""


class Call:
    """A call of a model with a batch, while it runs."""

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch
        """None where the caller sharded tokens without `shard`."""
        self.loss: Tensor | None = None
        self.version = 0
        """That of the loss when it was computed: adding to it in place raises it."""


under_way: ContextVar[Call | None] = ContextVar("under_way", default=None)
"""The outermost call of a model."""
BatchOfCaller = Callable[[int, Tensor | None], Batch]
"""(tokens of this rank, their position_ids) -> the one sequence that they are of, if the caller sharded them right."""
_batch_of_caller: list[BatchOfCaller] = []


def watch(batch_of_caller: BatchOfCaller) -> None:
    """Look at each model of transformers before it is called, if its attention is the suite's.

    A model without attention never calls the attention that is registered, so that nothing else would see it.
    """
    from transformers import PreTrainedModel

    _batch_of_caller[:] = [batch_of_caller]
    if getattr(PreTrainedModel.__call__, "of", "") == NAME:
        return

    def called(self: Any, *args: Any, **given: Any) -> Any:
        above: Any = super(PreTrainedModel, self)
        return _called(self, above.__call__, args, given)

    called.of = NAME  # pyright: ignore[reportFunctionMemberAccess]
    PreTrainedModel.__call__ = called


def _called(model: Any, call: Callable[..., Any], args: tuple, given: dict[str, Any]) -> Any:
    if getattr(model.config, "_attn_implementation", None) != NAME and NAME not in given:
        return call(*args, **given)
    untraced(_look)(model)
    if under_way.get() is not None:
        return call(*args, **given)
    batch = given.get(NAME)
    told = batch or untraced(_sequence)(model, args, given)
    if told is not None:
        untraced(_refuse_rope)(model, told)
        untraced(_refuse_scales)(model, told)
    if batch is not None and given.get("labels") is not None:
        untraced(_count_labels)(model)
    token = under_way.set(mine := Call(batch))
    try:
        out = call(*args, **given)
    finally:
        under_way.reset(token)
    if batch is not None:
        untraced(_after)(model, given, out, mine, batch)
    return out


def _sequence(model: Any, args: tuple, given: dict[str, Any]) -> Batch | None:
    """The sequence that a caller sharded without `shard`; None if the model gets no tokens of text."""
    known = signature(model.forward)
    arguments = known.bind_partial(*args, **given).arguments
    for parameter in known.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    tokens = next((arguments[key] for key in ("input_ids", "inputs_embeds") if arguments.get(key) is not None), None)
    if tokens is None:
        return None
    batch = _batch_of_caller[0](tokens.shape[1], arguments.get("position_ids"))
    shifts = arguments.get("labels") is not None and arguments.get("shift_labels") is None
    if shifts and batch.attention.n > 1 and getattr(model, "loss_type", "") == "ForCausalLM":
        rule = "are shifted among the tokens of this rank, whose next ones are on other ranks"
        raise RequestError("labels", rule, "labels with shift_labels, or model(**shard(input_ids)), would work")
    return batch


def _look(model: Any) -> None:
    from transformers import PreTrainedModel

    if model not in _seen:
        refuse(model)
        _seen.update(part for part in model.modules() if isinstance(part, PreTrainedModel))


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


def _refuse_scales(model: Any, batch: Batch) -> None:
    """Raise RequestError if layers without RoPE would scale queries by their place among the tokens of their rank."""
    for module in model.modules():
        limit = getattr(module, SCALED_FROM, None)
        scales = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
        if limit and scales and batch.seqlen >= limit:
            rule = f"scales queries by the place of tokens in the tensor, and {batch.seqlen} are sharded over ranks"
            raise RequestError(f"attn_temperature_tuning from {limit:g} tokens on", rule, OTHERWISE)


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


def _count_labels(model: Any) -> None:
    function = model.loss_function
    if not isinstance(function, Losses):
        model.loss_function = Losses(function)


def _after(model: Any, given: dict[str, Any], out: Any, call: Call, batch: Batch) -> None:
    logits = getattr(out, "logits", None)
    pooled = getattr(out, "pooler_output", None)
    by_token = not isinstance(logits, Tensor) or (logits.ndim == 3 and logits.shape[1] == batch.tokens)
    if not by_token or isinstance(pooled, Tensor):
        rule = "gives one result for a sequence, and each rank would have that of its own tokens"
        raise RequestError(type(model).__name__, rule, "a model with a result for each token would work")
    if isinstance(logits, Tensor):
        remember(logits, batch)
    _refuse_loss(model, given, out, call)


def _refuse_loss(model: Any, given: dict[str, Any], out: Any, call: Call) -> None:
    """Raise RequestError if the loss is another than that of the labels: the ranks' losses must add up."""
    loss = getattr(out, "loss", out.get("loss") if isinstance(out, dict) else None)
    if isinstance(out, tuple) and given.get("labels") is not None:
        loss = out[0]
    if loss is None or given.get("labels") is None:
        return
    if call.loss is None:
        rule = "computes its loss by code of its own, from labels that are shifted and sharded"
        raise RequestError(type(model).__name__, rule, "a call without labels, and a loss of its logits, would work")
    if loss is not call.loss or loss._version != call.version:
        rule = (
            "adds to the loss what is no sum over tokens (the balance of a router), so that ranks' losses don't add up"
        )
        raise RequestError(type(model).__name__, rule, "output_router_logits=False, and that loss apart, would work")
