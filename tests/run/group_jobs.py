"""Jobs of ranks in the tests of groups: as ranks with a GPU each, between which gloo carries. No pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.cuda import nccl as library
from torch.distributed import distributed_c10d as c10d

from sp_bench.lower import TransportOptions
from sp_bench.measure.start import start_group
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.run import groups, nccl, patience
from sp_bench.run.groups import own_group
from sp_bench.run.nccl import NcclTransport
from sp_bench.run.symmetric_memory import symmetric_transport
from tests.support.problems import splittable_problem
from tests.support.ranks import group_of

TIMEOUT = timedelta(seconds=10)
METHODS = ("ring", "all_gather", "ulysses", "startrail", "mesh")


@contextmanager
def as_gpus(rank: int) -> Iterator[None]:
    """NCCL's part of torch as a fake, whose groups are gloo's. The GPUs differ in their SMs."""
    make: Any = c10d._new_process_group_helper

    def by_gloo(*args: Any, **how: Any) -> Any:
        *most, backend, store = args
        assert backend == "gloo" or how["device_id"] == torch.device("cuda", rank), "NCCL connects the rank's GPU"
        return make(*most, dist.Backend("gloo"), store, **how | {"backend_options": None, "device_id": None})

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self._timeout, self.config = None, SimpleNamespace(max_ctas=-1)

    fake = type("NCCL", (), {"Options": Options})
    properties = SimpleNamespace(multi_processor_count=132 - 6 * rank)
    with ExitStack() as all_of:
        all_of.enter_context(patch.object(dist, "ProcessGroupNCCL", fake, create=True))
        all_of.enter_context(patch.object(c10d, "_new_process_group_helper", by_gloo))
        all_of.enter_context(patch.object(library, "version", lambda: (2, 28, 9)))
        all_of.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        all_of.enter_context(patch.object(patience, "FIRST_USE", timedelta(0)))
        all_of.enter_context(patch.object(nccl, "boot_id", lambda: f"node {rank // 2}"))
        yield


def sums(made: list[Any], rank: int) -> list[tuple[tuple[int, ...], float]]:
    """The members of each group, and the sum of their ranks over it."""
    found = []
    for group in made:
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=group)
        found.append((tuple(dist.get_process_group_ranks(group)), float(x)))
    return found


def groups_of(kind: str, n: int) -> list[tuple[tuple[int, ...], float]]:
    """Every group that a transport makes for all methods' plans on ranks of other GPUs; empty on ranks beyond n."""
    rank, group = dist.get_rank(), group_of(n, kind)
    device, made = torch.device("cuda", rank), []
    with as_gpus(rank):
        if kind == "starts of phases":
            return sums([start_group(device, TIMEOUT)], rank)
        if group is None:
            return []
        for name in METHODS:
            problem = splittable_problem(n)
            method = build(name, {"tile": (2, 2)} if name == "mesh" else {})
            method = next(iter(method.candidates(problem)), method)
            plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
            made += _prepared(kind, group, device, plans)
        return sums(list(dict.fromkeys(made)), rank)


def _prepared(kind: str, group: Any, device: torch.device, plans: dict) -> list[Any]:
    if kind == "symmetric memory":
        exchanged: list[Any] = []
        torchs = SimpleNamespace(
            get_backend=lambda device: "CUDA",
            empty=lambda size, *, dtype, device: torch.empty(size, dtype=dtype),
            rendezvous=lambda x, among: exchanged.append(among) or SimpleNamespace(signal_pad_size=2048),
        )
        node = f"node {dist.get_rank() // 2}"
        transport = symmetric_transport(group, device, plans, TIMEOUT, torchs=torchs, node=node)
        transport.prepare(plans.values())
        assert isinstance(transport.remote, NcclTransport)
        return [*exchanged, *transport.remote._made.values()]
    options = TransportOptions(name="nccl", registered_buffers=kind == "registered buffers")
    transport = nccl.nccl_transport(group, device, plans, TIMEOUT, None, options)
    assert (transport.registered is not None) == options.registered_buffers
    transport.prepare(plans.values())
    return list(transport._made.values())


def another_purpose_on_one_rank(n: int) -> str:
    """The error of ranks of which the last one asks for another group; how the next one then does."""
    group, rank = group_of(n, "another purpose"), dist.get_rank()
    if group is None:
        return ""
    purpose = f"test on GPU {rank // (n - 1)}"
    try:
        own_group(group, range(n), purpose, backend="gloo", timeout=TIMEOUT)
    except RuntimeError as error:
        ((_, total),) = sums([own_group(group, range(n), "the next test", backend="gloo", timeout=TIMEOUT)], rank)
        return f"{error}; then {total:.0f}"
    return "made"


def nobody_else_comes(n: int) -> str:
    """The error of rank 0, which alone asks for a group."""
    group = group_of(n, "alone")
    if dist.get_rank():
        return ""
    try:
        own_group(group, range(n), "that no other makes", backend="gloo", timeout=timedelta(seconds=0.2))
    except RuntimeError as error:
        return str(error)
    finally:
        groups._calls[",".join(map(str, range(n)))] -= 1  # the others haven't made it
    return "made"


def for_two_devices(n: int) -> tuple[int, bool]:
    """How many groups a purpose has on two devices that ranks use in turn, and whether they are made once."""
    group = group_of(n, "two devices")
    if group is None:
        return 2, True
    devices = [torch.device("cuda", (dist.get_rank() + i) % n) for i in (0, 1)]

    def made() -> list[Any]:
        return [own_group(group, range(n), "devices", backend="gloo", timeout=TIMEOUT, device=x) for x in devices]

    first = made()
    return len(set(first)), made() == first and len(sums(first, dist.get_rank())) == 2
