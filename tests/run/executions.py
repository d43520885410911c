"""Executions of methods on devices that work behind the caller (tests.run.queued), and what must come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sp_bench.kernels import KERNELS
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.kernels.contract import Kind
from sp_bench.methods import build
from sp_bench.plan import CostProfile, Method, Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.regions import RegionKind
from sp_bench.run.engine import Engine
from sp_bench.run.sharding import positions, shard
from sp_bench.run.transport import Transport
from sp_bench.workload.exactness import NAMES
from tests.run.queued import Hazard, Machine, Rank, Stuck, Wires
from tests.run.symmetric import SymmetricMemories
from tests.support.bounds import too_far
from tests.support.problems import mask_of

Carried = Callable[[Rank], AbstractContextManager[Transport]]
"""The transport of a rank, within which it is to be used."""

CPU = torch.device("cpu")


class LikeAGpus(AtenCpu):
    """Its lse is contiguous: else a lane would make it so, and for that wait for all blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Kind) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, mask)
        return out, lse.contiguous()


@dataclass(frozen=True)
class Execution:
    """A forward and a backward of some ranks, and the order in which their devices do the work."""

    method: Method
    problem: Problem
    costs: CostProfile = COMPUTE_BOUND
    order: int = 0
    node: int = 0
    """Ranks of a node with symmetric memory; 0: without."""

    @property
    def plans(self) -> dict[str, Plan]:
        return {phase: self.method.plan(self.problem, phase, self.costs) for phase in PHASES}

    def carried(self, plans: dict[str, Plan]) -> tuple[Machine, Carried]:
        """The machine, and what carries its transfers."""
        machine = Machine(self.problem.n, self.order)
        memory = SymmetricMemories(machine, self.node) if self.node else None

        @contextmanager
        def transport(device: Rank) -> Iterator[Transport]:
            yield memory.transport(device, plans.values()) if memory else Wires(device)

        return machine, transport

    def run(self, plans: dict[str, Plan] | None = None) -> list[Tensor]:
        """Out and gradients of the whole sequence. Nothing is done on the devices before everything is queued."""
        problem, plans = self.method.assigned(self.problem), plans or self.plans
        (machine, carried), results = self.carried(plans), []
        for rank, device in enumerate(machine.ranks):
            q, k, v, dout = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
            with device, carried(device) as transport:
                engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=transport, queues=device)
                engine.kernel = LikeAGpus()
                out, saved = engine.forward(q, k, v)
                del q, k, v
                results.append((device, (out, *engine.backward(dout, saved))))
                del saved, dout
        machine.run()
        return [self._whole([device.get(found[i]) for device, found in results]) for i in range(len(NAMES))]

    def _whole(self, parts: list[Tensor]) -> Tensor:
        n, layout = len(parts), self.method.assigned(self.problem).layout
        order = torch.cat([positions(layout, rank, n, self.problem.seqlen) for rank in range(n)])
        return torch.cat(parts, dim=1)[:, order.argsort()]

    def wrong(self, plans: dict[str, Plan] | None = None) -> str:
        """The errors of the execution; empty if there are none."""
        try:
            found = self.run(plans)
        except (Hazard, Stuck) as error:
            return f"{type(error).__name__}: {error}"
        errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact(self.problem), strict=True)]
        wrong = too_far(self.problem, inputs(self.problem), dict(zip(NAMES, errors, strict=True)))
        return ", ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items())


def inputs(problem: Problem) -> list[Tensor]:
    """q, k, v and dout of the whole sequence."""
    generator = torch.Generator().manual_seed(1)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.batch, problem.seqlen, h, problem.head_dim) for h in heads]
    return [torch.randn(s, generator=generator).to(getattr(torch, problem.dtype)) for s in shapes]


def exact(problem: Problem) -> list[Tensor]:
    q, k, v, dout = (x.double() for x in inputs(problem))
    if isinstance(problem.mask, Packed):
        return _exact_pack(problem.mask, q, k, v, dout)
    kernel, mask = KERNELS["reference"](), RegionKind(problem.mask.name)
    out, lse = kernel.forward(q, k, v, mask)
    return [out, *kernel.backward(dout, q, k, v, out, lse, mask)]


def _exact_pack(mask: Packed, *tensors: Tensor) -> list[Tensor]:
    """With a matrix of what each query sees."""
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first, stop = (torch.from_numpy(ends)[:, None] for ends in mask.sees(mask.query_positions))
    key = torch.arange(k.shape[2])
    out = scaled_dot_product_attention(*leaves, attn_mask=(first <= key) & (key < stop), enable_gqa=True)
    return [x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


def small(n: int, *, causal: bool, layout: str = "striped", dtype: str = "float64", wire: str = "") -> Problem:
    return Problem(
        n=n, seqlen=2 * n, heads=2 * n, kv_heads=n, head_dim=4, mask=mask_of(causal), dtype=dtype, wire_dtype=wire,
        layout=LAYOUTS[layout],
    )  # fmt: skip


def fitting(method: Method, problem: Problem) -> Execution:
    """On the problem's layout, or else on the method's first."""
    layout = problem.layout.name if problem.layout.name in method.layouts else method.layouts[0]
    return Execution(replace(method, layout=layout), replace(problem, layout=LAYOUTS[layout]))


def four(method: str, options: dict[str, object], *, wire: str = "bfloat16", layout: str = "zigzag") -> Execution:
    return fitting(build(method, options), small(4, causal=True, layout=layout, dtype="float32", wire=wire))
