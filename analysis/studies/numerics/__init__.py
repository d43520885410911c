"""Errors of bf16 attention by the dtype that partials travel in, measured on CPU ranks by the correctness gate."""

from __future__ import annotations

from functools import partial

from sp_bench.analysis.runs import Runs
from sp_bench.records import Record
from sp_bench.workload.gate import TOLERANCE

PROBLEM = "cluster=local head_dim=64 dtype=bfloat16 causal=true iters=1 warmup=0 parts=false timeout_s=300"
TOKENS = 32
"""Tokens of each rank, as many as the gate covers."""
METHODS = (
    "method=ring",
    "method=mesh method.tile=[4,4]",
    "method=tokenring",
    "method=usp method.ulysses=4",
    "method=startrail method.team=2",
    "method=all_gather method.stride=4",
    "method=ulysses",
)
WIRES = ("bfloat16", "float32")
HEADER = ["method", "variant", "heads/kv", "out", "dq", "dk", "dv", "sent, kB"]


def row(wires: tuple[Record, ...]) -> list[str]:
    """The row of a point, with its errors in thousandths for each wire dtype."""
    named = [f"`{wires[0].method}`", wires[0].variant or "", f"{wires[0].heads}/{wires[0].kv_heads}"]
    errors = zip(*((r.err_out, r.err_dq, r.err_dk, r.err_dv) for r in wires), strict=True)
    sent = [f"{(r.comm_bytes_per_gpu or 0) / 1e3:.0f}" for r in wires]
    return [*named, *(" → ".join(_thousandths(x or 0.0) for x in both) for both in errors), " → ".join(sent)]


def _thousandths(error: float) -> str:
    return f"{1e3 * error:.2f}" + " (fails)" * (error > TOLERANCE["bfloat16"])


def table(runs: Runs, points: list[str]) -> list[dict[str, str]]:
    """The rows of points, with each wire dtype, those too whose errors the gate doesn't let through."""
    asked = [(*PROBLEM.split(), *point.split(), f"wire_dtype={wire}") for point in points for wire in WIRES]
    records = runs.ask(asked)
    runs.ok(one for one, record in zip(asked, records, strict=True) if record.status != "incorrect")
    both = zip(*(records[i :: len(WIRES)] for i in range(len(WIRES))), strict=True)
    return [dict(zip(HEADER, row(wires), strict=True)) for wires in both]


def _on_16(kernel: str) -> list[str]:
    shape = f"gpus=16 seqlen={16 * TOKENS} heads=16 kernel={kernel}"
    return [f"{method} {shape} kv_heads={kv_heads}" for kv_heads in (16, 4) for method in METHODS]


aten_cpu, reference = (partial(table, points=_on_16(kernel)) for kernel in ("aten_cpu", "reference"))
by_ranks = partial(
    table, points=[f"method=ring gpus={n} seqlen={TOKENS * n} heads=4 kernel=aten_cpu" for n in (4, 8, 16, 32, 64)]
)
