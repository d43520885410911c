"""Time blocks, folds, copies, and a decoder's layer without its attention, on one rank while the others are idle.

Runs inside a rank's process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.calibrating.clock import CLOCKS
from sp_bench.calibrating.layer_figures import RECOMPUTE, layer_of
from sp_bench.calibrating.setting import Costs, Gpu, Setting
from sp_bench.errors import RequestError
from sp_bench.kernels import BlockKernel, choose, fold_
from sp_bench.kernels.fold import fold_bytes
from sp_bench.measure.pool import report
from sp_bench.plan.regions import RegionKind
from sp_bench.workload.transformer import Layer, rotary

LAUNCHES = 20
"""The number of tiny blocks in each repetition."""
AT_ONCE = 8
"""Calls that are queued before a GPU is waited for, so that it doesn't idle between small blocks."""


def describe_gpu() -> Gpu:
    """The GPU that `measure_kernels` measures. Raises RequestError if torch finds none."""
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} can't use a GPU here"
        raise RequestError("device=cuda", why, "device=cpu would work, or a torch for CUDA")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        software=f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    )


def measure_kernels(setting: Setting) -> Costs | None:
    """The costs, on rank 0; None on the others. The first repetition of each case is a warm-up and is dropped."""
    if dist.is_initialized() and dist.get_rank():
        return None
    costs = Costs()
    for dtype in setting.dtypes:
        _blocks(setting, dtype, costs)
    _launches(setting, costs)
    _memory(setting, costs)
    measure_layers(setting, costs)
    return costs


def random(setting: Setting, tokens: int, dtype: str, *, heads: int | None = None) -> Tensor:
    """A random tensor (1, tokens, heads, head_dim)."""
    shape = (1, tokens, heads or setting.heads, setting.head_dim)
    return torch.randn(shape, device=setting.device).to(getattr(torch, dtype))


def kernel_for(setting: Setting, dtype: str) -> BlockKernel:
    """The kernel that is measured. Raises RequestError if it is unknown or refuses the setting."""
    return choose(setting.kernel, setting.device, dtype, setting.head_dim)


def _blocks(setting: Setting, dtype: str, costs: Costs) -> None:
    kernel = kernel_for(setting, dtype)
    costs.kernel = kernel.name
    q, dout = (random(setting, max(setting.sizes), dtype) for _ in range(2))
    k, v = (random(setting, max(setting.sizes), dtype, heads=setting.kv_heads) for _ in range(2))
    cases = [(RegionKind.FULL, *pair) for pair in itertools.product(setting.sizes, repeat=2)]
    cases += [(RegionKind.CAUSAL, size, size) for size in setting.sizes]
    # All cases within each repetition, so that drift of the machine affects them alike.
    for repetition in range(1 + setting.repetitions):
        for mask, rows, columns in cases:
            report((dtype, repetition, mask.value, rows, columns))
            block = q[:, :rows], k[:, :columns], v[:, :columns]
            forward_s, (out, lse) = _timed(setting, kernel.forward, *block, mask)
            report((dtype, repetition, mask.value, rows, columns, "backward"))
            backward_s, _ = _timed(setting, kernel.backward, dout[:, :rows], *block, out, lse, mask)
            if repetition:
                for phase, seconds in (("forward", forward_s), ("backward", backward_s)):
                    key = (dtype, f"{phase}_{mask.value}", rows, columns)
                    costs.blocks_s.setdefault(key, []).append(seconds)


def _timed(setting: Setting, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """The seconds of a call and its result, after the same call has kept the device busy for as long as is asked."""
    until = time.perf_counter() + setting.sustained_s
    while time.perf_counter() < until:
        for _ in range(AT_ONCE):
            call(*arguments)
        if setting.device == "cuda":
            torch.cuda.synchronize()
    return CLOCKS[setting.device](call, *arguments)


def _launches(setting: Setting, costs: Costs) -> None:
    kernel, clock = kernel_for(setting, setting.dtypes[0]), CLOCKS[setting.device]
    tiny = [random(setting, setting.launch_tokens, setting.dtypes[0], heads=1) for _ in range(3)]
    for repetition in range(LAUNCHES * (1 + setting.repetitions)):
        seconds, _ = clock(kernel.forward, *tiny, RegionKind.FULL)
        if repetition >= LAUNCHES:
            costs.launch_s.append(seconds)


def _memory(setting: Setting, costs: Costs) -> None:
    """Time folds of a partial of the first dtype into an fp32 accumulator, its sum and cast, and copies of one."""
    clock, tokens = CLOCKS[setting.device], setting.memory_tokens
    out, other = (random(setting, tokens, "float32") for _ in range(2))
    part = random(setting, tokens, setting.dtypes[0])
    lse, part_lse = (torch.randn(1, setting.heads, tokens, device=setting.device) for _ in range(2))
    costs.fold_bytes, costs.copy_bytes = fold_bytes(out, lse, part), 2 * out.nbytes
    costs.sum_bytes = 3 * out.nbytes + 2 * part.nbytes
    for repetition in range(1 + setting.repetitions):
        report(("memory", repetition))
        fold_s, _ = clock(fold_, out, lse, part, part_lse)
        copy_s, _ = clock(out.copy_, other)
        sum_s, cast_s = clock(out.add_, part)[0], clock(other.copy_, part)[0]
        if repetition:
            costs.fold_s.append(fold_s)
            costs.copy_s.append(copy_s)
            costs.sum_s.append(sum_s + cast_s)


def measure_layers(setting: Setting, costs: Costs) -> None:
    """Add the costs of a layer without its attention, and of a matrix product."""
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
