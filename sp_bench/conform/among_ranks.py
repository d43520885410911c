"""Checks of what ranks do to each other, in ranks. As in checks.py, a text says what is wrong."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from sp_bench.conform.stage import Inputs, Stage, compared
from sp_bench.workload.exactness import NAMES

PROBE_S = 5
"""Seconds that a probe for messages may take."""


def messages(stage: Stage) -> str:
    """After a call, messages between all ranks arrive as sent: none was left on the group, nor a receive for one."""
    stage.run(stage.inputs())
    peers = [rank for rank in range(stage.case.n) if rank != stage.rank]
    arriving = {peer: torch.zeros(1) for peer in peers}
    receives = {p: dist.irecv(x, group=stage.group, group_src=p) for p, x in arriving.items()}
    leaving = [dist.isend(torch.tensor([1000.0 * stage.rank + p]), group=stage.group, group_dst=p) for p in peers]
    try:
        for peer, work in receives.items():
            assert work is not None
            work.wait(timedelta(seconds=PROBE_S))
            if arriving[peer].item() != 1000.0 * peer + stage.rank:
                return f"a message from rank {peer} was left on the group"
        for work in leaving:
            assert work is not None
            work.wait(timedelta(seconds=PROBE_S))
    except RuntimeError as error:
        return f"a message or a receive was left on the group ({str(error).splitlines()[0][:80]})"
    return ""


def other_length(stage: Stage) -> str:
    """After a right call the first rank gets half of its tokens. If the subject answers, it is right for the tokens
    that it got, in order; where it takes `seqlen`, that is their number.

    Raising or dying is right too (Check.loud). A function that is for other layouts than contiguous ones can't answer.
    """
    if wrong := stage.wrong(stage.run(stage.inputs()), stage.inputs(), "before"):
        return wrong
    missing = stage.case.tokens // 2
    cut = stage.case.simpler(more=-missing)
    instance = stage.instance.at(cut) if stage.instance.at else stage.another(cut)
    whole = Inputs(*(x[:, : cut.seqlen] for x in stage.inputs()))
    first, last = (max(0, rank * stage.case.tokens - missing) for rank in (stage.rank, stage.rank + 1))
    local = Inputs(*(x[:, first:last].contiguous() for x in whole))
    with _silenced():
        leaves = [x.detach().requires_grad_() for x in local[:3]]
        out = instance.attend(*leaves)
        shapes: list[Any] = [None] * stage.case.n
        dist.all_gather_object(shapes, (tuple(out.shape), tuple(local.q.shape)), group=stage.group)
        answers = f"rank 0 has {stage.case.tokens - missing} tokens and the others {stage.case.tokens}, but none raises"
        for rank, (wrong, wanted) in enumerate(shapes):
            if wrong != wanted:
                return f"{answers}: out of rank {rank} is {wrong}, where {wanted} is right"
        results: list[Any] = [None] * stage.case.n
        dist.all_gather_object(results, stage.backward(out, leaves, local.dout), group=stage.group)
    joined = {name: torch.cat(parts, dim=1) for name, *parts in zip(NAMES, *results, strict=True)}
    wrong = "; ".join(compared(joined, whole, cut, stage.case.dtype).values())
    return f"{answers}: {wrong}" if wrong else ""


@contextmanager
def _silenced() -> Iterator[None]:
    """Without stderr and core files, as gloo ends a process that gets more than it awaits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def sub_groups(stage: Stage) -> str:
    """The even and the odd ranks each run an attention of their own at the same time."""
    parity = dist.get_rank() % 2
    group = _halves()[parity]
    stage = Stage(stage.subject, stage.case, group)
    inputs = stage.inputs(seed=parity)
    return stage.wrong(stage.run(inputs), inputs, f"ranks {'odd' if parity else 'even'}")


@lru_cache
def _halves() -> list[Any]:
    """The groups of even and of odd ranks, once in each process."""
    world = dist.get_world_size()
    return [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
