"""Jobs of ranks whose keys and values are made of latents. Imported inside the ranks: no pytest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.cluster.device import DeviceCosts, DeviceSection
from sp_bench.lower import lower
from sp_bench.lower.transports import GLOO
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block, Plan
from sp_bench.plan.problem import Problem
from sp_bench.reading import read
from sp_bench.resources import conf_content, conf_files
from sp_bench.run.engine import Engine
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.latents import Expanding, Latents
from sp_bench.run.nccl import transport_for
from sp_bench.run.sharding import owned
from sp_bench.simulate.blocks import BlockCosts
from tests.support.attention_cases import Case, Difference, difference
from tests.support.ranks import group_of
from tests.support.seen import seen

LATENT, ROPE = 20, 4
NAMES = ("out", "dq", "dc", "of_keys", "of_values")


class Found(NamedTuple):
    """How far a rank's results are from fp64, and its bytes beside their counts."""

    errors: dict[str, Difference]
    """Those of out, dq and dc, and of the matrices' gradients, which are those of all ranks."""
    sent: int
    counted: int
    closed: float
    """The closed form of what a GPU sends, for whole chunks."""
    live: int
    expected: int
    makings: tuple[int, int]
    """How often the forward's blocks made keys of latents, and of how many rows."""
    simulated: tuple[int, int]
    """As many as a simulation has on this rank."""


def of_latents(case: Case) -> Problem:
    """The case's attention, whose keys of 16 elements have 4 that all heads share."""
    return replace(case.whole, latent_dim=LATENT, rope_dim=ROPE)


def find_errors(cases: Sequence[Case]) -> dict[Case, Found]:
    """For each case that this rank has a part in, what it found."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is not None:
            found[case] = _found(case, group)
    return found


def _found(case: Case, group) -> Found:
    rank = dist.get_rank(group) if case.n > 1 else 0
    method = case.built
    problem = method.assigned(of_latents(case))
    plans = {phase: method.plan(problem, phase, case.costs) for phase in PHASES}
    check_all(plans, problem)
    q, c, dout = _whole(problem)
    latents = Latents.random(problem, 3, torch.device("cpu"))
    assert latents is not None and latents.gradients is not None
    of_queries, of_keys = owned(problem.queries, rank), owned(problem.keys, rank)
    transport = transport_for(group, torch.device("cpu"), plans, None) if case.n > 1 else None
    kernel = case.kernel
    engine = Engine(plans, problem, kernel, torch.device("cpu"), rank=rank, transport=transport, latents=latents)
    live, results, rows = LiveBytes(), (), []
    for turn in range(2):  # the second one uses the same buffers
        for gradient in latents.gradients:
            gradient.zero_()
        given = q[:, of_queries].clone(), c[:, of_keys].clone(), c.new_empty(*c[:, of_keys].shape[:3], 0)
        with _counted() as made:
            out, saved = engine.forward(*given, live=live if turn else None)
        rows = list(made)
        results = (out, *engine.backward(dout[:, of_queries].clone(), saved, live=live if turn else None))
    sent = sum(engine.transport.sent_bytes.values())
    engine.close()
    sums = [x.clone() for x in latents.gradients]
    if case.n > 1:
        for x in sums:
            dist.all_reduce(x, group=group)
    wanted = _dense(case, problem, q, c, dout, latents)
    mine = [wanted[0][:, of_queries], wanted[1][:, of_queries], wanted[2][:, of_keys], *wanted[3:]]
    errors = {name: difference(x, y) for name, x, y in zip(NAMES, (*results[:3], *sums), mine, strict=True)}
    volumes = (account.volume(plan, problem) for plan in plans.values())
    counted = 2 * sum(sum(volume.of(rank).values()) for volume in volumes)
    closed = 2 * sum(method.bytes_sent(of_latents(case), phase) for phase in PHASES)
    expected = account.peak_bytes(plans.values(), problem, GLOO)
    simulated = _simulated(plans["forward"], problem, rank)
    return Found(errors, sent, counted, closed, live.peak, expected, (len(rows), sum(rows)), simulated)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The rows of each making of keys meanwhile."""
    made, found = Expanding.made, list[int]()

    def counting(self: Expanding, c: Tensor) -> tuple[Tensor, Tensor]:
        found.append(c.shape[1])
        return made(self, c)

    Expanding.made = counting
    try:
        yield found
    finally:
        Expanding.made = made


def _simulated(plan: Plan, problem: Problem, rank: int) -> tuple[int, int]:
    """How often a rank makes keys, and of how many rows, as simulations have it."""
    problem = replace(problem, dtype="bfloat16", head_dim=128, v_head_dim=None)  # known kernels
    once, rows = (_seconds(plan, problem, rank, unit) for unit in (lambda tokens: tokens > 0, lambda tokens: tokens))
    return once, rows


def _seconds(plan: Plan, problem: Problem, rank: int, unit: Callable[[Any], Any]) -> int:
    """The time of blocks where all but the making of keys takes next to nothing, in `unit`s of it."""

    class Slow(DeviceCosts):
        def makings_s(self, problem: Problem, phase: str, tokens, several=False):
            return 1e6 * unit(tokens)

    files = conf_files("cluster")
    device = Slow.of(read(DeviceSection, conf_content(files["h100_ndr400"], files)["device"], "cluster.device"))
    costs, here = BlockCosts(plan, problem, device, lower(plan, problem, GLOO)), np.array([rank])
    taken_s = sum(float(costs.kernels_s(i, op, here)[0]) for i, op in plan if isinstance(op, Block))
    return round(taken_s / 1e6)


def _whole(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, the latents and dout of all tokens."""
    source, dtype = torch.Generator().manual_seed(problem.seqlen), getattr(torch, problem.dtype)
    of_queries = (problem.batch, problem.seqlen, problem.heads)
    shapes = (
        (*of_queries, problem.head_dim),
        (problem.batch, problem.keys.seqlen, 1, LATENT + ROPE),
        (*of_queries, problem.value_dim),
    )
    q, c, dout = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, c, dout


def _dense(case: Case, problem: Problem, q: Tensor, c: Tensor, dout: Tensor, latents: Latents) -> list[Tensor]:
    """The output and gradients by the definition, head by head, in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, c, latents.to_keys, latents.to_values)]
    q, c, to_keys, to_values = leaves
    latent, shared = c[:, :, 0, :LATENT], c[:, :, 0, LATENT:]
    rows, keys = problem.seqlen, problem.keys.seqlen
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if case.pack:
        visible = torch.from_numpy(seen(case.pack))
    elif case.causal:
        visible = visible.tril(keys - rows)
    heads = []
    for head in range(problem.heads):
        k = torch.cat([torch.einsum("bsl,el->bse", latent, to_keys[head]), shared], dim=2)
        v = torch.einsum("bsl,el->bse", latent, to_values[head])
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k) / math.sqrt(problem.head_dim)
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(2) @ v)
    out = torch.stack(heads, dim=2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
