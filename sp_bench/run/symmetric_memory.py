"""Transfers between the GPUs of a node by copies into symmetric memory (torch.distributed._symmetric_memory).

A buffer that peers write to is allocated by `empty` and exchanged by `rendezvous`. A copy between two GPUs' memory, of
contiguous tensors of one dtype, is a cudaMemcpyAsync, which the driver gives to a copy engine: it takes no SM. A signal
is a kernel of one warp. `put_signal` waits until the peer has taken the last one of its channel, which it has here: a
pair's signals FREE and DATA alternate (one_sided.py). The pads are zero again after each transfer, so that a captured
step can be replayed. Lanes have pads, and groups, of their own: torch after 2.13 runs the signals of one group in the
order of their launches, whatever their streams are, and lanes would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from sp_bench.errors import RequestError
from sp_bench.lower import DEFAULT_TRANSPORT, SYMMETRIC, TransportOptions
from sp_bench.machine import boot_id
from sp_bench.plan.ops import Plan
from sp_bench.run.groups import gathered, own_group
from sp_bench.run.nccl import nccl_transport
from sp_bench.run.one_sided import OneSidedTransport, PeerMemory, Signal

SIGNAL_BYTES = 4
GRANULE_BYTES = 2 << 20
"""torch gives each tensor memory of its own, with its signal pad, by cuMemCreate: in such steps on NVIDIA's GPUs."""
PAD_BYTES = 16
"""The size of the buffer whose pads are used: an empty one can't be allocated."""


class SymmetricTransport(OneSidedTransport):
    """Between GPUs: copies inside a node, NCCL between nodes and for collectives."""

    kind = SYMMETRIC


class SymmetricMemory(PeerMemory):
    """torch's symmetric memory of the ranks of one node."""

    def __init__(
        self, members: Sequence[int], rank: int, groups: Callable[[int], Any], device: torch.device, torchs: Any
    ) -> None:
        """`members` are the ranks of the node, in the order of the group that `groups` makes for a lane.

        `torchs` is the module of torch.
        """
        self.neighbours = frozenset(members) - {rank}
        self._places = {member: place for place, member in enumerate(members)}
        self._groups, self._device, self._torchs = groups, device, torchs
        self._handles: dict[int, Any] = {}
        """The handle of each tensor, by its address."""
        self._pads: list[tuple[Tensor, Any]] = []
        """By lane, a buffer and its handle."""

    def connect(self, incoming: Sequence[Signal], lanes: int) -> None:
        self._pads = [self._shared((PAD_BYTES,), torch.uint8, lane) for lane in range(lanes)]
        need = 2 * len(self._places) * SIGNAL_BYTES
        if self._pads and need > self._pads[0][1].signal_pad_size:
            rule = f"its signals take {need} bytes, and torch's pads have {self._pads[0][1].signal_pad_size}"
            raise RequestError(f"a node of {len(self._places)} GPUs", rule, "transport=nccl would work")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises RequestError if the GPUs of the node can't reach each other's memory."""
        x, handle = self._shared(shape, dtype, 0)
        self._handles[x.data_ptr()] = handle
        return x

    def _shared(self, shape: Sequence[int], dtype: torch.dtype, lane: int) -> tuple[Tensor, Any]:
        """A tensor that the lane's group has exchanged, and its handle."""
        x = self._torchs.empty(tuple(shape), dtype=dtype, device=self._device)
        try:
            handle = self._torchs.rendezvous(x, self._groups(lane))
        except RuntimeError as error:
            rule = f"the GPUs of a node don't share memory ({error})"
            raise RequestError("transport=symmetric_memory", rule, "transport=nccl would work") from error
        self.outside_bytes += -(-(x.nbytes + handle.signal_pad_size) // GRANULE_BYTES) * GRANULE_BYTES
        return x, handle

    def at(self, peer: int, mine: Tensor, like: Tensor, first: int = 0) -> Tensor:
        return self._handles[mine.data_ptr()].get_buffer(self._places[peer], like.shape, like.dtype, first)

    def put(self, signal: Signal) -> None:
        self._pads[signal.lane][1].put_signal(self._places[signal.peer], signal.says)

    def wait(self, signal: Signal) -> None:
        self._pads[signal.lane][1].wait_signal(self._places[signal.peer], signal.says)


def refuse_backend(backend: str | None) -> None:
    """Raise RequestError for a backend of torch's symmetric memory other than CUDA's, whose signals have channels."""
    if backend != "CUDA":
        rule = "signals on channels are those of torch's backend CUDA"
        would_work = "unsetting TORCH_SYMMMEM, or transport=nccl, would work"
        raise RequestError(f"symmetric memory of backend {backend}", rule, would_work)


def symmetric_transport(
    group: dist.ProcessGroup,
    device: torch.device,
    plans: Mapping[str, Plan],
    timeout: timedelta | None = None,
    lane_ctas: int | None = None,
    options: TransportOptions = DEFAULT_TRANSPORT,
    torchs: Any = _symmetric_memory,
    node: str = "",
) -> SymmetricTransport:
    """The transport of GPU ranks with symmetric memory inside nodes. All ranks of the group must call it.

    `node` tells nodes apart; default: the machine. `lane_ctas` is as in `nccl_transport`. Raises RequestError where
    torch has no such memory.
    """
    refuse_backend(torchs.get_backend(device))
    nodes, rank = gathered(node or boot_id(), group), dist.get_rank(group)
    members = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    remote = nccl_transport(group, device, plans, timeout, lane_ctas, options)
    remote.others = frozenset(members) - {rank}

    def of_lane(lane: int) -> dist.ProcessGroup:
        return own_group(group, members, f"symmetric memory of lane {lane}", backend="gloo", device=device)

    memory = SymmetricMemory(members, rank, of_lane, device, torchs)
    return SymmetricTransport(group, remote.sent_bytes, remote=remote, memory=memory)
