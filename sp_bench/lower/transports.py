"""The transports that a plan can be lowered to, and what each can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A way in which tensors get from rank to rank (run.transport has the code)."""

    name: str
    preposts: bool = False
    """Whether a receive can be posted as soon as its buffer is free, before its rank has anything to send."""
    pipelines: bool = False
    """Whether a transfer can begin, tensor by tensor, while the one before on its lane is under way."""


GLOO = TransportKind(name="gloo", preposts=True, pipelines=True)
"""Between CPUs, each lane by a thread of its own."""
NCCL = TransportKind(name="nccl")
"""Between GPUs, each lane by a communicator of its own."""
STAGED = TransportKind(name="staged")
"""Between GPUs through the memory of their hosts, by gloo."""
ALONE = TransportKind(name="alone")
"""One rank without its peers: it receives copies of what it sends."""
