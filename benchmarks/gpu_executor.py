"""The executor on this machine's GPU: `python -m benchmarks.gpu_executor` prints tables. Without CUDA it exits with 2.

First every method on ranks that share the GPU, against fp64: their transfers go through the host by
gloo, so that streams, events and memory are a GPU's and the network is not. Then single ranks of many, alone, with
copies for transfers: what of a rank's time are kernels, folds and waiting, and what the calling thread takes to queue
it. That it takes less than the device needs is what hides it. Medians; compared numbers are taken in turn.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys

import torch

from benchmarks.reports import table
from methods import build
from sp_bench import account
from sp_bench.bench.values import whole
from sp_bench.measure.devices import Devices
from sp_bench.measure.pool import RankPool
from sp_bench.measure.spec import Measured, Spec
from sp_bench.plan import COMPUTE_BOUND, PHASES, Problem, RequestError, layout_named

# Options that are functions are of the number of ranks.
METHODS: tuple[tuple[str, dict[str, object]], ...] = (
    ("ring", {}),
    ("mesh", {"tile": lambda n: (math.isqrt(n), n // math.isqrt(n))}),
    ("tokenring", {}),
    ("startrail", {"team": lambda n: 4 if n % 16 == 0 else 1}),
    ("all_gather", {}),
    ("usp", {"ulysses": lambda n: min(n, 8)}),
)
HEADS, HEAD_DIM, DTYPE, ITERS, WARMUP, TIMEOUT_S = 32, 128, "bfloat16", 10, 3, 300.0
SHARED_BY = (2, 4)
"""Ranks on the one GPU, where exactness is looked at."""
ALONE_OF = ((64, "256k"), (256, "1M"))
"""GPUs and tokens of the whole sequence, where ranks are executed alone."""


def spec(method: str, options: dict[str, object], n: int, seqlen: int, *, alone: int | None) -> Spec:
    """A point for ranks. Raises RequestError where the method can't do it."""
    options = {name: value(n) if callable(value) else value for name, value in options.items()}
    built = build(method, options)
    problem = Problem(
        n=n,
        seqlen=seqlen,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        layout=layout_named(built.layout, causal=True),
    )
    chosen = built.candidates(problem)[0]
    plans = {phase: chosen.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    return Spec(
        phases=PHASES,
        plans=plans,
        peer=None,
        problem=chosen.dealt(problem),
        kernel="auto",
        verify=alone is None,
        parts=True,
        seed=0,
        alone=alone,
    )


def gate_rows(n: int) -> list[dict[str, str]]:
    """Each method in the variants that it has for n ranks, which share the GPU: its errors, and what the gate says."""
    asked = []
    for method, options in METHODS:
        with contextlib.suppress(RequestError):
            asked.append((method, spec(method, options, n, 1024 * n, alone=None)))
    with RankPool(n, TIMEOUT_S, devices=Devices(kind="cuda", shared=True)) as pool:
        results = pool.run("sp_bench.measure.job:measure", [one for _, one in asked], 1, 0)[0]
    rows = []
    for (method, _), result in zip(asked, results, strict=True):
        errors = ", ".join(f"{name} {error:.1e}" for name, error in result.errors.items())
        row = {"method": method, "ranks": str(n), "kernel": result.kernel, "errors": errors}
        rows.append(row | {"gate": result.wrong(DTYPE) or "passes"})
    return rows


def alone_rows(n: int, tokens: str) -> list[dict[str, str]]:
    """Each method's rank 0 of n, alone on the GPU."""
    asked = [(method, spec(method, options, n, whole("seqlen", tokens), alone=0)) for method, options in METHODS]
    with RankPool(1, TIMEOUT_S, devices=Devices(kind="cuda")) as pool:
        (results,) = pool.run("sp_bench.measure.job:measure", [one for _, one in asked], ITERS, WARMUP)
    pairs = zip(asked, results, strict=True)
    return [{"method": name, "GPUs": str(n), **_row(one, found)} for (name, one), found in pairs]


def _row(one: Spec, found: Measured) -> dict[str, str]:
    device_s = statistics.median(map(sum, zip(found.forward_s, found.backward_s, strict=True)))
    parts = {"kernels": found.kernels_s, "folds": found.folds_s, "waiting": found.waits_s}
    operations = sum(len(plan.ops) for plan in one.plans.values())
    caller_s = statistics.median(found.caller_s)
    expected = account.peak_bytes(one.plans.values(), one.problem)
    return {
        "tokens of a block": str(one.problem.block_tokens),
        "device": f"{1e3 * device_s:.2f} ms",
        **{name: f"{statistics.median(seconds) / device_s:.1%}" for name, seconds in parts.items()},
        "queueing": f"{1e3 * caller_s:.2f} ms ({caller_s / device_s:.1%} of the device's time)",
        "each operation": f"{1e6 * caller_s / operations:.0f} us",
        "memory over the plans'": f"{found.device_bytes / expected:.2f}",
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_executor: torch finds no GPU here; benchmarks.executor_profile would work", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {HEADS} heads of {HEAD_DIM}, {DTYPE}, causal\n")
    for n in SHARED_BY:
        print(table(gate_rows(n)), end="\n\n", flush=True)
    for n, tokens in ALONE_OF:
        print(table(alone_rows(n, tokens)), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
