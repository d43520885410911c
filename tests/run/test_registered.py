"""Buffers registered with NCCL, and its policies for SMs, against fakes with the interfaces of torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sp_bench.errors import RequestError
from sp_bench.lower import DEFAULT_TRANSPORT, TransportOptions, lower
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.run import communicators, nccl
from sp_bench.run.buffers import Buffers
from sp_bench.run.communicators import Part, cta_policy_value
from sp_bench.run.nccl import NcclTransport
from sp_bench.run.registered import Registered
from tests.support.problems import splittable_problem

CPU = torch.device("cpu")


class Nccl:
    """Pools of a group's backend (ProcessGroupNCCL), and the rules of NCCL's windows."""

    def __init__(self, name: str, log: list[tuple]) -> None:
        self.name, self.log, self.mem_allocator = name, log, f"allocator of {name}"
        self.registered = False

    def _get_backend(self, device: torch.device) -> Nccl:
        return self

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        assert symm
        assert not self.registered, "what is registered can't be registered again"
        self.registered = True
        self.log.append(("register", self.name, pool.made))

    def deregister_mem_pool(self, pool: Any) -> None:
        assert self.registered
        assert self.log[-1] == ("synchronize",) or self.log[-1][0] == "deregister", "it may be in use"
        self.registered = False
        self.log.append(("deregister", self.name))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls of torch.cuda and of backends; `made` of a pool counts what was allocated in it."""
    entries: list[tuple] = []
    pools: list[Any] = []

    @contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        pools.append(pool)
        yield
        pools.pop()

    def empty(*shape: Any, **how: Any) -> torch.Tensor:
        for pool in pools:
            pool.made += 1
        return torch.zeros(*shape, **how)

    def mem_pool(allocator: str) -> SimpleNamespace:
        entries.append(("pool", allocator))
        return SimpleNamespace(made=0)

    monkeypatch.setattr(torch.cuda, "MemPool", mem_pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: entries.append(("synchronize",)))
    monkeypatch.setattr("sp_bench.run.registered.torch.empty", empty)
    return entries


def test_buffers_are_registered_with_every_communicator(monkeypatch: pytest.MonkeyPatch, log: list[tuple]) -> None:
    """After they have all been made, in NCCL's memory; again, idle, once another plan needs more of them."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    problem, method = splittable_problem(4), build("mesh", {"tile": (2, 2)})
    plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in ("forward", "backward")}
    groups: dict[tuple, Nccl] = {}

    def communicator(lane: int, members: tuple[int, ...], part: object) -> Nccl:
        return groups.setdefault((lane, members), Nccl(f"lane {lane} of {members}", log))

    transport = NcclTransport(None, communicator=communicator, registered=Registered(CPU, (2, 28, 9)))
    transport.prepare(plans.values())
    names = [group.name for group in groups.values()]
    buffers = Buffers(CPU, transport)
    buffers.of(lower(plans["forward"], problem))
    first = len(buffers.tensors())
    assert log == [("pool", f"allocator of {names[0]}"), *(("register", name, first) for name in names)]
    log.clear()
    buffers.of(lower(plans["forward"], problem))
    assert log == [], "nothing new"
    buffers.of(lower(plans["backward"], problem))
    more = len(buffers.tensors())
    assert more > first
    again = [("synchronize",), *(("deregister", name) for name in names)]
    assert log == [*again, *(("register", name, more) for name in names)]


def test_what_has_no_windows_is_refused(log: list[tuple]) -> None:
    with pytest.raises(RequestError, match=r"take NCCL 2.27, and this is 2.26.2; registered_buffers=false would work"):
        Registered(CPU, (2, 26, 2))

    class Old(Nccl):
        def register_mem_pool(self, pool: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            """As before torch 2.9."""

    registered, group = Registered(CPU, (2, 27, 3)), Old("lane 0", log)
    registered.empty((2,), torch.float32, [group])
    with pytest.raises(RequestError, match="has no symmetric registration .*; torch 2.9 or later would work"):
        registered.register([group])


POLICIES = {"NCCL_CTA_POLICY_DEFAULT": 0, "NCCL_CTA_POLICY_EFFICIENCY": 1, "NCCL_CTA_POLICY_ZERO": 2}


def test_a_policy_is_set_where_nccl_and_torch_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), POLICIES), raising=False)
    assert [cta_policy_value(name, (2, 28, 9)) for name in ("default", "efficiency", "zero")] == [0, 1, 2]
    assert cta_policy_value("efficiency", (2, 27, 3)) == 1
    with pytest.raises(RequestError, match=r"cta_policy=zero: takes NCCL 2.28 .*; here are NCCL 2.27.3, torch 2"):
        cta_policy_value("zero", (2, 27, 3))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {}))
    with pytest.raises(RequestError, match="a torch with ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO"):
        cta_policy_value("zero", (2, 30, 0))


@pytest.mark.parametrize(("policy", "expected", "purpose"), [(None, -1, "CTAs"), ("zero", 2, "cta_policy=zero")])
def test_lanes_have_the_policy(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, expected: int, purpose: str
) -> None:
    """A communicator of another policy is another one."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.config = SimpleNamespace(max_ctas=-1, cta_policy=-1)

    asked: list[tuple] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options, **POLICIES}), raising=False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(communicators, "own_group", lambda *ranks, **how: asked.append((ranks, how)))
    options = TransportOptions(name="nccl", cta_policy=policy) if policy else DEFAULT_TRANSPORT
    monkeypatch.setattr(nccl, "gathered", lambda mine, group: [mine])
    transport = nccl.nccl_transport(None, torch.device("cuda", 0), {}, None, None, options)  # pyright: ignore
    transport.communicator(0, (0, 1), Part.WHOLE)
    ((_, _, name), how) = asked[0]
    assert name.endswith(purpose)
    assert how["options"].config.cta_policy == expected
