"""Inside a rank: run a case of a subject, and compare the results with fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.conform.case import PAD_TOKENS, Case
from sp_bench.conform.subjects import REFUSALS, Instance, Subject
from sp_bench.kernels.reference import exact
from sp_bench.run.groups import world
from sp_bench.workload.exactness import NAMES, relative_error, squared_norms
from sp_bench.workload.gate import GateErrors

if TYPE_CHECKING:
    from sp_bench.conform.subjects import Attend


class Inputs(NamedTuple):
    """Tensors of the whole sequence, in the case's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Results(NamedTuple):
    """This rank's out and gradients; those of inputs that need none are None."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class BackwardError(RuntimeError):
    """A backward that raised what would be a refusal, had not its forward accepted the case."""


class Stage:
    """A subject and a case on this rank, with an instance of its own."""

    def __init__(self, subject: Subject, case: Case, group: dist.ProcessGroup | None = None) -> None:
        """`group` is the default group if None. All its ranks make the same stages in the same order."""
        self.subject, self.case, self.group = subject, case, group or world()
        self.rank = self.group.rank()

    @cached_property
    def instance(self) -> Instance:
        """The instance, made at first use."""
        return self.another()

    def another(self, case: Case | None = None) -> Instance:
        """Another instance, of this case or of another one."""
        return self.subject.instance(case or self.case, self.group)

    def inputs(self, seed: int = 0, scale: float = 1.0) -> Inputs:
        """Unit normal tensors, equal on all ranks; the scores of q and k are multiplied by `scale`."""
        return drawn(self.case, seed, scale)

    def local(self, inputs: Inputs) -> Inputs:
        """This rank's shards."""
        return Inputs(*(self.instance.shard(x) for x in inputs))

    def run(self, inputs: Inputs, attend: Attend | None = None) -> Results:
        """Forward and backward of the whole inputs."""
        local = self.local(inputs)
        out, leaves = self.forward(local, attend)
        return self.backward(out, leaves, local.dout)

    def forward(
        self, local: Inputs, attend: Attend | None = None, needed: Sequence[bool] = (True, True, True)
    ) -> tuple[Tensor, list[Tensor]]:
        """(out, the leaves that it came from). Raises TypeError for what is no attention's output."""
        leaves = [x.detach().requires_grad_(need) for x, need in zip(local[:3], needed, strict=True)]
        out = (attend or self.instance.attend)(*leaves)
        if not isinstance(out, Tensor) or out.shape != local.q.shape:
            returned = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"returned {returned}, where out is {tuple(local.q.shape)}")
        return out, leaves

    def backward(self, out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> Results:
        """The gradients of the leaves. Raises BackwardError where the subject refuses only now."""
        needed = [x for x in leaves if x.requires_grad]
        if not out.requires_grad:
            raise TypeError("returned an output that autograd can't differentiate")
        try:
            gradients = iter(torch.autograd.grad(out, needed, dout.to(out.dtype)))
        except REFUSALS as error:
            raise BackwardError(f"in its backward, {type(error).__name__}: {error}") from error
        return Results(out.detach(), *(next(gradients) if x.requires_grad else None for x in leaves))

    def errors(self, results: Results, inputs: Inputs, dtype: str = "") -> dict[str, str]:
        """By tensor, what is wrong with it, the same on all ranks. All must call it; the group's first one compares.

        `dtype` is that whose tolerance holds, by default the case's.
        """
        complaints = {}
        for name, x, like in zip(NAMES, results, (inputs.q, *inputs[:3]), strict=True):
            if x is not None and not dtype and x.dtype != like.dtype:
                complaints[name] = f"{name} is in {x.dtype}, not {like.dtype}"
        whole = {name: self.instance.unshard(x) for name, x in zip(NAMES, results, strict=True) if x is not None}
        told = [compared(whole, inputs, self.case, dtype or self.case.dtype) | complaints if self.rank == 0 else {}]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        return told[0]

    def wrong(self, results: Results, inputs: Inputs, what: str = "", dtype: str = "") -> str:
        """All errors as one text, empty if there are none. `what` says of which results."""
        errors = "; ".join(self.errors(results, inputs, dtype).values())
        return f"{what}: {errors}" if what and errors else errors


@lru_cache(maxsize=16)
def drawn(case: Case, seed: int, scale: float) -> Inputs:
    """The inputs of a case. The output's gradient is 0 in padding, which nobody reads."""
    source = torch.Generator().manual_seed(1000 * case.seqlen + seed)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, dout = (torch.randn(case.batch, case.seqlen, h, case.head_dim, generator=source) for h in heads)
    if case.padded:
        dout[:, -PAD_TOKENS:] = 0
    dtype: Any = getattr(torch, case.dtype)
    return Inputs(*(x.to(dtype) for x in (q * scale, k, v, dout)))


def reference(case: Case, inputs: Inputs) -> Mapping[str, Tensor]:
    """(out, dq, dk, dv) of the whole sequence in fp64, by name. Another scale is one of q, in fp64."""
    factor = case.scale * math.sqrt(case.head_dim) if case.scale else 1.0
    q, *others = (x.double() for x in inputs)
    exact_of = dict(zip(NAMES, exact(q * factor, *others, mask=case.whole_mask()), strict=True))
    return exact_of | {"dq": exact_of["dq"] * factor}


def compared(whole: Mapping[str, Tensor], inputs: Inputs, case: Case, dtype: str) -> dict[str, str]:
    """By tensor of the whole sequence, how it differs from the case's exact one by more than the dtype's tolerance."""
    wanted = reference(case, inputs)
    complaints = {}
    for name, x in whole.items():
        if x.shape != wanted[name].shape:
            complaints[name] = f"{name} is {tuple(x.shape)} in all, where {tuple(wanted[name].shape)} is right"
            continue
        rows = slice(0, case.seqlen - PAD_TOKENS if case.padded else None)
        values, right = x[:, rows], wanted[name][:, rows]
        heads = torch.stack([squared_norms(values[:, :, h], right[:, :, h]) for h in range(x.shape[2])], dim=1)
        overall = float(relative_error(heads.sum(1), values.numel()))
        worst = float(relative_error(heads, values.numel() // x.shape[2]).max())
        if text := GateErrors(overall={name: overall}, worst_head={name: worst}).wrong(dtype):
            complaints[name] = text.partition(", ")[0]
    return complaints
