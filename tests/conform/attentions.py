"""An attention that is right, and for each kind of bug one that has it. Imported inside the ranks: no pytest.

All of them gather K and V of all ranks. Each wrong one replaces a part of `attend`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional

from sp_bench.conform import claims
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV

CONTIGUOUS = claims(layout="contiguous")
Group = dist.ProcessGroup


class Gather(torch.autograd.Function):
    """The tensor of each rank, on every rank. Gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        gradients = torch.stack(grad_outputs)
        dist.all_reduce(gradients, group=ctx.group)
        return gradients[ctx.group.rank()].clone(), None


def gathered(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    return Gather.apply(x, group)  # pyright: ignore[reportReturnType]


def join(x: Tensor, group: Group) -> Tensor:
    """The tokens of all ranks: (B, S, H, D) -> (B, n S, H, D)."""
    return torch.cat(gathered(x, group), dim=1)


def join_local(x: Tensor, group: Group) -> Tensor:
    """The same, where only the rank's own part has a gradient."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    parts[group.rank()] = x
    return torch.cat(parts, dim=1)


def expand(x: Tensor, heads: int) -> Tensor:
    """A key head for each query head."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[3])


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def hide(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -math.inf)


def later(rows: Tensor, keys: Tensor) -> Tensor:
    """The keys that a causal mask hides: (queries, keys)."""
    return keys[None] > rows[:, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    group: Group,
    *,
    start: int | None = None,
    documents: Sequence[int] = (),
    join_k: Callable = join,
    join_v: Callable = join,
    expand: Callable = expand,
    scale: Callable = scale,
    softmax: Callable = softmax,
    hide: Callable = hide,
    later: Callable = later,
) -> Tensor:
    """Exact attention of contiguous tokens, of which this rank's begin at `start`; its parts can be replaced."""
    keys, values = (expand(x, q.shape[2]).float() for x in (join_k(k, group), join_v(v, group)))
    rows = (group.rank() * q.shape[1] if start is None else start) + torch.arange(q.shape[1])
    columns = torch.arange(keys.shape[1])
    scores = torch.einsum("bshd,bthd->bhst", q.float(), keys) * scale(q)
    hidden = later(rows, columns) if causal else columns[None] < 0
    if documents:
        of = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        hidden = hidden | (of[rows][:, None] != of[columns][None])
    return torch.einsum("bhst,bthd->bshd", softmax(hide(scores, hidden)), values).to(q.dtype)


def sent(problem: Problem, phase: str) -> float:
    """K and V of each rank go to all others. All-reduced, their gradients are twice that."""
    return (1 + (phase == "backward")) * problem.n * (problem.n - 1) * problem.chunk_bytes(KV, wire=True)


@claims(layout="contiguous", documents=True, sent_bytes=sent)
def right(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()) -> Tensor:
    return attend(q, k, v, causal, group, documents=documents)


def wrong(**parts: Any) -> Callable[..., Tensor]:
    """An attention with other parts."""

    @CONTIGUOUS
    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
        return attend(q, k, v, causal, group, **parts)

    return function


def joined_as_one(x: Tensor, group: Group) -> Tensor:
    """Right for a batch of one only."""
    parts = torch.stack(gathered(x, group))
    return parts.reshape(x.shape[0], -1, *x.shape[2:])


def some_heads(scores: Tensor) -> Tensor:
    """Only as many heads as two ranks share evenly."""
    shares = scores.softmax(dim=-1)
    return torch.cat((shares[:, : shares.shape[1] // 2 * 2], 0 * shares[:, shares.shape[1] // 2 * 2 :]), dim=1)


def naive(scores: Tensor) -> Tensor:
    """Without the maximum, which overflows."""
    powers = scores.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def noisy(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1) * (1 + 1e-7 * torch.rand(scores.shape))


def in_8_bits(x: Tensor, group: Group) -> Tensor:
    """16 bits are sent as 8."""
    return join(x if x.dtype == torch.float32 else x.to(torch.float8_e4m3fn).to(x.dtype), group)


def of_one_dtype(scores: Tensor, hidden: Tensor) -> Tensor:
    """Refuses what autocast made of the scores."""
    return scores.masked_scatter(hidden, torch.full(scores.shape, -math.inf))


out = wrong(later=lambda rows, keys: keys[None] >= rows[:, None] + 2)
dk = wrong(join_k=join_local)
dv = wrong(join_v=join_local)
kv_heads = wrong(expand=lambda x, heads: x.repeat(1, 1, heads // x.shape[2], 1))
heads = wrong(softmax=some_heads)
head_dim = wrong(scale=lambda q: 1 / math.sqrt(min(q.shape[3], 64)))
batch = wrong(join_k=joined_as_one)
large_scores = wrong(softmax=naive)
determinism = wrong(softmax=noisy)


def gathered_by_torch(x: Tensor, group: Group) -> Tensor:
    """On gloo its backward takes gradients for contiguous, and ranks of the group for those of the world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cat(functional.all_gather(x, group=group), dim=1)


torch_gather = wrong(join_k=gathered_by_torch, join_v=gathered_by_torch)


@claims(layout="contiguous", dtypes=("float32", "bfloat16"))
def dtypes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    return attend(q, k, v, causal, group, join_k=in_8_bits)


@CONTIGUOUS
def dq(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """The gradient of q has the scale twice."""
    scaled = q.view_as(q)
    if scaled.requires_grad:
        scaled.register_hook(lambda gradient: gradient * scale(q))
    return attend(scaled, k, v, causal, group)


@claims(layout="contiguous", uneven=True)
def uneven(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, seqlen: int) -> Tensor:
    """Takes for granted that all ranks have as many tokens as itself."""
    longest = -(-seqlen // group.size())
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.shape[1])) for x in (q, k, v))
    local = longest - (group.rank() >= seqlen % group.size() > 0)
    return attend(q, k, v, causal, group)[:, :local]


@claims(layout="contiguous", documents=True)
def documents(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()) -> Tensor:
    """It ignores where documents begin."""
    return attend(q, k, v, causal, group)


@claims(layout="contiguous", documents=True)
def padding(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group, documents: Sequence[int] = ()) -> Tensor:
    """Joins a short last document to the one before it."""
    lengths = list(documents)
    if lengths and lengths[-1] < 6:
        lengths[-2:] = [sum(lengths[-2:])]
    return attend(q, k, v, False if documents else causal, group, documents=lengths)


@CONTIGUOUS
def strides(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Reads k as if it were contiguous."""
    return attend(q, k.as_strided(k.shape, torch.empty(k.shape).stride()), v, causal, group)


_first_keys: dict[tuple, Tensor] = {}


@CONTIGUOUS
def repeated(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Keeps the first call's keys."""
    key = (q.shape, k.shape, q.dtype)
    kept = _first_keys.setdefault(key, k.detach().clone())
    return attend(q, k + (kept - k).detach(), v, causal, group)


class _Slot(torch.autograd.Function):
    """Saves what the backward needs in one place of the process, or in a queue, instead of its context."""

    saved: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group, queue: bool) -> Tensor:
        if not queue:
            _Slot.saved.clear()
        _Slot.saved.append((q, k, v))
        ctx.how, ctx.queue = (causal, group), queue
        return attend(q, k, v, causal, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in _Slot.saved.pop(0)]
        with torch.enable_grad():
            result = attend(*leaves, *ctx.how)
        if not ctx.queue:
            _Slot.saved.append(tuple(leaves))
        gradients = torch.autograd.grad(result, leaves, grad_outputs[0])
        return (*gradients, None, None, None)


@CONTIGUOUS
def in_flight(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """One slot for what the backward needs."""
    return _Slot.apply(q, k, v, causal, group, False)  # pyright: ignore


@CONTIGUOUS
def dropped(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """A queue of what backwards need, which expects one for each forward."""
    return _Slot.apply(q, k, v, causal, group, True)  # pyright: ignore


class _LastMask(torch.autograd.Function):
    """Its backward takes the mask of the process's last forward."""

    last: bool = False

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.group, _LastMask.last = group, causal
        return attend(q, k, v, causal, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            result = attend(*leaves, _LastMask.last, ctx.group)  # pyright: ignore[reportCallIssue]
        return (*torch.autograd.grad(result, leaves, grad_outputs[0]), None, None)


@CONTIGUOUS
def instances(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """The last instance's mask is that of the process."""
    return _LastMask.apply(q, k, v, causal, group)  # pyright: ignore


@CONTIGUOUS
def sub_groups(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Takes the rank in the world for that in the group."""
    return attend(q, k, v, causal, group, start=dist.get_rank() * q.shape[1])


@CONTIGUOUS
def frozen(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Needs a gradient of k."""
    k = k.view_as(k)
    k.register_hook(lambda gradient: gradient) if torch.is_grad_enabled() else None
    return attend(q, k, v, causal, group)


@CONTIGUOUS
def inputs_kept(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Uses k as a buffer once it is sent."""
    found = attend(q, k, v, causal, group)
    k.data.zero_()
    return found


@CONTIGUOUS
def no_grad(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Takes for granted that there will be a backward."""
    found = attend(q, k, v, causal, group)
    found.register_hook(lambda gradient: gradient)
    return found


autocast = wrong(hide=of_one_dtype)


@CONTIGUOUS
def compile(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Another mask where it is traced."""
    return attend(q, k, v, causal is not torch.compiler.is_compiling(), group)


@CONTIGUOUS
def checkpoint(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Another mask where the forward runs again inside the backward."""
    inside = torch._C._current_graph_task_id() != -1
    return attend(q, k, v, causal is not inside, group)


@claims(layout="contiguous", sent_bytes=lambda problem, phase: problem.n * problem.chunk_bytes(KV, wire=True))
def volume(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Claims the volume of two ranks for all numbers."""
    return attend(q, k, v, causal, group)


_kept: list[Tensor] = []


@CONTIGUOUS
def memory(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Keeps all outputs."""
    _kept.append(attend(q, k, v, causal, group))
    return _kept[-1]


@CONTIGUOUS
def messages(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Tells the next rank that it is done, which that doesn't want to know."""
    if group.size() > 1:
        dist.isend(torch.zeros(1), group=group, group_dst=(group.rank() + 1) % group.size())
    return attend(q, k, v, causal, group)


@CONTIGUOUS
def hangs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Waits for a message that nobody sends."""
    if group.rank() == 1:
        dist.recv(torch.zeros(1), group=group, group_src=0)
    return attend(q, k, v, causal, group)


@CONTIGUOUS
def refuses(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Group) -> Tensor:
    """Says that it takes no batch."""
    if q.shape[0] > 1:
        raise NotImplementedError("one sequence at a time")
    return attend(q, k, v, causal, group)
