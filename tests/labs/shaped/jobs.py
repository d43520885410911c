"""Jobs of ranks in the tests of hosts. Imported inside the ranks, so it stays light."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time

import torch
import torch.distributed as dist

from sp_bench.labs.shaped.home import SCHED_SETATTR
from sp_bench.run.groups import own_group, world
from sp_bench.run.home import home
from tests.support.typed import there


def exchange(payload_bytes: int) -> tuple[float, int, int]:
    """Rank r sends to rank r ^ 1 and receives from it: seconds, and the bytes that its link has sent and received."""
    peer = dist.get_rank() ^ 1
    out, into = torch.full((payload_bytes,), 1 + dist.get_rank(), dtype=torch.uint8), torch.zeros(payload_bytes).byte()
    dist.barrier()
    before, started = counted(), time.perf_counter()
    works = [dist.irecv(into, peer), dist.isend(out, peer)]
    for work in works:
        there(work).wait()
    seconds = time.perf_counter() - started
    assert bool((into == 1 + peer).all())
    dist.barrier()
    sent, received = (after - then for after, then in zip(counted(), before, strict=True))
    return seconds, sent, received


def send_across(payload_bytes: int, distance: int) -> float:
    """The first ranks send to those `distance` further, at once; seconds until the slowest has."""
    rank, tensor = dist.get_rank(), torch.zeros(payload_bytes, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    if rank < distance:
        dist.send(tensor, rank + distance)
    else:
        dist.recv(tensor, rank - distance)
    dist.barrier()
    return time.perf_counter() - started


def counted() -> tuple[int, int]:
    """(sent, received) of the host that this rank is on."""
    found = home().link_bytes()
    assert found is not None, "this rank is on no shaped host"
    return found


def is_on_a_host() -> bool:
    """Whether this rank is on a shaped host."""
    return home().link_bytes() is not None


def policies() -> tuple[int, set[int]]:
    """The scheduler's policies for this rank's main thread, and for its others."""
    others = {int(thread) for thread in os.listdir("/proc/self/task")} - {os.getpid()}
    return os.sched_getscheduler(os.getpid()), {os.sched_getscheduler(thread) for thread in others}


def policies_with_a_group() -> tuple[int, set[int]]:
    """The same once the suite has made a group of its own, which has threads too."""
    own_group(world(), range(dist.get_world_size()), "policies", backend="gloo")
    return policies()


def slice_ns() -> int:
    """The main thread's slices of time as the kernel has them; 0 where it has none of a thread's own."""
    held = ctypes.create_string_buffer(48)
    getattr_number = SCHED_SETATTR[platform.machine()] + 1
    assert not ctypes.CDLL(None, use_errno=True).syscall(getattr_number, os.getpid(), held, len(held), 0)
    return struct.unpack("IIQiIQQQ", held.raw)[5]
