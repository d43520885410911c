"""python -m tests.tracing.make_cpu: trace the fixtures of this folder again, on this machine's CPU ranks.

Needed when the plan of the point changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sp_bench.traces import POINT, main

FOLDER = Path(__file__).with_name("cpu")
KEYS = (
    "method=mesh", "gpus=4", "method.tile=[2,2]", "cluster=local", "seqlen=512", "heads=4", "head_dim=64",
    "dtype=float32", "iters=3", "warmup=1",
)  # fmt: skip
"""The point of the fixtures."""

if __name__ == "__main__":
    code = main(["run", f"out={FOLDER}", *KEYS])
    (FOLDER / POINT).unlink(missing_ok=True)  # tests compose it, so that new keys have their defaults
    sys.exit(code)
