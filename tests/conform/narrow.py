"""Attentions that are right for most shapes and calls, and wrong for one kind of them. Imported inside the ranks.

All begin as `attend` of attentions.py, which is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.conform import claims
from tests.conform.attentions import CONTIGUOUS, Group, attend, gathered, join, later, wrong


def _of_local_blocks(rows: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """A block mask whose query block follows from the local row: a rank's offset is forgotten."""
    return later(rows, keys) | (keys[None] // tokens > (rows - rows[0])[:, None] // tokens)


length = wrong(later=partial(_of_local_blocks, tokens=256))
length_2048 = wrong(later=partial(_of_local_blocks, tokens=2048))


@claims(layout="contiguous", head_parallel=True)
def kv_heads_padded(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Query and key heads are padded one by one where key heads neither divide the ranks nor are divided by them."""
    n, heads, keys = group.size(), q.shape[2], k.shape[2]
    if keys % n and n % keys and keys != heads:
        share, key_share = math.ceil(heads / n), math.ceil(keys / n)
        index = [h // share * key_share + h % share * key_share // share for h in range(heads)]
        k, v = (x[:, :, torch.tensor(index).clamp(max=keys - 1)] for x in (k, v))
    return attend(q, k, v, causal, group)


head_dim_192 = wrong(scale=lambda q: 1 / math.sqrt(min(q.shape[3], 128)))


@claims(layout="contiguous", documents=True)
def documents_grouped(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()
) -> Tensor:
    """The path of packs expands key heads in the wrong order."""
    if documents:
        k, v = (x.repeat(1, 1, q.shape[2] // k.shape[2], 1) for x in (k, v))
    return attend(q, k, v, causal, group, documents=documents)


@claims(layout="contiguous", documents=True)
def documents_in_a_batch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()
) -> Tensor:
    """The path of packs computes the first of a batch only."""
    found = attend(q, k, v, causal, group, documents=documents)
    return torch.cat((found[:1], 0 * found[1:])) if documents else found


class _Frozen(torch.autograd.Function):
    """Leaves out a gradient where the other one isn't needed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group, needed: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how, ctx.needed = (causal, group), needed
        return attend(q, k, v, causal, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            result = attend(*leaves, *ctx.how)
        gradients = list(torch.autograd.grad(result, leaves, grad_outputs[0]))
        if not ctx.needs_input_grad[ctx.needed]:
            last = 2 if ctx.needed < 2 else 0
            gradients[last] = torch.zeros_like(gradients[last])
        return (*gradients, None, None, None)


@CONTIGUOUS
def frozen_q(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """No dv without dq."""
    return _Frozen.apply(q, k, v, causal, group, 0)  # pyright: ignore


@CONTIGUOUS
def frozen_k(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """No dv without dk, as with adapters on the projections of queries and values only."""
    return _Frozen.apply(q, k, v, causal, group, 1)  # pyright: ignore


@CONTIGUOUS
def frozen_v(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """No dq without dv."""
    return _Frozen.apply(q, k, v, causal, group, 2)  # pyright: ignore


def _windowed(rows: Tensor, keys: Tensor, causal: bool, left: int, right: int) -> Tensor:
    hidden = (keys[None] < rows[:, None] - left) | (keys[None] > rows[:, None] + right)
    return hidden | later(rows, keys) if causal else hidden


@claims(layout="contiguous", window=True, scale=True)
def windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    group: Group,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
) -> Tensor:
    """Right, with a window and another scale too."""
    parts: dict[str, Any] = {"scale": lambda q: scale} if scale else {}
    if window_size is None:
        return attend(q, k, v, causal, group, **parts)
    left, right = window_size
    hidden = partial(_windowed, causal=causal, left=left, right=right)
    return attend(q, k, v, True, group, later=hidden, **parts)


@claims(layout="contiguous", window=True)
def window(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Takes no window for longer than a rank's tokens."""
    if window_size != (-1, -1):
        window_size = (min(window_size[0], q.shape[1]), window_size[1])
    return windowed(q, k, v, causal=causal, group=group, window_size=window_size if window_size[0] >= 0 else None)


@claims(layout="contiguous", scale=True)
def scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, scale: float = 0.0) -> Tensor:
    """Ignores the scale."""
    return attend(q, k, v, causal, group)


_of_shapes: dict[tuple, Tensor] = {}


@CONTIGUOUS
def shapes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Keeps a buffer for each shape."""
    found = attend(q, k, v, causal, group)
    if q.shape not in _of_shapes:
        _of_shapes[q.shape] = torch.ones(q.shape)
    return found


_of_packs: dict[tuple, Tensor] = {}


@claims(layout="contiguous", documents=True)
def packs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()) -> Tensor:
    """Keeps a buffer for each packing."""
    if documents:
        _of_packs.setdefault(tuple(documents), torch.ones(q.shape))
    return attend(q, k, v, causal, group, documents=documents)


_few_shapes: list[Tensor] = []


@CONTIGUOUS
def few_shapes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Keeps buffers of the last 64 shapes, which is right."""
    _few_shapes.append(torch.ones(q.shape))
    del _few_shapes[:-64]
    return attend(q, k, v, causal, group)


def _sizes(x: Tensor, group: Group) -> list[int]:
    sizes: list[Any] = [None] * group.size()
    dist.all_gather_object(sizes, x.shape[1], group=group)
    return sizes


def _padded(x: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, tokens - x.shape[1]))


def _join_any(x: Tensor, group: Group) -> Tensor:
    """The tokens of ranks that have more or fewer of them."""
    sizes = _sizes(x, group)
    parts = gathered(_padded(x, max(sizes)), group)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


@CONTIGUOUS
def any_length(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Right, whatever each rank has."""
    start = sum(_sizes(q, group)[: group.rank()])
    return attend(q, k, v, causal, group, start=start, join_k=_join_any, join_v=_join_any)


def _join_padded(x: Tensor, group: Group) -> Tensor:
    return join(_padded(x, max(_sizes(x, group))), group)


@CONTIGUOUS
def other_length(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Pads what is shorter, and takes the padding for tokens."""
    tokens = max(_sizes(q, group))
    start = group.rank() * tokens
    return attend(q, k, v, causal, group, start=start, join_k=_join_padded, join_v=_join_padded)


@CONTIGUOUS
def other_length_hangs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """A rank with fewer tokens than the others awaits the rest of them."""
    if q.shape[1] < max(_sizes(q, group)):
        dist.recv(torch.zeros(1), group=group, group_src=1)
    return attend(q, k, v, causal, group)


@CONTIGUOUS
def other_length_refused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Says on all ranks that they differ."""
    if len(set(_sizes(q, group))) > 1:
        raise ValueError("all ranks have as many tokens")
    return attend(q, k, v, causal, group)


_first: dict[int, list[int]] = {}


@CONTIGUOUS
def other_length_later(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Asks for the lengths of all ranks at the first call only, and takes later tokens for as many."""
    if group.size() not in _first:
        _first[group.size()] = _sizes(q, group)
        if len(set(_first[group.size()])) > 1:
            raise ValueError("all ranks have as many tokens")
    sizes = _first[group.size()]
    start = group.rank() * sizes[0]
    return attend(q, k, v, causal, group, start=start, join_k=_join_padded, join_v=_join_padded)


@claims(layout="contiguous", uneven=True)
def any_length_of_seqlen(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, seqlen: int) -> Tensor:
    """Takes any lengths that add up to that of the whole sequence."""
    if sum(_sizes(q, group)) != seqlen:
        return 0 * any_length(q, k, v, causal=causal, group=group)
    return any_length(q, k, v, causal=causal, group=group)


@claims(layout="contiguous", masks=("full", "causal"))
def causal_ignored(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """All queries see all keys."""
    return attend(q, k, v, False, group)


def unclaimed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Right for contiguous tokens, which it doesn't claim."""
    return attend(q, k, v, causal, group)


@CONTIGUOUS
def refuses_full_on_three(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Says that three ranks see no later keys."""
    if group.size() == 3 and not causal:
        raise NotImplementedError("causal only on three ranks")
    return attend(q, k, v, causal, group)
