"""Time a decoder's layer without its attention, and a matrix product, on one rank. Runs inside a rank's process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sp_bench.calibrating.clock import CLOCKS
from sp_bench.calibrating.layer_figures import RECOMPUTE, layer_of
from sp_bench.calibrating.setting import Costs, Setting
from sp_bench.measure.pool import report
from sp_bench.workload.transformer import Layer, rotary


def measure_layers(setting: Setting, costs: Costs) -> None:
    """Add the costs of both. The first repetition of each case is a warm-up and is dropped."""
    for dtype in setting.dtypes:
        _product(setting, dtype, costs)
    _layers(setting, setting.dtypes[0], costs)


def _product(setting: Setting, dtype: str, costs: Costs) -> None:
    """The feed-forward network's product of the most tokens."""
    model = layer_of(setting, max(setting.sizes), dtype)[0].model
    rows, inputs, outputs = costs.product_shape = max(setting.sizes), model.width, model.ffn
    kind = {"dtype": getattr(torch, dtype), "device": setting.device}
    x, weight = torch.randn(rows, inputs, **kind), torch.randn(outputs, inputs, **kind)
    for repetition in range(1 + setting.repetitions):
        report(("product", dtype, repetition))
        seconds, _ = CLOCKS[setting.device](torch.nn.functional.linear, x, weight)
        if repetition:
            costs.products_s.setdefault(dtype, []).append(seconds)


def _layers(setting: Setting, dtype: str, costs: Costs) -> None:
    """Forward and backward of a layer whose attention returns its queries, of each number of tokens.

    The backward computes all but the attention again.
    """
    clock, kind = CLOCKS[setting.device], getattr(torch, dtype)
    wide = torch.promote_types(kind, torch.float32)
    train, problem = layer_of(setting, max(setting.sizes), dtype)
    layer = Layer(train.model, problem, wide).to(setting.device)
    for repetition in range(1 + setting.repetitions):
        for tokens in setting.sizes:
            report(("layer", repetition, tokens))
            positions = torch.arange(tokens, device=setting.device)
            angles = rotary(positions, setting.head_dim, train.model.rope_theta, wide)
            x = torch.randn(1, tokens, train.model.width, dtype=kind, device=setting.device, requires_grad=True)
            forward_s, out = clock(layer, x, angles, None, _queries, RECOMPUTE)
            gradients = partial(torch.autograd.grad, retain_graph=True)  # a clock may call more than once
            backward_s, _ = clock(gradients, out, (x, *layer.parameters()), torch.ones_like(out))
            if repetition:
                costs.layers_s.setdefault(("forward", tokens), []).append(forward_s)
                costs.layers_s.setdefault(("backward", tokens), []).append(backward_s)


def _queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries in place of their attention; k and v count with nothing, but get gradients."""
    return q + 0 * (k.sum() + v.sum())
