"""The executor on this machine's GPU: `python -m benchmarks.gpu_executor [kernel=auto]` prints tables.

They have the errors of every method against fp64, with partials in the compute dtype and in fp32 on the wire. The ranks
share the GPU, and their transfers go through the host by gloo: streams, events and memory are a GPU's, the network is
not. Failures, and errors above the correctness gate's bounds, are listed below their table, and the exit code is 1.
Without CUDA it is 2. The times of single ranks of many are those of `mode=alone`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu_kernels import Row, with_failures
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.errors import RequestError
from sp_bench.kernels import choose
from sp_bench.machine import Devices
from sp_bench.measure.pool import RankFailure, RankPool
from sp_bench.measure.result import RankResult
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.workload import Attention, Spec

# An option that is a function takes the number of ranks.
METHODS: tuple[tuple[str, dict[str, object]], ...] = (
    ("ring", {}),
    ("mesh", {"tile": lambda n: (math.isqrt(n), n // math.isqrt(n))}),
    ("tokenring", {}),
    ("startrail", {"team": lambda n: 4 if n % 16 == 0 else 1}),
    ("all_gather", {}),
    ("usp", {"ulysses": lambda n: min(n, 8)}),
)
HEADS, HEAD_DIM, DTYPE, TIMEOUT_S = 32, 128, "bfloat16", 300.0
SHARED_BY = (2, 4, 16)
"""Numbers of ranks that share the GPU."""


def spec(method: str, options: dict[str, object], n: int, seqlen: int, *, kernel: str, wire: str = "") -> Spec:
    """The specification of a point for its ranks. Raises RequestError if the method can't run it."""
    options = {name: value(n) if callable(value) else value for name, value in options.items()}
    built = build(method, options)
    problem = Problem(
        n=n,
        seqlen=seqlen,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        wire_dtype=wire,
        layout=CAUSAL.layout(built.layout),
    )
    chosen = built.candidates(problem)[0]
    plans = {phase: chosen.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    return Spec(workload=Attention(phases=PHASES), problem=chosen.assigned(problem), plans=plans, kernel=kernel)


def measured(n: int, devices: Devices, specs: Sequence[Spec]) -> list[RankResult | str]:
    """The result of rank 0 for each point, or its fault. If one fails, each is measured by itself."""
    job = "sp_bench.measure.job:measure"
    try:
        with RankPool(n, TIMEOUT_S, devices=devices) as pool:
            return [one.wrong(DTYPE) or one for one in pool.run(job, list(specs), 1, 0)[0]]
    except RankFailure as error:
        if len(specs) == 1:
            return [" ".join(str(error).split())]
    return [result for one in specs for result in measured(n, devices, [one])]


def exactness(n: int, kernel: str) -> Iterator[Row | str]:
    """The errors of each method that can run on n ranks which share the GPU; a text where the gate fails."""
    asked = []
    for (method, options), wire in itertools.product(METHODS, (DTYPE, "float32")):
        with contextlib.suppress(RequestError):
            asked.append((method, spec(method, options, n, 1024 * n, kernel=kernel, wire=wire)))
    results = measured(n, Devices(kind="cuda", shared=True), [one for _, one in asked])
    for (method, one), result in zip(asked, results, strict=True):
        wire = one.problem.wire_dtype
        if isinstance(result, str):
            yield f"{method}, {n} ranks, {wire} on the wire: {result}"
        else:
            errors = {name: f"{error:.1e}" for name, error in result.gate.overall.items()}
            yield {"method": method, "ranks": str(n), "wire": wire, "kernel": result.kernel, **errors}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    return run_command("benchmarks.gpu_executor", __doc__ or "", _print, arguments)


def _print(arguments: list[str]) -> int:
    kernel = only_keys(arguments, {"kernel": "auto"}).get("kernel", "auto")
    if not torch.cuda.is_available():
        raise RequestError(
            "device=cuda", "torch finds no GPU here", "python -m analysis.reproduce study=executor would work"
        )
    choose(kernel, "cuda", DTYPE, HEAD_DIM)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {HEADS} heads of {HEAD_DIM}, {DTYPE}, causal\n")
    complete = True
    for n in SHARED_BY:
        text, none_failed = with_failures(exactness(n, kernel))
        print(text, end="\n\n", flush=True)
        complete = complete and none_failed
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
