"""The transports that a plan can be lowered to, and the capabilities of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A way to move tensors between ranks, and its capabilities (the code is in run.transport)."""

    name: str
    preposts: bool = False
    """Whether a receive is posted as soon as its buffer is free, before the rank has anything to send."""
    adds: bool = False
    """Whether the library's reduce-scatter adds on the way, sending each partial once. torch's for gloo is an
    all-reduce, which sends twice as much: an all-to-all takes its place."""
    pipelines: bool = False
    """Whether a transfer can begin, tensor by tensor, while the one before it on its lane is in flight."""


GLOO = TransportKind(name="gloo", preposts=True, pipelines=True)
"""Gloo between CPUs; each lane has a thread."""
NCCL = TransportKind(name="nccl", adds=True)
"""NCCL between GPUs; each lane has a communicator."""
STAGED = TransportKind(name="staged")
"""Gloo between GPUs, through host memory."""
ALONE = TransportKind(name="alone")
"""A single rank without peers: it receives copies of what it sends."""
