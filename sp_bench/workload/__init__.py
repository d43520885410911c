"""Workloads: the operations that are timed. Each has a file here and a line in the registry. Imports no torch."""

from sp_bench.errors import unknown
from sp_bench.workload.attention import Attention
from sp_bench.workload.base import RankContext, Spec, Step, Workload
from sp_bench.workload.decode import Decode
from sp_bench.workload.dit import Denoise, Dit
from sp_bench.workload.gate import TOLERANCE, GateErrors
from sp_bench.workload.prefill import Prefill
from sp_bench.workload.train import Train

__all__ = [
    "TOLERANCE", "WORKLOADS", "Attention", "Decode", "Denoise", "Dit", "GateErrors", "Prefill", "RankContext", "Spec",
    "Step", "Train", "Workload", "workload_named",
]  # fmt: skip

WORKLOADS: dict[str, type[Workload]] = {
    workload.name: workload for workload in (Attention, Train, Dit, Prefill, Decode)
}
"""Every workload, by the value of the key `workload`. A new one is imported above and listed here."""


def workload_named(name: str) -> type[Workload]:
    """The workload of that name. Raises RequestError if it is unknown."""
    if name not in WORKLOADS:
        raise unknown("workload", name, WORKLOADS)
    return WORKLOADS[name]
