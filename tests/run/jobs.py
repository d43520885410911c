"""Jobs of ranks in the tests of sp_bench.run. Imported inside the ranks: no pytest, no hypothesis.

Shape legend: B batch, S tokens, H heads, K kv_heads, D head_dim; tensors of the whole sequence have S = n * tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from sp_bench import SequenceParallelAttention
from sp_bench.plan.method import PHASES
from sp_bench.run.buffers import Arena
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.transport import Message, Turn
from tests.support.attention_cases import (
    HEAD_DIM,
    Case,
    Difference,
    Inputs,
    Results,
    difference,
    inputs,
    sinks_of,
    with_sinks,
)
from tests.support.ranks import group_of


def attend(attention: SequenceParallelAttention, full: Inputs) -> Results:
    """Forward and backward of this rank's tokens."""
    seqlen, kv_seqlen = full.q_BSHD.shape[1], full.k_BSKD.shape[1]
    leaves = [x.requires_grad_() for x in shards(attention, full)[:3]]
    out = attention(*leaves, seqlen=seqlen, kv_seqlen=kv_seqlen)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, attention.shard(full.dout_BSHD)))


def shards(attention: SequenceParallelAttention, whole: Inputs | Results) -> list[Tensor]:
    """This rank's part of each tensor: the keys before all queries are assigned on their own."""
    seqlen, kv_seqlen = whole[0].shape[1], whole[2].shape[1]
    history = attention.mask.history(seqlen, kv_seqlen)
    of_keys = [name in ("k_BSKD", "v_BSKD", "dk_BSKD", "dv_BSKD") for name in whole._fields]
    return [attention.shard(x, history * keys) for x, keys in zip(whole, of_keys, strict=True)]


def scaled(method: str, n: int, scale: float) -> list[float] | None:
    """How far this rank's out, dq, dk and dv are from torch's attention with that scale, in fp64."""
    if (group := group_of(n, (method, scale))) is None:
        return None
    full = inputs(12 * n, 2, "float64")
    attention = SequenceParallelAttention(method, group=group, scale=scale)
    got = attend(attention, full)
    q, k, v = leaves = [x.detach().clone().requires_grad_() for x in full[:3]]
    q_BHSD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (q, k, v))
    of_whole = functional.scaled_dot_product_attention(
        q_BHSD, k_BHSD, v_BHSD, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    wanted = [of_whole.detach(), *torch.autograd.grad(of_whole, leaves, full.dout_BSHD)]
    return [float((x - attention.shard(y)).abs().max()) for x, y in zip(got, wanted, strict=True)]


def find_differences(cases: Sequence[Case]) -> dict[Case, tuple[Difference, ...]]:
    """For each case, how far this rank's out, dq, dk and dv are from the fp64 reference."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is None:
            continue
        seqlen, attention = case.seqlen, case.attention(group)
        got = attend(attention, case.inputs(seqlen))
        wanted = case.reference(seqlen)
        found[case] = tuple(difference(x, y) for x, y in zip(got, shards(attention, wanted), strict=True))
    return found


def find_differences_in_fresh_memory(cases: Sequence[Case]) -> dict[Case, tuple[Difference, ...]]:
    """`find_differences`, with buffers that hold NaN wherever nothing has come."""
    lend = Arena.lend

    def spoiled(arena: Arena, *given: Any) -> list[Tensor]:
        return [x.fill_(torch.nan) for x in lend(arena, *given)]

    with patch.object(Arena, "lend", spoiled):
        return find_differences(cases)


def find_differences_with_sinks(cases: Sequence[Case]) -> dict[Case, tuple[Difference, ...]]:
    """As find_differences, with sinks; the last one is of their gradient, which ranks add up."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is None:
            continue
        attention, whole = case.attention(group), case.inputs(case.seqlen)
        leaves = [x.requires_grad_() for x in shards(attention, whole)[:3]]
        sinks = sinks_of(case.heads).requires_grad_()
        out = attention(*leaves, seqlen=case.seqlen, kv_seqlen=case.keys, sinks=sinks)
        *gradients, of_sinks = torch.autograd.grad(out, [*leaves, sinks], shards(attention, whole)[3])
        if case.n > 1:
            dist.all_reduce(of_sinks, group=group)
        wanted, of_wanted, size = with_sinks(case)
        got = zip((out.detach(), *gradients), shards(attention, wanted), strict=True)
        summed = difference(of_sinks, of_wanted)._replace(norm2=float(size.square().sum()))
        found[case] = (*(difference(x, y) for x, y in got), summed)
    return found


def results(cases: Sequence[Case]) -> dict[Case, Results]:
    """For each case, this rank's out, dq, dk and dv."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is not None:
            found[case] = attend(case.attention(group), case.inputs(case.seqlen))
    return found


def find_sent(cases: Sequence[Case]) -> dict[Case, tuple[dict, dict]]:
    """For each case, the bytes that this rank had sent after the forward and after the backward."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is None:
            continue
        attention, full = case.attention(group), case.inputs(case.seqlen)
        leaves = [x.requires_grad_() for x in shards(attention, full)[:3]]
        out = attention(*leaves, seqlen=case.seqlen, kv_seqlen=case.keys)
        after_forward = dict(attention.sent_bytes)
        out.backward(attention.shard(full.dout_BSHD))
        found[case] = (after_forward, dict(attention.sent_bytes))
    return found


class Parts(NamedTuple):
    """Results of executing blocks alone and transfers alone, beside those of everything."""

    sent: dict[Action, dict]
    """By what was done: bytes sent by (lane, tensor, field), forward and backward."""
    kernels_s: dict[Action, float]
    differ_after: list[str]
    """Results of everything that differ in any bit once the parts have run."""
    live_bytes: int
    buffer_bytes: int


def run_parts(cases: Sequence[Case]) -> dict[Case, Parts]:
    """For each case, its plans executed as a whole, in parts, and as a whole again."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is None:
            continue
        attention, full = case.attention(group), case.inputs(case.seqlen)
        q, k, v, dout = (attention.shard(x) for x in full)
        engine, results, live, saved = _alone(attention, q, k, v), [], LiveBytes(), {}
        parts = Parts({}, {}, [], 0, 0)
        for action in (*Action, Action.EVERYTHING):
            engine.transport.sent_bytes.clear()
            out, fresh = engine.forward(q, k, v, action, live)
            saved = fresh if action is Action.EVERYTHING else saved
            gradients = engine.backward(dout, saved, action, live)
            parts.sent[action] = dict(engine.transport.sent_bytes)
            parts.kernels_s[action] = sum(engine.spent(phase).kernels_s for phase in PHASES)
            if action is Action.EVERYTHING:
                results.append(Results(out, *gradients))
        buffers = sum(x.nbytes for x in engine.buffers.tensors())
        found[case] = parts._replace(
            differ_after=_unequal(results[1], results[0]), live_bytes=live.peak, buffer_bytes=buffers
        )
    return found


def _alone(attention: SequenceParallelAttention, q: Tensor, k: Tensor, v: Tensor) -> Engine:
    """The attention's engine with buffers of its own, as measured points have it."""
    of = attention.engine(q, k, v)
    return Engine(of.plans, of.problem, of.kernel, q.device, rank=attention.rank, transport=of.transport)


def round_trip(cases: Sequence[Case]) -> dict[Case, tuple[list[int], bool, bool]]:
    """For each case: this rank's positions; whether shard takes those tokens, and whether unshard undoes it."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is None:
            continue
        attention, full = case.attention(group), case.inputs(case.seqlen).k_BSKD
        positions, local = attention.positions(full.shape[1]), attention.shard(full)
        back = attention.unshard(local.requires_grad_())
        found[case] = (positions.tolist(), torch.equal(local, full[:, positions]), torch.equal(back, full))
    return found


class Counting(GlooTransport):
    """Between CPUs; counts the receives that are posted."""

    posted = 0

    def _receive(self, lane: int, source: int, number: int, x: Tensor) -> dist.Work:
        self.posted += 1
        return super()._receive(lane, source, number, x)


def receive_ahead(tokens: int) -> tuple[list[list[float]], int]:
    """Arrivals from the rank before, twice where receives were posted ahead, then as usual; receives posted.

    Each time another number of tokens.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    transport, found = Counting(dist.group.WORLD), []
    source, target = (rank - 1) % n, (rank + 1) % n
    into = [torch.zeros(tokens + turn) for turn in range(3)]
    for turn in range(2):
        transport.prepost(Turn(1, turn), [(source, [into[turn]])])
    dist.barrier()
    for turn, value in enumerate((100.0, 200.0, 300.0)):
        sent = torch.full((tokens + turn,), value + rank)
        transport.exchange(Turn(1, turn), [(source, [into[turn]])], [(target, [sent])], [("kv", "kv", "k")])
        found.append(into[turn].unique().tolist())
    return found, transport.posted


def go_onward(tokens: int, ready: tuple[bool, bool], all_ranks: bool) -> tuple[list[list[float]], int]:
    """Two hops round a ring with two buffers, and another message: what came, and the bytes that were counted.

    The second hop is told to send other tensors than the first, going onward, had it begin with. It receives into what
    the first one sends. Odd ranks are ready only if all ranks are.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    source, target = (rank - 1) % n, (rank + 1) % n
    transport, keys = GlooTransport(dist.group.WORLD), [("kv", "kv", "k"), ("kv", "kv", "v")]
    begin = iter(ready if all_ranks or rank % 2 == 0 else (False, False))
    mine, other, last = ([torch.full((tokens,), x + y + rank) for x in (100.0, 200.0)] for y in (0.0, 20.0, 40.0))
    into, found = [torch.zeros(tokens) for _ in keys], []

    def next_transfer() -> tuple[Turn, Message, Message] | None:
        return (Turn(1, 3), (source, mine), (target, into)) if next(begin) else None

    transport.exchange_pipelined(Turn(1, 2), (source, into), (target, mine), keys, next_transfer)
    transport.exchange(Turn(1, 3), [(source, mine)], [(target, other)], keys)
    found += [x.unique().tolist() for x in mine]
    transport.exchange(Turn(1, 5), [(source, into)], [(target, last)], keys)
    found += [x.unique().tolist() for x in into]
    return found, sum(transport.sent_bytes.values())


def _strided(x: Tensor) -> Tensor:
    """The same numbers in heads-first memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def differ_when_strided(case: Case) -> list[str]:
    """The results that differ in any bit if the inputs and the gradient are not contiguous."""
    if (group := group_of(case.n, case)) is None:
        return []
    attention, full = case.attention(group), case.inputs(case.seqlen)
    plain = attend(attention, full)
    q, k, v, dout = (attention.shard(x) for x in full)
    kv = torch.cat((k, v), dim=3).requires_grad_()
    q = _strided(q).requires_grad_()
    assert not q.is_contiguous()
    out = attention(q, *kv.split(HEAD_DIM, dim=3))
    dq, dkv = torch.autograd.grad(out, (q, kv), _strided(dout))
    return _unequal(Results(out, dq, *dkv.split(HEAD_DIM, dim=3)), plain)


def differ_with_broadcast_gradient(case: Case) -> list[str]:
    """The same for the gradient of out.sum(), which has strides of zero."""
    if (group := group_of(case.n, case)) is None:
        return []
    attention, full = case.attention(group), case.inputs(case.seqlen)
    plain = attend(attention, full._replace(dout_BSHD=torch.ones_like(full.dout_BSHD)))
    leaves = [attention.shard(x).requires_grad_() for x in full[:3]]
    out = attention(*leaves)
    return _unequal(Results(out, *torch.autograd.grad(out.sum(), leaves)), plain)


def differ_when_repeated(case: Case, seqlens: Sequence[int]) -> list[str]:
    """The results that differ in any bit if a shape comes again after others have used the module."""
    if (group := group_of(case.n, case)) is None:
        return []
    attention, wrong = case.attention(group), []
    first = [attend(attention, case.inputs(seqlen)) for seqlen in seqlens]
    kept = [Results(*(x.clone() for x in results)) for results in first]
    for seqlen, results, copy in zip(seqlens, first, kept, strict=True):
        attend(attention, case.inputs(seqlen, seed=1))
        again = attend(attention, case.inputs(seqlen))
        fresh = attend(case.attention(group), case.inputs(seqlen))
        wrong += [f"seqlen {seqlen}: {name}, again" for name in _unequal(again, copy)]
        wrong += [f"seqlen {seqlen}: {name}, in a module of its own" for name in _unequal(fresh, copy)]
        wrong += [f"seqlen {seqlen}: {name}, kept while others ran" for name in _unequal(results, copy)]
    return wrong


def differ_when_interleaved(case: Case) -> list[str]:
    """The results that differ in any bit if two forwards come before their two backwards."""
    if (group := group_of(case.n, case)) is None:
        return []
    attention, wrong = case.attention(group), []
    both = [case.inputs(case.seqlen, seed) for seed in (0, 1)]
    plain = [attend(attention, full) for full in both]
    leaves = [[attention.shard(x).requires_grad_() for x in full[:3]] for full in both]
    outs = [attention(*three) for three in leaves]
    for i in (0, 1):
        gradients = torch.autograd.grad(outs[i], leaves[i], attention.shard(both[i].dout_BSHD))
        wrong += [f"call {i}: {name}" for name in _unequal(Results(outs[i], *gradients), plain[i])]
    return wrong


def _unequal(got: Results, wanted: Results) -> list[str]:
    pairs = zip(Results._fields, got, wanted, strict=True)
    return [f"{name} on rank {dist.get_rank()}" for name, x, y in pairs if not torch.equal(x, y)]


def refusal(case: Case, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str:
    """The error of an attention of these shapes."""
    q, k = torch.zeros(q_shape), torch.zeros(k_shape)
    return _refused(case, lambda attention: attention(q, k, k))


def refusals_to_shard(case: Case, seqlen: int) -> list[str]:
    """The errors of shard, positions and unshard of `seqlen` tokens."""
    x = torch.zeros(1, seqlen, 2, 8)
    uses = (
        lambda attention: attention.shard(x),
        lambda attention: attention.positions(seqlen),
        lambda attention: attention.unshard(x[:, : seqlen // case.n]),
    )
    return [_refused(case, use) for use in uses]


def refusals_of_uneven_calls(case: Case) -> list[str]:
    """The errors of calls of an uneven sequence: one that doesn't say its length, and one of twice of it."""

    def call(**seqlen: int) -> Callable[[SequenceParallelAttention], object]:
        return lambda attention: attention(*(attention.shard(x) for x in case.inputs(case.seqlen)[:3]), **seqlen)

    return [_refused(case, call()), _refused(case, call(seqlen=64))]


def _refused(case: Case, use: Callable[[SequenceParallelAttention], object]) -> str:
    if (group := group_of(case.n, case)) is None:
        return ""
    try:
        use(case.attention(group))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
