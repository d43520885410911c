"""Memory that the CPU ranks of one machine share, with signals by pipes. Linux only.

Each rank has one anonymous file (memfd), in which its buffers lie one after the other, and a pipe for each signal that
it waits for. Peers open both by /proc/PID/fd. Nothing has a name in a file system, so nothing is left behind however
ranks end. A pipe counts signals, blocks without using a core, and orders memory: the kernel's calls are barriers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.lower import SHARED
from sp_bench.machine import boot_id
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.groups import gathered, timeout_of
from sp_bench.run.one_sided import OneSidedTransport, PeerMemory, Signal


class SharedTransport(OneSidedTransport):
    """Between CPU ranks: shared memory on one machine, gloo between machines and for collectives."""

    kind = SHARED


@dataclass(frozen=True)
class _Host:
    """The message of a rank to its peers."""

    node: str
    pid: int
    memory: int
    """File descriptors in its process."""
    pipes: dict[Signal, int]
    """By the signal that it waits for, the end to write to."""


class SharedMemory(PeerMemory):
    """The shared memory of the ranks of a gloo group that are on one node."""

    def __init__(self, group: dist.ProcessGroup, node: str = "") -> None:
        """`node` tells nodes apart; default: the machine. Raises RequestError where there is no such memory."""
        if not hasattr(os, "memfd_create"):
            raise RequestError("transport=shared_memory", "takes Linux's memfd_create", "transport=gloo would work")
        self.neighbours = frozenset()
        self._group, self._rank, self._node = group, dist.get_rank(group), node or boot_id()
        self._timeout_ms = int(1e3 * timeout_of(group).total_seconds())
        self._memory, self._size = os.memfd_create("sp_bench"), 0
        self._places: dict[int, tuple[int, int]] = {}
        """(offset, bytes) of each tensor in the file, by its address."""
        self._peers: dict[int, int] = {}
        """The file of each peer, open."""
        self._theirs: dict[tuple[int, int], Tensor] = {}
        """Memory of peers, by (peer, offset)."""
        self._in: dict[Signal, tuple[int, select.poll]] = {}
        self._out: dict[Signal, int] = {}
        self._open = [self._memory]
        weakref.finalize(self, _close, self._open)

    def connect(self, incoming: Sequence[Signal], lanes: int) -> None:
        pipes = {signal: os.pipe() for signal in incoming}
        self._open += [end for pipe in pipes.values() for end in pipe]
        written = {signal: end for signal, (_, end) in pipes.items()}
        hosts = gathered(_Host(self._node, os.getpid(), self._memory, written), self._group)
        near = [rank for rank, host in enumerate(hosts) if host.node == self._node and rank != self._rank]
        trouble = ""
        try:
            for rank in near:
                self._reach(rank, hosts[rank])
        except OSError as error:
            trouble = f"rank {self._rank} can't open the memory of a rank of its machine ({error})"
        # All have opened what they need once all have answered.
        if trouble := next(filter(None, gathered(trouble, self._group)), ""):
            raise RequestError("transport=shared_memory", trouble, "transport=gloo, or ranks of one user, would work")
        self.neighbours = frozenset(near)
        self._in = {signal: (read, _polled(read)) for signal, (read, _) in pipes.items() if signal.peer in near}
        done = {end for pipe in pipes.values() for end in pipe} - {read for read, _ in self._in.values()}
        _close(done)  # a peer that ends closes the only other end, which `wait` sees
        self._open[:] = [fd for fd in self._open if fd not in done]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = prod(shape)
        size = -(-max(count * dtype.itemsize, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._memory, self._size, size)  # else a full memory ends the process
        except OSError as error:
            raise MemoryError(f"no {size} bytes of shared memory: {error}") from error
        x = _mapped(self._memory, self._size, size)
        self._places[x.data_ptr()] = (self._size, size)
        self._size += size
        return x.view(dtype)[:count].view(tuple(shape))

    def at(self, peer: int, mine: Tensor, like: Tensor, first: int = 0) -> Tensor:
        offset, size = self._places[mine.data_ptr()]
        if (peer, offset) not in self._theirs:  # it has said that this buffer is free, so there it is
            self._theirs[peer, offset] = _mapped(self._peers[peer], offset, size)
        return self._theirs[peer, offset].view(like.dtype)[first : first + like.numel()].view(like.shape)

    def put(self, signal: Signal) -> None:
        os.write(self._out[signal], b".")

    def wait(self, signal: Signal) -> None:
        """Raises RuntimeError if the peer has ended, or doesn't signal within the group's timeout."""
        pipe, polled = self._in[signal]
        if not polled.poll(self._timeout_ms):
            raise RuntimeError(f"no signal from rank {signal.peer} within {self._timeout_ms / 1e3:g} s")
        if not os.read(pipe, 1):
            raise RuntimeError(f"rank {signal.peer} has ended")

    def _reach(self, peer: int, host: _Host) -> None:
        """Open a peer's memory, and the pipes on which it waits for this rank. Raises OSError."""
        self._peers[peer] = self._opened(f"/proc/{host.pid}/fd/{host.memory}", os.O_RDWR)
        for signal, end in host.pipes.items():
            if signal.peer == self._rank:
                self._out[signal._replace(peer=peer)] = self._opened(f"/proc/{host.pid}/fd/{end}", os.O_WRONLY)

    def _opened(self, path: str, flags: int) -> int:
        self._open.append(os.open(path, flags))
        return self._open[-1]


def shared_transport(group: dist.ProcessGroup | None, *_: object, node: str = "") -> GlooTransport | SharedTransport:
    """The transport of CPU ranks with shared memory; plain gloo for a single rank. `node` as in SharedMemory."""
    remote = GlooTransport(group)
    if group is None:
        return remote
    return SharedTransport(group, remote.sent_bytes, remote=remote, memory=SharedMemory(group, node))


def _mapped(file: int, offset: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size, offset=offset), dtype=torch.uint8)


def _polled(pipe: int) -> select.poll:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return poll


def _close(files: Iterable[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
