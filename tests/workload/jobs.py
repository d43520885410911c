"""Jobs of ranks in the tests of training. Imported inside the ranks: no pytest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.measure.pool import report
from sp_bench.plan.documents import Packed
from sp_bench.run.engine import Engine, Saved
from sp_bench.run.executor import Action
from sp_bench.run.nccl import transport_for
from sp_bench.workload import Denoise, RankContext, Spec, Train
from sp_bench.workload.attention_step import make_engine, make_engines, sinks_of
from sp_bench.workload.denoiser import Denoiser
from sp_bench.workload.dit_step import Seen
from sp_bench.workload.prefill_step import PrefillStep
from sp_bench.workload.train_gate import ExactAttention, compared, on_one_process
from sp_bench.workload.trainer import Trainer
from tests.support.ranks import group_of
from tests.support.seen import seen
from tests.support.typed import of_kind

CPU = torch.device("cpu")


def context_of(group: dist.ProcessGroup | None, rank: int) -> RankContext:
    return RankContext(rank, CPU, lambda plans, _: transport_for(group, CPU, plans), alive=lambda: None)


def trainer_of(spec: Spec, rank: int, group: dist.ProcessGroup | None = None) -> Trainer:
    train = of_kind(Train, spec.workload)
    given = train.model, spec.problem, train.training, spec.seed, rank, CPU, group
    return Trainer(*given, sharded=train.sharded)


def alone(spec: Spec) -> Spec:
    """The same on one process in fp64."""
    whole = on_one_process(spec.problem)
    return replace(spec, workload=replace(of_kind(Train, spec.workload), sharded=False), problem=whole, plans={})


def _prepared(specs: Sequence[Spec]) -> Iterator[tuple[Spec, Trainer, list[Engine]]]:
    """Each point that this rank takes part in, with its trainer and the engines of its attentions."""
    for spec in specs:
        if group := group_of(spec.problem.n, spec.problem):
            engines = make_engines(spec, spec.attentions, context_of(group, dist.get_rank()))
            yield spec, trainer_of(spec, dist.get_rank(), group), engines


class Dropping:
    """An attention that forgets its sinks."""

    latents = None

    def __init__(self, engine: Engine) -> None:
        self._engine, self.backward = engine, engine.backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Saved]:
        return self._engine.forward(q, k, v)


def gradient_errors(specs: Sequence[Spec], drops_sinks: bool = False) -> list[dict[str, float]]:
    """For each: the relative error of each parameter's gradient, and of the loss, against one process in fp64."""
    found = []
    for spec, trainer, engines in _prepared(specs):
        batch = trainer.batch(0)
        attentions = [Dropping(engine) if drops_sinks else engine for engine in engines]
        trainer.loss(trainer.hidden(batch, *attentions), batch).backward()
        for engine in engines:
            engine.close()
        trainer.states.synchronize()
        one = trainer_of(alone(spec), 0)
        whole = one.batch(0)
        exact = [ExactAttention(each.mask) for each in spec.workload.attentions(one.problem)]
        one.loss(one.hidden(whole, *exact), whole).backward()
        errors = compared(trainer, one)
        found.append({**errors.worst_head, **errors.overall})
    return found


def losses(specs: Sequence[Spec], steps: int) -> list[list[float]]:
    """For each: the loss at each step of training."""
    found = []
    for _, trainer, engines in _prepared(specs):
        found.append([])
        for number in range(steps):
            report(f"step {number}")
            found[-1].append(trainer.step(number, *engines))
        for engine in engines:
            engine.close()
    return found


def prompt_errors(specs: Sequence[Spec]) -> list[float]:
    """For each prompt: the relative error of all its outputs against one attention over the whole of it in fp64.

    Rank 0 puts the tokens of all ranks and chunks into the order of their positions.
    """
    found = []
    for spec in specs:
        if not (group := group_of(spec.problem.n, spec.problem)):
            continue
        step = PrefillStep(spec, context_of(group, dist.get_rank()))
        for _ in range(2):  # the second time over a cache that is full already
            step.run("forward", Action.EVERYTHING)
        own = step._prompt
        mine = [(own.q[i], *own.new[i], step._out[i]) for i in range(len(own.q))]
        step.close()
        by_rank: list = [None] * spec.problem.n
        dist.all_gather_object(by_rank, (own.before, mine), group=group)
        q, k, v, out = (torch.cat(each, 1).double() for each in zip(*_in_order(spec, by_rank), strict=True))
        before = _before(spec, [cached for cached, _ in by_rank])
        sinks = sinks_of(spec, spec.problem, torch.device("cpu"))
        exact = _causal(q, torch.cat([before[0], k], 1), torch.cat([before[1], v], 1), _visible(spec), sinks)
        found.append(float((out - exact).norm() / exact.norm()))
    return found


def _in_order(spec: Spec, by_rank: Sequence) -> Iterator[list[torch.Tensor]]:
    """Each chunk's q, k, v and out of all ranks, their tokens in the order of positions."""
    for index, chunk in enumerate(spec.attentions):
        shards = chunk.problem.queries
        places = [place for rank in range(shards.n) for run in shards.positions(rank) for place in run]
        order = torch.tensor(places).argsort()
        of_ranks = zip(*(tensors[index] for _, tensors in by_rank), strict=True)
        yield [torch.cat(each, 1)[:, order] for each in of_ranks]


def _before(spec: Spec, by_rank: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Keys and values that were cached before the first chunk, in the order of positions."""
    keys = spec.attentions[0].problem.keys
    held = [cached[0].shape[1] for cached in by_rank]
    places = [[*chain(*keys.positions(rank))][: held[rank]] for rank in range(keys.n)]
    order = torch.tensor([*chain(*places)], dtype=torch.int64).argsort()
    return [torch.cat([cached[i] for cached in by_rank], 1)[:, order].double() for i in range(2)]


def _visible(spec: Spec) -> torch.Tensor:
    """Whether each query of a prompt sees each key, of those that the first chunk sees on: (queries, keys)."""
    problems = [chunk.problem for chunk in spec.attentions]
    queries, held = sum(each.seqlen for each in problems), problems[0].keys.seqlen - problems[0].seqlen
    found, start = torch.ones(queries, held + queries, dtype=torch.bool).tril(held), 0
    for each in problems:
        if isinstance(mask := each.mask, Packed):
            stop = start + each.seqlen
            found[start:stop] = False
            found[start:stop, held + stop - each.keys.seqlen : held + stop] = torch.from_numpy(seen(mask))
        start += each.seqlen
    return found


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of queries that are the last of the keys' tokens: (B, S, H, D) each."""
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    scores.masked_fill_(~visible, -torch.inf)
    more = scores.new_full((*scores.shape[:3], 1), -torch.inf)
    if sinks is not None:
        more[:] = sinks[:, None, None]
    return torch.einsum("bhqk,bkhd->bqhd", torch.cat([scores, more], 3).softmax(-1)[..., :-1], v)


def denoising_errors(specs: Sequence[Spec]) -> list[tuple[float, float | None]]:
    """For each denoising step: the relative error of all patches against plain attention on one process in fp64, and of
    the latter without text that is joint."""
    found = []
    for spec in specs:
        if not (group := group_of(spec.problem.n, spec.problem)):
            continue
        rank, model = dist.get_rank(), of_kind(Denoise, spec.workload).model
        denoiser = Denoiser(model, spec.problem, spec.seed, rank, CPU)
        engine, mine = of_kind(Engine, make_engine(spec, spec.problem, context_of(group, rank))), None
        for _ in range(2):  # the second time in buffers that are there already
            mine = denoiser.predicted(denoiser.latent(0), Seen(engine))
        engine.close()
        by_rank: list = [None] * spec.problem.n
        dist.all_gather_object(by_rank, (denoiser.places, mine), group=group)
        places, patches = (torch.cat(each, dim) for dim, each in enumerate(zip(*by_rank, strict=True)))
        one = alone(spec).problem
        text, keys = one.mask.held, one.keys.seqlen
        whole = Denoiser(model, replace(one, seqlen=keys + text, kv_seqlen=keys, padded=None), spec.seed, 0, CPU)
        exact, without = (whole.predicted(whole.latent(0), attend)[:, places] for attend in (_plain, _without_text))
        found.append((_off(patches, exact), _off(without, exact) if text else None))
    return found


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention of all queries to all keys."""
    both = (torch.cat(pair, 1) for pair in zip(held or (k[:, :0], v[:, :0]), (k, v), strict=True))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in both)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _without_text(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _plain(q, k, v, ())
