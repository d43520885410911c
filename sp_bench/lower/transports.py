"""The transports that a plan can be lowered to, and the capabilities of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A way to move tensors between ranks, and its capabilities (the code is in run.transport)."""

    name: str
    made_by: str = ""
    """The function, module:name, that makes it of (ranks, device, plans, timeout, lane_ctas, options), as
    run.nccl:nccl_transport has them; empty where no request names it."""
    between: Literal["cpu", "cuda"] = "cpu"
    """The devices of its ranks."""
    simulated: bool = True
    """Whether cluster files have figures for it."""
    of_one_machine: bool = False
    """Whether its ranks would share what emulated hosts don't."""
    preposts: bool = False
    """Whether a receive is posted as soon as its buffer is free, before the rank has anything to send."""
    adds: bool = False
    """Whether the library's reduce-scatter adds on the way, sending each partial once. torch's for gloo is an
    all-reduce, which sends twice as much: an all-to-all takes its place."""
    adds_narrow: bool = False
    """Whether it adds partials of less than the accumulators' dtype too, rounding at every hop."""
    pipelines: bool = False
    """Whether a transfer can begin, tensor by tensor, while the one before it on its lane is in flight."""
    in_launch_order: bool = False
    """Whether NCCL carries all transfers, whose kernels of a rank can be told to start as they were launched."""
    lands: bool = False
    """Whether peers write what a Pass brings into this rank's memory. It then has to land in a buffer of the plan, and
    a result that outlives the plan is copied out of one."""


GLOO = TransportKind(name="gloo", made_by="sp_bench.run.gloo:gloo_transport", preposts=True, pipelines=True)
"""Gloo between CPUs; each lane has a thread."""
SHARED = TransportKind(
    name="shared_memory", made_by="sp_bench.run.shared_memory:shared_transport", simulated=False, of_one_machine=True,
    preposts=True, lands=True,
)  # fmt: skip
"""Memory that CPU ranks of one machine share; gloo for collectives and between machines."""
NCCL = TransportKind(
    name="nccl", made_by="sp_bench.run.nccl:nccl_transport", between="cuda", adds=True, in_launch_order=True
)
"""NCCL between GPUs; each lane has a communicator."""
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""The variable with which NCCL keeps several communicators in launch order; its default is 0. A kernel then waits until
the one that was launched before it on its GPU has started, of whatever communicator (src/enqueue.cc, getImplicitOrder).
In captures with drivers before CUDA 12.9, and anywhere before 12.3, it waits for that one's end."""
ORDERED_FROM = (2, 26)
"""The first NCCL that has it."""
SYMMETRIC = TransportKind(
    name="symmetric_memory", made_by="sp_bench.run.symmetric_memory:symmetric_transport", between="cuda", adds=True,
    lands=True,
)  # fmt: skip
"""Copies by the copy engines between the GPUs of a node; NCCL for collectives and between nodes."""
STAGED = TransportKind(name="staged", between="cuda")
"""Gloo between GPUs, through host memory."""
ALONE = TransportKind(name="alone")
"""A single rank without peers: it receives copies of what it sends."""

KINDS = {kind.name: kind for kind in (GLOO, SHARED, NCCL, SYMMETRIC)}
"""The kinds that a request can name. A new one is listed here; its `made_by` is the rest."""


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """The transport of a point and its options."""

    name: str = "auto"
    """A key of KINDS; auto is NCCL between GPUs and gloo between CPUs."""
    registered_buffers: bool = False
    """Whether buffers are allocated by NCCL and registered with the lanes' communicators."""
    cta_policy: str | None = None
    """NCCL's policy for the SMs that its kernels take: default, efficiency or zero; None leaves it to NCCL."""
    cuda_graph: bool | Literal["auto"] = False
    """Whether each phase of a step is captured once, and then replayed; auto: where that works."""

    def kind(self, *, on_cpu: bool) -> TransportKind:
        """The kind that plans are lowered for."""
        return KINDS[("gloo" if on_cpu else "nccl") if self.name == "auto" else self.name]

    def described(self, *, on_cpu: bool) -> str:
        """The transport and its options in words, such as `nccl, registered buffers, cta_policy=zero`."""
        words = [self.kind(on_cpu=on_cpu).name]
        words += ["registered buffers"] if self.registered_buffers else []
        words += [f"cta_policy={self.cta_policy}"] if self.cta_policy else []
        words += [f"CUDA graph{' where it can be' * (self.cuda_graph == 'auto')}"] if self.cuda_graph else []
        return ", ".join(words)


DEFAULT_TRANSPORT = TransportOptions()
"""NCCL between GPUs and gloo between CPUs, as they are."""
