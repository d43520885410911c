"""The start of a phase, which ranks on GPUs begin together by a barrier on their streams.

A barrier between host processes lets ranks go on apart by the time of its messages, and by what each then takes to
launch a kernel. An all-reduce on the stream ends on all GPUs at once, within the time of one more hop, and what is
queued behind it begins then. How long a rank was in it says how much earlier than the last one it had come. A short
wait stands before it on the stream, in which the host launches the first work of the phase: it is there when the phase
begins, as it would be in the middle of a model's step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sp_bench.run.devices import Clock
from sp_bench.run.groups import own_group, world
from sp_bench.run.patience import first_timeout


def start_group(device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """NCCL's communicator of one CTA among all ranks, for the barriers of a GPU's stream. All ranks must call it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 1
    options._timeout = timeout = first_timeout(timeout)
    everyone = range(dist.get_world_size())
    purpose = "start of phases"
    return own_group(world(), everyone, purpose, backend="nccl", timeout=timeout, options=options, device=device)


class Start:
    """Lets all ranks begin a phase together."""

    def __init__(self, clock: Clock, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` has all ranks, and queues on the device's current stream; None: the hosts' barrier is all."""
        self._clock, self._group = clock, group
        self._token = torch.zeros(1, device=device)
        self._came: Any = None

    def together(self) -> Any:
        """Wait for all ranks; the mark at which the phase begins. The device should be idle before."""
        if dist.is_initialized():
            dist.barrier()
        self._clock.delay()
        if self._group is None:
            return self._clock.mark()
        self._came = self._clock.mark()
        work = dist.all_reduce(self._token, group=self._group, async_op=True)
        assert work is not None
        work.wait()  # on a GPU the stream waits, not the caller
        return self._clock.mark()

    def waited_s(self, start: Any) -> float | None:
        """How long this rank was in the barrier on its stream, once the device has reached `start`; None without it."""
        return None if self._group is None else self._clock.seconds(self._came, start)
