"""Lower a plan to one transport: waits, receive and staging buffers, pre-posted receives, pipelined sends."""

from sp_bench.lower.early import PrepostedReceive
from sp_bench.lower.lowering import Lowering, lower
from sp_bench.lower.staging import StagingUse, TensorSpec
from sp_bench.lower.transports import (
    ALONE,
    DEFAULT_TRANSPORT,
    GLOO,
    LAUNCH_ORDER,
    NCCL,
    ORDERED_FROM,
    SHARED,
    STAGED,
    SYMMETRIC,
    TransportKind,
    TransportOptions,
)
from sp_bench.plan.schedule import ReceiveBuffer, Waits

__all__ = [
    "ALONE", "DEFAULT_TRANSPORT", "GLOO", "LAUNCH_ORDER", "NCCL", "ORDERED_FROM", "SHARED", "STAGED", "SYMMETRIC",
    "Lowering", "PrepostedReceive", "ReceiveBuffer", "StagingUse", "TensorSpec", "TransportKind", "TransportOptions",
    "Waits", "lower",
]  # fmt: skip
