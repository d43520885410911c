"""Errors of bf16 attention by the dtype that partials travel in: `python -m benchmarks.wire_dtypes`.

Measured on ranks of this machine with the benchmark's own code. The errors are those of its correctness gate, which
covers all of such a short sequence. Prints Markdown tables; docs/results/numerics.md has one run.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sp_bench.bench import Outcome, resolve, run_points
from sp_bench.cli.compose import Composer
from sp_bench.markdown import table
from sp_bench.records import Record

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
TABLES = {
    f"kernel={kernel}": [
        f"{method} gpus=16 heads=16 kv_heads={kv_heads} kernel={kernel}" for kv_heads in (16, 4) for method in METHODS
    ]
    for kernel in ("aten_cpu", "reference")
} | {"kernel=aten_cpu, ring by ranks": [f"method=ring gpus={n} heads=4 kernel=aten_cpu" for n in (4, 8, 16, 32, 64)]}
WIRES = ("bfloat16", "float32")
HEADER = ["method", "variant", "heads/kv", "out", "dq", "dk", "dv", "sent, kB"]


def measure(points: Sequence[str]) -> list[Record]:
    """The records of all points. Exits if one of them failed."""
    with Composer() as composer:
        configs = [composer.compose(f"{PROBLEM} {point}".split()) for point in points]
    requests = [resolve(config | {"seqlen": TOKENS * config["gpus"]}) for config in configs]

    def finished(outcome: Outcome) -> None:
        record = outcome.record
        if record.status != "ok":
            sys.exit(f"{record.method} {record.variant}: {record.status}: {record.error}")

    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_points(requests, folder=Path(folder), reuse=False, finished=finished)
    return [outcome.record for outcome in outcomes]


def row(wires: Sequence[Record]) -> list[str]:
    """The row of a point, with its errors in thousandths for each wire dtype."""
    named = [f"`{wires[0].method}`", wires[0].variant or "", f"{wires[0].heads}/{wires[0].kv_heads}"]
    errors = zip(*((r.err_out, r.err_dq, r.err_dk, r.err_dv) for r in wires), strict=True)
    sent = [f"{(r.comm_bytes_per_gpu or 0) / 1e3:.0f}" for r in wires]
    return [*named, *(" → ".join(f"{1e3 * (x or 0):.2f}" for x in both) for both in errors), " → ".join(sent)]


def main() -> None:
    for title, rows in TABLES.items():
        records = measure([f"{point} wire_dtype={wire}" for point, wire in itertools.product(rows, WIRES)])
        cells = [row(records[i : i + len(WIRES)]) for i in range(0, len(records), len(WIRES))]
        print(f"\n{title}\n", table(HEADER, cells), sep="\n", flush=True)


if __name__ == "__main__":
    main()
