"""FSDP's collectives of one rank: counted, timed, or left out. They are handed to FSDP in place of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.run.devices import Clock
from sp_bench.workload.training import GATHER, REDUCE

# torch 2.13 has new names for both.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Collectives:
    """The bytes and times of FSDP's collectives on this rank, and whether they are executed at all."""

    def __init__(self, clock: Clock) -> None:
        """Begin with nothing sent. `clock` is that of the rank's device."""
        self.executed = True
        """If not, a rank gets copies of its own shard, and keeps its own part of a gradient."""
        self.sent: Counter[tuple[str, ...]] = Counter()
        """Bytes sent so far, in a ring: n - 1 times a rank's shard."""
        self.marks: list[tuple[Any, Any]] = []
        """When each began and ended. On a GPU they run on streams of their own."""
        self.calls: list[Call] = []
        """Those since `begin`, with tensors of the shapes that they moved but no memory."""
        self.gathered_bytes = 0
        """The most that gathered parameters have taken, with the buffer that the next ones arrive in."""
        self.clock = clock

    def begin(self, *, executed: bool) -> None:
        """Forget the times and calls of the phase before; execute those of the next one or not."""
        self.executed, self.marks, self.calls = executed, [], []

    def again(self, calls: Sequence[Call]) -> None:
        """Repeat such collectives, with arbitrary data."""
        for collective, output, input, group in calls:
            device = collective.device
            collective(torch.zeros_like(output, device=device), torch.zeros_like(input, device=device), group)


class _Collective(ABC):
    """FSDP's interface of a collective: it allocates what is sent or received, and is called with it."""

    key: ClassVar[tuple[str, ...]]
    """The key that its bytes are counted under."""

    def __init__(self, collectives: Collectives, gathered: Callable[[], int], device: torch.device) -> None:
        """`gathered` tells the bytes of the parameters that are gathered at the moment."""
        self.collectives, self._gathered, self.device = collectives, gathered, device

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Move the tensors, by summation where they are reduced, whatever `op` FSDP has found."""
        own, start = self.collectives, self.collectives.clock.mark()
        moved = [torch.empty_like(x, device="meta") for x in (output_tensor, input_tensor)]
        own.calls.append((self, moved[0], moved[1], group))
        work = None
        if own.executed:
            work = self._execute(output_tensor, input_tensor, group, async_op)
            own.sent[self.key] += (group.size() - 1) * min(output_tensor.nbytes, input_tensor.nbytes)
        else:
            self._stay(output_tensor, input_tensor, group)
        own.marks.append((start, own.clock.mark()))
        return work

    @abstractmethod
    def _execute(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        """Move the tensors between the ranks of the group."""

    @abstractmethod
    def _stay(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Fill the output from this rank's input alone."""


Call = tuple[_Collective, Tensor, Tensor, dist.ProcessGroup]
"""A collective, its output and input without memory, and its group."""


class Gather(_Collective):
    """FSDP's all-gather of parameters, which come back to what they were."""

    key: ClassVar[tuple[str, ...]] = GATHER

    def _execute(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        own = self.collectives
        own.gathered_bytes = max(own.gathered_bytes, self._gathered() + output.nbytes)
        return _all_gather(output, input, group=group, async_op=async_op)

    def _stay(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        output.view(group.size(), -1).copy_(input.clone().view(1, -1))  # the input is a part of the output


class Reduce(_Collective):
    """FSDP's reduce-scatter of gradients."""

    key: ClassVar[tuple[str, ...]] = REDUCE

    def _execute(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        return _reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=group, async_op=async_op)

    def _stay(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        output.view(-1).copy_(input.view(group.size(), -1)[group.rank()])
