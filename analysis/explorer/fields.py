"""Fields of records in plain words: their labels, units and formats. The explorer and the report share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A field that was asked for or follows from it. Points are filtered and grouped by it."""

    name: str
    label: str
    words: str = ""
    """How numbers are written: tokens (256k), or as they are."""


@dataclass(frozen=True)
class Result:
    """A number that came out."""

    name: str
    label: str
    unit: str = ""
    factor: float = 1.0
    """A record's value times this is in `unit`."""
    better: str = ""
    """less or more; empty where neither is better by itself."""
    time: bool = False
    """Whether it has noise where it is measured: a time, or made of one."""
    interval: str = ""
    """How its interval follows from the step's: direct or inverse (by proportion), of simulated (as direct, and a
    measured one has none); empty: none."""

    @property
    def head(self) -> str:
        """The label with the unit, for the head of a column or an axis."""
        return head(self.label, self.unit)


def head(label: str, unit: str) -> str:
    """The head of a column or an axis: what its numbers are, and their unit."""
    return f"{label} ({unit})" if unit else label


SETTINGS = (
    Setting("mode", "mode"),
    Setting("status", "status"),
    Setting("workload", "workload"),
    Setting("method", "method"),
    Setting("impl", "implementation"),
    Setting("variant", "variant"),
    Setting("layout", "layout"),
    Setting("method_options", "method's options"),
    Setting("cluster", "cluster"),
    Setting("cluster_options", "cluster's options"),
    Setting("device_name", "device"),
    Setting("nodes", "nodes"),
    Setting("gpus", "GPUs"),
    Setting("seqlen", "sequence length", "tokens"),
    Setting("batch", "batch"),
    Setting("heads", "query heads"),
    Setting("kv_heads", "KV heads"),
    Setting("head_dim", "head dimension"),
    Setting("mask", "mask"),
    Setting("documents", "documents"),
    Setting("phase", "phase"),
    Setting("dtype", "dtype"),
    Setting("wire_dtype", "wire dtype"),
    Setting("kernel", "kernel"),
    Setting("options", "other options"),
    Setting("bound_by", "bound by"),
    Setting("code", "code version"),
)
"""Everything that points may differ in. Options and code are made from the request and the provenance."""

RESULTS = (
    Result("step_ms_median", "step time", "ms", better="less", time=True, interval="direct"),
    Result("forward_ms_median", "forward time", "ms", better="less", time=True, interval="of simulated"),
    Result("backward_ms_median", "backward time", "ms", better="less", time=True, interval="of simulated"),
    Result("tokens_per_s", "throughput", "tokens/s", better="more", time=True, interval="inverse"),
    Result("tflops_per_gpu", "model FLOP/s per GPU", "TFLOP/s", better="more", time=True, interval="inverse"),
    Result("mfu", "MFU", "%", 100.0, better="more", time=True, interval="inverse"),
    Result("compute_ms", "compute time of the busiest rank", "ms", time=True),
    Result("exposed_comm_ms", "exposed communication", "ms", better="less", time=True),
    Result("bound_ms", "lower bound of the step", "ms"),
    Result("comm_bytes_per_gpu", "sent per GPU", "GB", 1e-9, better="less"),
    Result("comm_bytes_busiest_gpu", "sent by the busiest GPU", "GB", 1e-9, better="less"),
    Result("comm_bytes_expected", "closed form of sent per GPU", "GB", 1e-9),
    Result("comm_bytes_lower_bound", "lower bound of sent per GPU", "GB", 1e-9),
    Result("comm_bytes_least", "lower bound with any split of heads", "GB", 1e-9),
    Result("comm_bytes_across_nodes_max", "sent to other nodes by the busiest GPU", "GB", 1e-9, better="less"),
    Result("peak_mem_bytes_max", "peak memory per GPU", "GB", 1e-9, better="less"),
    Result("rank_imbalance", "busiest rank over mean", better="less", time=True),
    Result("work_imbalance", "work of the busiest rank over mean", better="less"),
    Result("err_out", "error of out"),
    Result("err_dq", "error of dq"),
    Result("err_dk", "error of dk"),
    Result("err_dv", "error of dv"),
)

LABELS = {field.name: field.label for field in (*SETTINGS, *RESULTS)}
HEADS = {result.name: result.head for result in RESULTS}
KIND_WORDS = {
    "measured": "measured: wall time of all ranks together",
    "measured alone": "measured alone: wall time of single ranks, without their peers",
    "simulated": "simulated",
    "computed": "computed: counted from plans, or by a formula",
    "paper": "as printed in the paper",
}
"""The kinds of numbers (analysis.number.KINDS) in words, for legends."""
