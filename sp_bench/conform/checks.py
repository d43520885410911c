"""The checks, as ranks run them. Each returns what is wrong, or an empty text; the registry is in catalogue.py."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_bench.conform.among_ranks import messages, other_length, sub_groups
from sp_bench.conform.case import Case
from sp_bench.conform.leaks import memory, memory_of_shapes
from sp_bench.conform.stage import Inputs, Results, Stage
from sp_bench.conform.subjects import Subject
from sp_bench.errors import RequestError
from sp_bench.peers.traffic import Traffic
from sp_bench.plan.method import PHASES

LARGE = 60.0
"""The factor of scores whose exponentials overflow fp32."""
RUNS = 10
"""Runs that must give the same bits."""


@lru_cache(maxsize=64)
def errors(subject: Subject, case: Case) -> dict[str, str]:
    """By tensor, what is wrong with one forward and backward. The four rows of a case share it."""
    stage = Stage(subject, case)
    inputs = stage.inputs()
    return stage.errors(stage.run(inputs), inputs)


def tensor(name: str, stage: Stage) -> str:
    """Describe what is wrong with one of out, dq, dk and dv."""
    return errors(stage.subject, stage.case).get(name, "")


def exact(stage: Stage) -> str:
    """All four tensors."""
    return "; ".join(errors(stage.subject, stage.case).values())


def large_scores(stage: Stage) -> str:
    """Scores whose exponentials overflow fp32. Rounding in the scores grows with them, and so do the tolerances."""
    inputs = stage.inputs(scale=LARGE)
    return stage.wrong(stage.run(inputs), inputs, dtype="bfloat16")


def strides(stage: Stage) -> str:
    """Inputs and an output gradient that are views of (B, H, S, D), and one gradient that is a single number."""
    inputs, ones = stage.inputs(), torch.ones(())
    local = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in stage.local(inputs)))
    out, leaves = stage.forward(local)
    wrong = stage.wrong(stage.backward(out, leaves, local.dout), inputs)
    out, leaves = stage.forward(local)
    expanded = ones.to(out.dtype).expand(out.shape)
    whole = inputs._replace(dout=torch.ones_like(inputs.dout))
    return wrong or stage.wrong(stage.backward(out, leaves, expanded), whole, "with the gradient of out.sum()")


def repeated(stage: Stage) -> str:
    """Three calls of one instance on different inputs, all compared after the last one."""
    results = [stage.run(stage.inputs(seed)) for seed in range(3)]
    wrong = [stage.wrong(x, stage.inputs(seed), f"call {seed + 1} of 3") for seed, x in enumerate(results)]
    return next(filter(None, wrong), "")


def in_flight(stage: Stage) -> str:
    """Two forwards, then their backwards in the same and in the reverse order."""
    for order in ((0, 1), (1, 0)):
        locals_ = [stage.local(stage.inputs(seed)) for seed in (0, 1)]
        forwards = [stage.forward(local) for local in locals_]
        for call in order:
            results = stage.backward(*forwards[call], locals_[call].dout)
            what = f"forwards 1 and 2, backwards {order[0] + 1} and {order[1] + 1}: call {call + 1}"
            if wrong := stage.wrong(results, stage.inputs(call), what):
                return wrong
    return ""


def dropped(stage: Stage) -> str:
    """A backward after other forwards that never get one, before and in between."""
    inputs = stage.inputs(0)
    local = stage.local(inputs)
    stage.forward(stage.local(stage.inputs(1)))
    out, leaves = stage.forward(local)
    stage.forward(stage.local(stage.inputs(2)))
    return stage.wrong(stage.backward(out, leaves, local.dout), inputs)


def two_instances(stage: Stage) -> str:
    """Two instances in one process, with other shapes and, where both are claimed, other masks; interleaved."""
    other = stage.case.simpler(tokens=2 * stage.case.tokens, mask="full" if stage.case.mask == "causal" else "causal")
    with suppress(RequestError):
        stage.subject.refuse(other)
        return _interleaved(stage, Stage(stage.subject, other))
    return _interleaved(stage, Stage(stage.subject, stage.case.simpler(tokens=2 * stage.case.tokens)))


def _interleaved(*stages: Stage) -> str:
    inputs = [stage.inputs(seed) for seed, stage in enumerate(stages)]
    locals_ = [stage.local(x) for stage, x in zip(stages, inputs, strict=True)]
    forwards = [stage.forward(local) for stage, local in zip(stages, locals_, strict=True)]
    wrong = ""
    for i, stage in enumerate(stages):
        wrong = wrong or stage.wrong(stage.backward(*forwards[i], locals_[i].dout), inputs[i], f"instance {i + 1}")
    return wrong


def frozen(stage: Stage) -> str:
    """Each choice of q, k and v that need a gradient, but none of them."""
    inputs = stage.inputs()
    local = stage.local(inputs)
    for needed in product((True, False), repeat=3):
        if any(needed):
            out, leaves = stage.forward(local, needed=needed)
            names = [name for name, need in zip("qkv", needed, strict=True) if need]
            what = f"only {' and '.join(names)} need{'s' * (len(names) == 1)} a gradient"
            if wrong := stage.wrong(stage.backward(out, leaves, local.dout), inputs, what):
                return wrong.removeprefix(f"{what}: ") if all(needed) else wrong
    return ""


def inputs_kept(stage: Stage) -> str:
    """q, k, v and the gradient of out are as before, and no output shares memory with them or each other."""
    local = Inputs(*(x.clone() for x in stage.local(stage.inputs())))
    kept = [x.clone() for x in local]
    results = stage.backward(*stage.forward(local), local.dout)
    changed = [name for name, x, y in zip(Inputs._fields, local, kept, strict=True) if not torch.equal(x, y)]
    if changed:
        return f"{', '.join(changed)} changed"
    named = dict(zip((*Inputs._fields, *Results._fields), (*local, *results), strict=True))
    tensors = {name: x for name, x in named.items() if x is not None}
    for name in Results._fields:
        before = {other: x.clone() for other, x in tensors.items() if other != name}
        try:
            tensors[name].add_(1)
        except RuntimeError as error:  # its elements share memory
            return f"{name} can't be written to ({str(error).splitlines()[0]})"
        for other, x in before.items():
            if not torch.equal(tensors[other], x):
                return f"{name} shares memory with {other}"
    return ""


def no_grad(stage: Stage) -> str:
    """Under no_grad and inference_mode: the same output, with no graph kept."""
    inputs, attend = stage.inputs(), stage.instance.attend
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attend(*stage.local(inputs)[:3])
        if out.requires_grad:
            return f"out needs a gradient under {mode.__name__}"
        with torch.no_grad():
            if wrong := stage.wrong(Results(out.clone(), None, None, None), inputs, mode.__name__):
                return wrong
    return ""


def autocast(stage: Stage) -> str:
    """A caller under autocast to bfloat16: within its tolerance, gradients in the dtypes of the inputs."""
    inputs = stage.inputs()
    local = stage.local(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, leaves = stage.forward(local)
    results = stage.backward(out, leaves, local.dout)
    if out.dtype not in (torch.bfloat16, local.q.dtype):
        return f"out is in {out.dtype}"
    for name, gradient, leaf in zip(("dq", "dk", "dv"), results[1:], leaves, strict=True):
        if gradient is not None and gradient.dtype != leaf.dtype:
            return f"{name} is in {gradient.dtype}, not {leaf.dtype}"
    return stage.wrong(results, inputs, dtype="bfloat16")


def compiled(stage: Stage) -> str:
    """A caller under torch.compile, which traces or leaves out what it calls, backward included."""
    inputs, attend = stage.inputs(), stage.instance.attend
    torch.compiler.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * attend(q + q, k / 1, v * 1) / 2

    compiled_block = torch.compile(block, backend="aot_eager")
    halved = stage.local(inputs._replace(q=inputs.q / 2))
    out, leaves = stage.forward(halved, compiled_block)  # pyright: ignore[reportArgumentType]
    results = stage.backward(out, leaves, halved.dout)
    halved_dq = results.dq / 2 if results.dq is not None else None
    return stage.wrong(results._replace(dq=halved_dq), inputs)


def checkpointed(stage: Stage) -> str:
    """Activation checkpointing, reentrant and not: the forward runs again inside the backward."""
    inputs, attend = stage.inputs(), stage.instance.attend
    for reentrant in (False, True):

        def again(q: Tensor, k: Tensor, v: Tensor, reentrant: bool = reentrant) -> Any:
            return checkpoint(attend, q, k, v, use_reentrant=reentrant)

        local = stage.local(inputs)
        out, leaves = stage.forward(local, again)
        out.backward(local.dout)  # the reentrant kind refuses autograd.grad
        results = Results(out.detach(), *(x.grad for x in leaves))
        if wrong := stage.wrong(results, inputs, f"use_reentrant={reentrant}"):
            return wrong
    return ""


def deterministic(stage: Stage) -> str:
    """Ten runs on the same inputs give the same bits."""
    first = stage.run(stage.inputs())
    differing: set[str] = set()
    for _ in range(RUNS - 1):
        again = stage.run(stage.inputs())
        for name, x, y in zip(Results._fields, first, again, strict=True):
            if x is not None and y is not None and not torch.equal(x, y):
                differing.add(name)
    return f"{', '.join(sorted(differing))} differ from run to run" if differing else ""


def volume(stage: Stage) -> str:
    """Bytes that all ranks send, counted below torch.distributed or by the transport, against the claimed formula."""
    local = stage.local(stage.inputs())
    stage.backward(*stage.forward(local), local.dout)  # what is sent once, to agree on shapes, doesn't count
    sent = stage.instance.sent_bytes
    before, by_phase = sent() if sent else 0, {}
    with Traffic() as traffic:
        out, leaves = stage.forward(local)
        by_phase["forward"] = (sent() - before) if sent else traffic.sent_bytes.total()
        stage.backward(out, leaves, local.dout)
        by_phase["backward"] = (sent() - before if sent else traffic.sent_bytes.total()) - by_phase["forward"]
    if traffic.unknown and not sent:
        return f"{', '.join(sorted(traffic.unknown))} can't be counted"
    counts = torch.tensor([by_phase[phase] for phase in PHASES], dtype=torch.float64)
    dist.all_reduce(counts, group=stage.group)
    for phase, count in zip(PHASES, counts.tolist(), strict=True):
        claimed = stage.subject.sent_bytes(stage.case, phase)
        assert claimed is not None, "the catalogue asks for claimed volumes only"
        if round(count) != round(claimed):
            return f"{phase}: {count:,.0f} bytes sent, {claimed:,.0f} claimed"
    return ""


CHECKS = {
    check.__name__: check
    for check in (
        autocast, checkpointed, compiled, deterministic, dropped, exact, frozen, in_flight, inputs_kept, large_scores,
        memory, memory_of_shapes, messages, no_grad, other_length, repeated, strides, sub_groups, tensor,
        two_instances, volume,
    )
}  # fmt: skip
"""Every check by the name of its function, as catalogue.py names it."""
