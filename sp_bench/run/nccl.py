"""Transfers between GPUs by NCCL, with one communicator per lane so that lanes don't wait for each other.

NCCL requires all ranks to launch the operations of several communicators in one order. One thread queues them in plan
order (DeviceStreams), which is the same on all ranks. A rank that takes no part in an operation, such as an exchange
with itself, skips it; the order of the others stays. Two communicators may execute in different orders on two ranks.
That can't deadlock as long as the kernels of all communicators fit on the GPU together: plans have at most 4 lanes,
and a communicator takes a few channels of one SM each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sp_bench.lower import NCCL
from sp_bench.plan.ops import Plan
from sp_bench.run.transport import GlooTransport, HostTransport, Key, Message, Transport, Turn

_groups: dict[int, tuple[Any, list[Any]]] = {}
"""Device index -> (default group, its lane communicators made so far, in lane order)."""


@dataclass
class NcclTransport(Transport):
    """NCCL transport: each transfer is one batch_isend_irecv on its lane's communicator.

    torch runs the batch on the communicator's own stream, after the current stream. work.wait() makes the current
    stream wait for it, without blocking the caller.
    """

    kind = NCCL
    lanes: Sequence[Any] = ()
    """One NCCL process group per lane, with the ranks of `group` in their order."""

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        group, batch = self.lanes[turn.lane], []
        for source, tensors in receives:
            batch += [dist.P2POp(dist.irecv, _flat(x), group=group, group_peer=source) for x in tensors]
        for target, tensors in sends:
            self.count(tensors, counted_as)
            batch += [dist.P2POp(dist.isend, _flat(x), group=group, group_peer=target) for x in tensors]
        # torch rejects an empty batch, which is what a group of one has.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Refuse a non-contiguous tensor: NCCL would send its raw memory, and torch doesn't check."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} would be sent in the order of its strides {x.stride()}")
    return x


def lane_groups(group: dist.ProcessGroup, device: torch.device, count: int, timeout: timedelta | None) -> list[Any]:
    """Return one connected, high-priority NCCL communicator per lane. Communicators are reused across calls.

    All ranks of `group` must call this, in the same order of calls. The connection to a peer opens at the first
    message to it. If `group` is not the whole default group in rank order, all lanes share its own communicator:
    correct, but with less overlap. torch can't make the lane groups there: it names groups of equal ranks alike, and
    sorts ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != list(range(dist.get_world_size())):
        # The barrier connects the communicator; otherwise all ranks would have to join the first batch.
        dist.barrier(group, device_ids=[device.index])
        return [group] * count
    default, made = _groups.get(device.index, (None, []))
    if default is not _default_group():  # first call, or a new default group
        made = []
        _groups[device.index] = _default_group(), made
    while len(made) < count:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch uses the argument below, and warns if this one differs
        made.append(
            dist.new_group(
                ranks,
                timeout=timeout,
                backend="nccl",
                pg_options=options,
                group_desc=f"sp_bench lane {len(made)}",
                device_id=device,  # makes torch connect eagerly
            )
        )
    return made[:count]


def _default_group() -> Any:
    return dist.group.WORLD


def nccl_transport(
    group: dist.ProcessGroup, device: torch.device, plans: Mapping[str, Plan], timeout: timedelta | None = None
) -> NcclTransport:
    """Return an NcclTransport with enough communicators for the plan with most lanes. All ranks must call this."""
    count = max(len(plan.lanes) for plan in plans.values())
    return NcclTransport(group, lanes=lane_groups(group, device, count, timeout))


def transport_for(group: dist.ProcessGroup | None, device: torch.device, plans: Mapping[str, Plan]) -> Transport:
    """Return the transport for `group` on `device`: NCCL if the group has that backend, else gloo."""
    if group is None or device.type == "cpu":
        return GlooTransport(group)
    if "nccl" in dist.get_backend_config(group):
        return nccl_transport(group, device, plans)
    return HostTransport(group)
