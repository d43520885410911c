"""Jobs of ranks in the tests of training. Imported inside the ranks: no pytest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from sp_bench.measure.pool import report
from sp_bench.peers.engine import PeerEngine
from sp_bench.plan.layout import LAYOUTS
from sp_bench.run.engine import Engine
from sp_bench.run.nccl import transport_for
from sp_bench.workload import RankContext, Spec, Train
from sp_bench.workload.attention_step import make_engine
from sp_bench.workload.train_gate import ExactAttention, compared
from sp_bench.workload.trainer import Trainer
from tests.support.ranks import group_of

CPU = torch.device("cpu")


def context_of(group: dist.ProcessGroup | None, rank: int) -> RankContext:
    return RankContext(rank, CPU, lambda plans, _: transport_for(group, CPU, plans), alive=lambda: None)


def trainer_of(spec: Spec, rank: int, group: dist.ProcessGroup | None = None) -> Trainer:
    train = cast("Train", spec.workload)
    given = train.model, spec.problem, train.training, spec.seed, rank, CPU, group
    return Trainer(*given, sharded=train.sharded)


def alone(spec: Spec) -> Spec:
    """The same on one process in fp64."""
    problem = spec.problem
    whole = replace(problem, n=1, dtype="float64", wire_dtype="", layout=LAYOUTS["contiguous"], head_slices=1)
    return replace(spec, workload=replace(cast("Train", spec.workload), sharded=False), problem=whole, plans={})


def _prepared(specs: Sequence[Spec]) -> Iterator[tuple[Spec, Trainer, Engine | PeerEngine]]:
    """Each point that this rank takes part in, with its trainer and engine."""
    for spec in specs:
        if group := group_of(spec.problem.n, spec.problem):
            engine = make_engine(spec, spec.problem, context_of(group, dist.get_rank()))
            yield spec, trainer_of(spec, dist.get_rank(), group), engine


def gradient_errors(specs: Sequence[Spec]) -> list[dict[str, float]]:
    """For each: the relative error of each parameter's gradient, and of the loss, against one process in fp64."""
    found = []
    for spec, trainer, engine in _prepared(specs):
        batch = trainer.batch(0)
        trainer.loss(trainer.hidden(batch, engine), batch).backward()
        engine.close()
        trainer.states.synchronize()
        one = trainer_of(alone(spec), 0)
        whole = one.batch(0)
        one.loss(one.hidden(whole, ExactAttention(one.problem.mask)), whole).backward()
        errors = compared(trainer, one)
        found.append({**errors.worst_head, **errors.overall})
    return found


def losses(specs: Sequence[Spec], steps: int) -> list[list[float]]:
    """For each: the loss at each step of training."""
    found = []
    for _, trainer, engine in _prepared(specs):
        found.append([])
        for number in range(steps):
            report(f"step {number}")
            found[-1].append(trainer.step(number, engine))
        engine.close()
    return found
