"""python -m sp_bench.describe method=mesh gpus=9: what a method does, and what all of them cost.

key=value ...   the assignment matrix, the steps of a rank's tile and its program, forward and backward
--methods       the table of all methods (docs/methods.md)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from methods import REGISTRY, build
from sp_bench import account, draw
from sp_bench.bench import resolve
from sp_bench.bench.choose import choose
from sp_bench.bench.values import whole
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.plan import COMPUTE_BOUND, PHASES, Method, Problem, layout_named

MOST_RANKS = 40
"""Wider matrices don't fit a terminal."""
TABLE_N = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    try:
        print(methods_table() if arguments == ["--methods"] else describe(arguments))
    except RequestError as error:
        print(f"sp_bench: {error}", file=sys.stderr)
        return 2
    return 0


def describe(overrides: Sequence[str]) -> str:
    """The text for one point. Its seqlen is made to fit the ranks. Raises RequestError as the benchmark does."""
    with Composer() as composer:
        (point,) = composer.points(overrides, sweep=False)
        config = composer.compose(point)
    gpus = whole("gpus", config["gpus"])
    if gpus > MOST_RANKS:
        raise RequestError(f"gpus={gpus}", "its matrix would not fit a terminal", f"up to {MOST_RANKS} would work")
    config["seqlen"] = -(-whole("seqlen", config["seqlen"]) // (2 * gpus)) * 2 * gpus
    request = resolve({**config, "mode": "simulate"})
    choice = choose(request)
    shape = choice.method.tile_shape(gpus)
    layout = request.problem.layout.name
    lines = [
        f"{choice.method.name} ({choice.method.citation}), {gpus} ranks, {layout}"
        + (f", tile {shape[0]}x{shape[1]}" if shape else "")
    ]
    for phase, plan in choice.plans.items():
        volume, unit = account.volume(plan, request.problem), request.problem.chunk_bytes("q", wire=True)
        lines += [
            f"\n{phase}: each rank sends {volume.payload_bytes / unit:g} units (chunks of Q), all of them "
            f"{gpus * volume.payload_bytes / unit:g}",
            "\nassignment matrix: the rank that computes each block",
            draw.grid(draw.assignment(plan), "Q", "KV"),
            "\nthe step of each block of a rank's tile, by local index",
            draw.grid(draw.block_steps(plan), "Q#", "KV#"),
            "\nthe program of a rank",
            *draw.steps(plan),
        ]
    return "\n".join(lines)


def methods_table() -> str:
    """Every method: volume, memory, limits, layouts, source, as Markdown, computed from the code."""
    rows = [
        "# Methods",
        "",
        "Made by `python -m sp_bench.describe --methods`; a test holds it against the code.",
        "",
        "Volume is the payload that each GPU sends, in chunks of N/n tokens x heads * head_dim elements;",
        "k = kv_heads / heads, the lse apart. Memory is what a rank holds at most, inputs and results included, in the",
        f"same unit, in bf16 at n = {TABLE_N} and k = 1, for the variant that sends least.",
        "",
        "| method | volume forward | backward | memory forward | with backward | GPUs | layouts | masks | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(name) for name in REGISTRY)])


def _row(name: str) -> str:
    cls = REGISTRY[name]
    n = TABLE_N
    try:
        build(name, {}).refuse(_problem(cls, n))
    except RequestError:
        n = 1
    problem = _problem(cls, n)
    method = least_volume(build(name, {}), problem)
    plans = [method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES]
    unit = problem.chunk_bytes("q", wire=True)
    memory = [f"{account.peak_bytes(chosen, problem) / unit:.1f}" for chosen in (plans[:1], plans)]
    volumes = [cls.formula[phase].replace("*", " ").replace(" (", "(") for phase in PHASES]
    limit = "1" if n == 1 else "any number"
    cells = (f"`{name}`", *volumes, *memory, limit, ", ".join(cls.layouts), "full, causal", cls.citation)
    return f"| {' | '.join(cells)} |"


def _problem(cls: type[Method], n: int) -> Problem:
    layout = layout_named(cls.layouts[-1], causal=True)
    return Problem(n=n, seqlen=64 * n, heads=16, kv_heads=16, head_dim=64, layout=layout)


def least_volume(method: Method, problem: Problem) -> Method:
    """The variant that sends least."""
    return min(method.candidates(problem), key=lambda m: sum(m.bytes_sent(problem, phase) for phase in PHASES))


if __name__ == "__main__":
    sys.exit(main())
