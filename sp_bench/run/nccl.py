"""Transfers between GPUs by NCCL: a communicator for each lane, so that a lane doesn't wait for another.

NCCL wants the operations of several communicators in one order on all ranks. Here all are queued by one thread in plan
order (DeviceStreams), and plans are the same for all ranks: an operation that some rank takes no part in, such as an
exchange with itself, is left out of the order and changes nothing for the rest. That two communicators are under way
at once, in one order on a rank and in the other on its peer, is sound as long as the kernels of all of them fit on the
GPU together: plans have at most 4 lanes, and NCCL takes some channels, of an SM each, for one communicator.
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
"""By the device's index, the default group and all its ranks' communicators so far, in the order of lanes."""


@dataclass
class NcclTransport(Transport):
    """Between GPUs, each transfer one batch of sends and receives on its lane's communicator and the current stream.

    torch queues the batch on a stream of the communicator's own, which waits for the current stream first, and
    work.wait() has the current stream wait for it: the caller goes on at once.
    """

    kind = NCCL
    lanes: Sequence[Any] = ()
    """A process group of NCCL for each lane, of the ranks of `group` in their order."""

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        group, batch = self.lanes[turn.lane], []
        for source, tensors in receives:
            batch += [dist.P2POp(dist.irecv, _flat(x), group=group, group_peer=source) for x in tensors]
        for target, tensors in sends:
            self.count(tensors, counted_as)
            batch += [dist.P2POp(dist.isend, _flat(x), group=group, group_peer=target) for x in tensors]
        # torch takes no empty batch; a group of one has no messages.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """NCCL sends memory as it lies, and torch lets any order of dimensions through."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} would be sent in the order of its strides {x.stride()}")
    return x


def lane_groups(group: dist.ProcessGroup, device: torch.device, count: int, timeout: timedelta | None) -> list[Any]:
    """A communicator for each of `count` lanes, connected, its kernels on a stream of high priority.

    All ranks of `group` must call this, in the same order for all that they call it for. What was made before is taken
    again. The connection to each peer is opened by the first message to it. A part of the default group's ranks can't
    make groups among themselves (torch gives those of equal ranks one name), nor can ranks in another order (torch
    sorts them): its lanes share its own communicator, one after the other in plan order, which is as right and
    overlaps less.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != list(range(dist.get_world_size())):
        # Connects it: the first batch would have to be one of all ranks.
        dist.barrier(group, device_ids=[device.index])
        return [group] * count
    default, made = _groups.get(device.index, (None, []))
    if default is not _default_group():  # another than before, or the first
        made = []
        _groups[device.index] = _default_group(), made
    while len(made) < count:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # the argument counts, and torch warns where this is another
        made.append(
            dist.new_group(
                ranks,
                timeout=timeout,
                backend="nccl",
                pg_options=options,
                group_desc=f"sp_bench lane {len(made)}",
                device_id=device,  # with it torch connects at once
            )
        )
    return made[:count]


def _default_group() -> Any:
    return dist.group.WORLD


def nccl_transport(
    group: dist.ProcessGroup, device: torch.device, plans: Mapping[str, Plan], timeout: timedelta | None = None
) -> NcclTransport:
    """A transport for plans, with as many communicators as the one that has most lanes. All ranks must call this."""
    count = max(len(plan.lanes) for plan in plans.values())
    return NcclTransport(group, lanes=lane_groups(group, device, count, timeout))


def transport_for(group: dist.ProcessGroup | None, device: torch.device, plans: Mapping[str, Plan]) -> Transport:
    """How ranks of `group` exchange tensors on `device`: by NCCL where the group does, else by gloo."""
    if group is None or device.type == "cpu":
        return GlooTransport(group)
    if "nccl" in dist.get_backend_config(group):
        return nccl_transport(group, device, plans)
    return HostTransport(group)
