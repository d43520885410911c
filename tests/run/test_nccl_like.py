"""Every method's plans over a transport that behaves as NCCL does, in random orders of all that it allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_bench.methods import build
from sp_bench.plan import Plan
from sp_bench.plan.layout import LAYOUTS
from sp_bench.run import nccl
from sp_bench.run.communicators import Part
from sp_bench.run.nccl import NcclTransport
from sp_bench.run.sms import most_ctas
from sp_bench.run.transport import Turn
from tests.run.executions import Carried, Execution, fitting, four, small
from tests.run.queued import Rank, Stuck
from tests.support import nccl_like
from tests.support.marks import exhaustive
from tests.support.nccl_like import GpuMachine, Nccl, Refused
from tests.support.problems import all_methods, of_each_name

A100_SMS = 108
TURN = Turn(0, 0)


@dataclass(frozen=True)
class OnNccl(Execution):
    """An execution whose transfers NCCL carries. `node` is how many ranks have a node in common."""

    sms: int = A100_SMS
    """SMs that NCCL's kernels find free."""
    in_launch_order: bool = True
    lane_ctas: int = 0
    """0: the lane's share of an A100."""
    given: tuple[GpuMachine, Carried] | None = None
    """The transport and kernel to run on."""

    def carried(self, plans: dict[str, Plan]) -> tuple[GpuMachine, Carried]:
        if self.given:
            return self.given
        machine = GpuMachine(self.problem.n, self.order, sms=self.sms, in_launch_order=self.in_launch_order)
        library, lanes = Nccl(machine, self.node), max(len(plan.lanes) for plan in plans.values())

        @contextmanager
        def transport(device: Rank) -> Iterator[NcclTransport]:
            with library.on(device):
                made = library.transport(device, self.lane_ctas or most_ctas(A100_SMS, lanes))
                made.prepare(plans.values())
                yield made

        machine.before.append(library.refuse_different_groups)
        return machine, transport


def on_nccl(execution: Execution, **how: Any) -> OnNccl:
    return OnNccl(**{**vars(execution), **how})


def nodes_of(n: int) -> list[int]:
    """How many ranks have a node in common: all, or 2 of them where that leaves several nodes."""
    return [0, 2] if n > 2 and n % 2 == 0 else [0]


@pytest.mark.parametrize(("n", "every"), [(2, False), exhaustive(6, False), *(exhaustive(n, True) for n in (2, 3, 4))])
def test_every_method_is_exact(n: int, every: bool) -> None:
    """In every variant, or in one; in one node and beyond, from one to the next another order of the devices' work."""
    kinds = itertools.cycle([("float64", ""), ("bfloat16", ""), ("float32", "bfloat16"), ("bfloat16", "float32")])
    methods = all_methods(small(n, causal=True))
    for order, method in enumerate(methods if every else of_each_name(methods, turn=n)):
        layout, (dtype, wire) = sorted(LAYOUTS)[order % 3], next(kinds)
        execution = fitting(method, small(n, causal=True, layout=layout, dtype=dtype, wire=wire))
        for node in nodes_of(n):
            assert on_nccl(execution, order=order, node=node).wrong() == "", execution


SEVERAL_LANES = four("ring", {})


@pytest.mark.parametrize("node", [0, 2])
def test_lanes_take_no_more_sms_than_they_were_given(node: int) -> None:
    """However few: two communicators of a lane share its CTAs, and a lane of one CTA has one."""
    lanes = max(len(plan.lanes) for plan in SEVERAL_LANES.plans.values())
    for ctas in (1, 2, 8):
        execution = on_nccl(SEVERAL_LANES, node=node, lane_ctas=ctas, sms=lanes * ctas)
        machine, _ = found = execution.carried(execution.plans)
        assert isinstance(machine, GpuMachine)
        assert replace(execution, given=found).wrong() == ""
        assert 0 < machine.most_taken <= lanes * ctas


def test_kernels_that_don_t_fit_together_deadlock_without_launch_order() -> None:
    """The order in which ranks launch is one, so that with it SMs can be too few and nothing hangs."""
    short = on_nccl(SEVERAL_LANES, lane_ctas=8, sms=8)
    unordered = (replace(short, order=order, in_launch_order=False).wrong() for order in range(8))
    assert any("the watchdog: rank" in wrong and "was not started" in wrong for wrong in unordered)
    assert all(replace(short, order=order).wrong() == "" for order in range(5))


def test_a_kernel_waits_until_the_one_before_has_started() -> None:
    """A block that another lane waits for; without the order it needn't."""
    started: dict[bool, list[list[int]]] = {}
    for ordered in (True, False):
        for order in range(2):
            execution = on_nccl(SEVERAL_LANES, order=order, in_launch_order=ordered)
            machine, _ = found = execution.carried(execution.plans)
            assert isinstance(machine, GpuMachine) and replace(execution, given=found).wrong() == ""
            started.setdefault(ordered, []).extend(machine.started)
    assert all(numbers == sorted(numbers) for numbers in started[True])
    assert not all(numbers == sorted(numbers) for numbers in started[False])


def test_nothing_that_nccl_gets_is_the_allocator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else memory that is freed can't be used again before the GPU has got there."""
    aliases, given = list[Tensor](), list[Tensor]()
    alias, refuse = nccl.unmarked, nccl_like._refuse

    def noted(x: Tensor) -> Tensor:
        aliases.append(alias(x))
        return aliases[-1]

    def watched(x: Tensor) -> None:
        given.append(x)
        refuse(x)

    monkeypatch.setattr(nccl, "unmarked", noted)
    monkeypatch.setattr(nccl_like, "_refuse", watched)
    for name, options, wire in (
        ("tokenring", {}, "float32"),
        ("all_gather", {"stride": 2}, "bfloat16"),
        ("ulysses", {}, ""),
    ):
        problem = small(2, causal=True, dtype="bfloat16", wire=wire)
        assert on_nccl(fitting(build(name, options), problem)).wrong() == ""
    owned = {x.untyped_storage()._cdata for x in aliases}
    assert given and all(x.untyped_storage()._cdata in owned for x in given)


def test_an_alias_is_the_same_memory_of_another_owner() -> None:
    """Messages of the dtypes that are sent, and in the middle of a tensor."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float16):
        x = torch.zeros(4, 6, dtype=dtype, requires_grad=True)[1:3]
        other = nccl.unmarked(x)
        assert (other.data_ptr(), other.shape, other.dtype) == (x.data_ptr(), x.shape, dtype)
        assert other.untyped_storage()._cdata != x.untyped_storage()._cdata


# bf16 sums, which NCCL rounds at every hop


def rounded_at_every_hop(parts: Tensor) -> Tensor:
    """The sum of (ranks, ...) in bf16 as NCCL's ring makes it (reduce_kernel.h)."""
    total = parts[0].bfloat16()
    for part in parts[1:]:
        total = total + part.bfloat16()
    return total.double()


def merged_by_their_owner(parts: Tensor) -> Tensor:
    """The sum of what an all-to-all brings in bf16, in fp32 and then rounded (Collectives._merge)."""
    return parts.bfloat16().float().sum(0).bfloat16().double()


@pytest.mark.parametrize(("n", "ring"), [(8, 3.5e-3), (64, 1.1e-2), (128, 1.5e-2)])
def test_sums_of_a_ring_lose_what_their_owner_keeps(n: int, ring: float) -> None:
    """The gate lets errors of 1e-2 through: a ring would be `incorrect` from 64 GPUs on."""
    parts = torch.randn(n, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = parts.sum(0)
    errors = [float((f(parts) - whole).norm() / whole.norm()) for f in (rounded_at_every_hop, merged_by_their_owner)]
    assert errors == pytest.approx([ring, 2.2e-3], rel=0.2)


@pytest.mark.parametrize(("wire", "kernel"), [("bfloat16", "all-to-all"), ("float32", "reduce-scatter")])
def test_nccl_adds_only_what_is_sent_in_fp32(wire: str, kernel: str) -> None:
    execution = on_nccl(fitting(build("all_gather", {"stride": 2}), small(2, causal=True, dtype="bfloat16", wire=wire)))
    machine, _ = found = execution.carried(execution.plans)
    assert isinstance(machine, GpuMachine) and replace(execution, given=found).wrong() == ""
    assert {one.what.split(" ")[0] for launched in machine.launched for one in launched} == {"all-gather", kernel}


# What NCCL refuses


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda x: x.to(torch.complex64), "Unconvertible NCCL type"),
        (lambda x: x.expand(2, *x.shape).transpose(0, 1), "in the order of its strides"),
        (lambda x: x[:0], "without elements"),
        (lambda x: torch.frombuffer(bytearray(20), dtype=torch.float32, count=4, offset=1), "a buffer of"),
    ],
)
def test_tensors_that_it_can_t_send_are_refused(change: Callable[[Tensor], Tensor], rule: str) -> None:
    machine = GpuMachine(2, 0)
    library, device = Nccl(machine), machine.ranks[0]
    x = torch.zeros(4)
    with library.on(device):
        transport = library.transport(device, 8)
        with pytest.raises((Refused, ValueError, RuntimeError), match=rule):
            transport.exchange(TURN, [], [(1, [change(x)])], [("kv", "kv", "k")])


def test_ranks_have_a_gpu_each_and_name_groups_alike() -> None:
    machine = GpuMachine(2, 0)
    alike = Nccl(machine, gpu_of=lambda rank: 0)
    with alike.on(machine.ranks[0]), pytest.raises(Refused, match="Duplicate GPU detected"):
        alike.transport(machine.ranks[0], 8)._communicator(0, (0, 1), Part.WHOLE)
    library = Nccl(machine)
    for device, ctas in zip(machine.ranks, (8, 16), strict=True):
        with library.on(device):
            library.transport(device, ctas)._communicator(0, (0, 1), Part.WHOLE)
    with pytest.raises(Refused, match="ask for different groups"):
        library.refuse_different_groups()


def test_the_watchdog_names_what_hangs() -> None:
    """A message that its receiver doesn't expect."""
    machine = GpuMachine(2, 0)
    library, device = Nccl(machine), machine.ranks[0]
    with device, library.on(device):
        x = device.put(torch.ones(4))
        into = device.put(torch.ones(4))
        transport = library.transport(device, 8)
        transport.exchange(TURN, [(1, [into])], [(1, [x])], [("kv", "kv", "k")])
    with pytest.raises(Stuck, match=r"the watchdog: rank 0: messages number 0 on lane 0 of 8 CTAs of .* has not ended"):
        machine.run()
