"""python -m sp_bench.describe method=mesh gpus=9: print a method's plan, or the costs of all methods.

key=value ...   the assignment matrix, the steps of a rank's tile and its program, forward and backward
--methods       the table of all methods (docs/results/methods.md)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sp_bench import account, draw, markdown
from sp_bench.cli.arguments import run_command
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Documents
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL, MASKS
from sp_bench.plan.method import PHASES, Method, ScheduleTime
from sp_bench.plan.ops import Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Q
from sp_bench.point import resolve
from sp_bench.point.backing import validated
from sp_bench.point.choose import choose, simulated
from sp_bench.point.request import Request
from sp_bench.point.variants import Choice, variants
from sp_bench.reading import Count, Tokens, read
from sp_bench.records.interval import Interval
from sp_bench.terminal import fitted

COMMAND = ("describe", "key=value ...", "draws a method: assignment matrix, steps, a rank's program")

MOST_RANKS = 40
"""The most ranks that can be described: wider matrices don't fit a terminal."""
TABLE_N = 16
ABOUT_METHODS = f"""
Made by `python -m sp_bench.describe --methods`; a test holds it against the code.

Volume is the payload that each GPU sends on average, in chunks of N/n tokens x heads * head_dim elements, lse apart.
Heads are the padded ones where method.pad_heads adds some.
h = heads, k = kv_heads / heads, nodes is method.nodes, u method.ulysses (1 in Mesh-Attention unless asked for), C
method.team, a x b the tile; o = 0 with method.row_sums=true, else 1; s = 3/4 with a causal mask on the zigzag layout,
else 1. Memory is what a rank holds at most, inputs and results included, in the same unit, in bf16 at n = {TABLE_N},
64 heads and k = 1, for the variant that sends least.
"""
ABOUT_TABLE_2 = """
Forward volume that a GPU sends in units of N * d, full attention, k = 1, for the variant that sends least: by the
paper's formula, and counted from the plans of all ranks (mean, and of the rank that sends most). Of StarTrail the paper
has two formulas. Table 2's, (4C-4)/n + 2/C, is what the four stages in its text add up to, and what a rank sends that
has to exchange its KV at the start; one rank in C has it already, so that the mean is 2/n below. The text's own sum,
(4C-1)/n + 2/C, is 3/n above it and holds for no rank. The last two columns are the least that any method sends with
the same split of heads, which is none but in Ulysses, and with any split.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("sp_bench.describe", __doc__ or "", _describe, argv, flags=("--methods",))


def _describe(arguments: Sequence[str]) -> int:
    if "--methods" in arguments and len(arguments) > 1:
        raise RequestError(" ".join(arguments), "--methods stands alone", "--methods would work")
    print(methods_table() if "--methods" in arguments else describe(arguments))
    return 0


def describe(overrides: Sequence[str]) -> str:
    """The description of one point as text. Rounds seqlen up to a multiple of 2 * gpus, but not of documents.

    Raises RequestError as the benchmark does, and for more than MOST_RANKS GPUs.
    """
    with Composer() as composer:
        point = composer.point(overrides)
        config = composer.compose(point)
    gpus = read(Count, config["gpus"], "gpus")
    if gpus > MOST_RANKS:
        raise RequestError(f"gpus={gpus}", "its matrix would not fit a terminal", f"up to {MOST_RANKS} would work")
    if config["mask"] != Documents.name:  # whose lengths say how long the sequence is
        config["seqlen"] = -(-read(Tokens, config["seqlen"], "seqlen") // (2 * gpus)) * 2 * gpus
    # GPUs that don't fill whole nodes are all put on one node, so that any number can be described.
    node = config["cluster"]["gpus_per_node"]
    if node and gpus % node:
        inside = {key: config["cluster"]["intra"][key] for key in ("bytes_per_s", "latency_s")}
        one_node = {"gpus_per_node": None, "intra": inside, "inter": None, "fabric": None, "placement": None}
        config["cluster"] = {**config["cluster"], **one_node}
    request = resolve({**config, "mode": "simulate"})
    choice = choose(request)
    problem, variant = choice.problem, choice.variant
    layout, degree = problem.layout.name, problem.layout.head_parallel
    lines = [
        f"{choice.method.name} ({choice.method.citation}), {gpus} ranks, {layout}" + (f", {variant}" if variant else "")
    ]
    split = f", the lowest of {degree} that each take their own heads of it" if degree > 1 else ""
    lines += _padding(problem)
    for phase, plan in choice.plans.items():
        volume, unit = account.volume(plan, problem), problem.chunk_bytes(Q, wire=True) * problem.head_slices
        lines += [
            f"\n{phase}: each rank sends {volume.payload_bytes / unit:g} units (chunks of Q), all of them "
            f"{gpus * volume.payload_bytes / unit:g}",
            _bounds(plan, problem, unit),
            *_schedule(choice.method.schedule_time(problem, phase, request.cluster.profile(request.problem))),
            f"\nassignment matrix: the rank that computes each block{split}",
            draw.grid(draw.assignment(plan, problem), "Q", "KV"),
            *_pack(plan, problem),
            "\nthe step of each block of a rank's tile, by local index",
            *_tiles(draw.block_steps(plan)),
            "\nthe program of a rank",
            *map(fitted, draw.steps(plan)),
        ]
    notes = [f"note: {note}" for note in request.notes]
    return "\n".join([*lines, fitted(_step(choice, request)), *_front(request), *map(fitted, notes)])


def _padding(problem: Problem) -> list[str]:
    """The heads that are computed and sent in place of the true ones, if there are others."""
    padded = problem.padded
    if padded is None:
        return []
    copies = f", each key head {padded.copies} times" if padded.copies > 1 else ""
    said = (
        f"{problem.heads} heads are padded to {padded.heads}, and {problem.kv_heads} key heads to "
        f"{padded.kv_heads}{copies}: units, chunks and blocks below have the padded heads, bounds the true ones"
    )
    return [fitted(said)]


def _bounds(plan: Plan, problem: Problem, unit: int) -> str:
    """The least that ranks can send in a phase, in units of so many bytes."""
    least = account.lower_bound_bytes(problem, plan.phase, kept=bool(plan.kept)) / unit
    any_split = account.least_bytes(problem, plan.phase)
    said = f"with this split of heads no method sends less than {least:.4g}"
    return said if any_split is None else f"{said}, with any split {any_split / unit:.4g}"


class Traded(NamedTuple):
    """A variant of a method on the front of memory against time."""

    variant: str
    layout: str
    peak_bytes: int
    interval: Interval
    """The simulated step and its interval, in ms."""


def memory_front(request: Request) -> list[Traded]:
    """The variants that no other one beats in both peak memory and simulated time, the leanest first.

    They are those that the request's options stand for, and the method's `leaner` ones.
    """
    by_peak: list[tuple[int, Choice]] = []
    for one in variants(request, (request.ours, *request.ours.leaner())):
        choice = simulated(one, request.cluster.even)
        by_peak.append((account.peak_bytes(choice.plans.values(), choice.problem, request.cluster.transport), choice))
    front: list[Traded] = []
    for peak, one in sorted(by_peak, key=lambda each: (each[0], each[1].total_s)):
        if not front or one.total_s * 1e3 < front[-1].interval.step_ms:
            ends = validated(request, one).around(one.total_s * 1e3)
            front.append(Traded(one.variant, one.problem.layout.name, peak, ends))
    return front


def _front(request: Request) -> list[str]:
    """The variants that no other beats in both memory and simulated time; nothing if there is only one."""
    front = memory_front(request)
    if len(front) == 1:
        return []
    lines = [
        "\nmemory against time, simulated: no other variant beats these in both",
        "   peak GB     step ms                within  variant",
    ]
    for one in front:
        peak, step, within = f"{one.peak_bytes / 1e9:.4g}", f"{one.interval.step_ms:.4g}", _within(one.interval)
        lines.append(f"{peak:>10}{step:>12}{within:>22}  {one.variant} {one.layout}")
    return lines


def _step(choice: Choice, request: Request) -> str:
    """The simulated step, what two of three measured ones would be within, and what says so."""
    validation, step_ms = validated(request, choice), choice.total_s * 1e3
    ends = validation.around(step_ms)
    within = f" {_within(ends)}" if ends.backed else ""
    return f"\nsimulated step: {step_ms:.4g} ms{within} ({validation.words})"


def _within(ends: Interval) -> str:
    return f"[{ends.low_ms:.4g}, {ends.high_ms:.4g}]" if ends.backed else "not validated"


def _schedule(time: ScheduleTime | None) -> list[str]:
    """How far a schedule is above the certified bound."""
    if time is None:
        return []
    gap = max(time.scheduled_s / time.least_s - 1, 0.0)
    said = (
        f"by the cluster's costs its schedule takes {time.scheduled_s * 1e3:.4g} ms, and no order of these hops and "
        f"blocks less than {time.least_s * 1e3:.4g} ms: {gap:.1%} above"
    )
    return ["", fitted(said)]


def _pack(plan: Plan, problem: Problem) -> list[str]:
    """For a pack, the tokens, documents and work of each rank."""
    if not isinstance(blocks := problem.blocks, PackBlocks):
        return []
    work, ranks = account.pairs(plan, problem), np.arange(problem.n)
    tokens = np.broadcast_to(problem.queries.tokens(ranks), problem.n)
    documents = (blocks.tokens_of_documents > 0).sum(axis=0)[ranks // problem.layout.head_parallel]
    lines = ["\na dot: no query sees a key there", "rank    tokens  documents  (query, key) pairs   of the mean"]
    for row in zip(ranks, tokens, documents, work, work / max(work.mean(), 1), strict=True):
        lines.append("{:>4}{:>10,}{:>11,}{:>20,}{:>14.2f}".format(*row))
    return lines


def _tiles(steps: np.ndarray) -> list[str]:
    grids = [draw.grid(of_slice, "Q#", "KV#") for of_slice in steps]
    return [f"heads/{i}\n{grid}" for i, grid in enumerate(grids)] if len(grids) > 1 else grids


def methods_table() -> str:
    """A Markdown page on all methods, computed from the code: volume, memory, limit, layouts, masks and source."""
    head = "method, volume forward, backward, memory forward, with backward, GPUs, layouts, masks, source".split(", ")
    methods = markdown.table(head, map(_row, REGISTRY))
    head = ["method", "formula", "n", "variant", "by formula", "counted, mean", "busiest", "bound", "any split"]
    papers = markdown.table(head, [_paper_row(paper, n) for paper in PAPERS_VOLUMES for n in (16, 64, 256)])
    sections = ["# Methods", ABOUT_METHODS, methods, "## Table 2 of Mesh-Attention, counted", ABOUT_TABLE_2, papers]
    return "\n\n".join(section.strip() for section in sections)


@dataclass(frozen=True)
class PaperVolume:
    """A row of table 2 of Mesh-Attention: forward volume per GPU in units of N * d, full attention, k = 1."""

    method: str
    formula: str
    """A Python expression in n and the method's `symbols`."""


PAPERS_VOLUMES = (
    PaperVolume("ring", "2 - 2/n"),
    PaperVolume("ulysses", "4*(n-1)/n**2"),
    PaperVolume("startrail", "(4*C-4)/n + 2/C"),
    PaperVolume("mesh", "2*a/n + 2/a - 4/n"),
)


class Volumes(NamedTuple):
    """The forward volume of a variant in units of N * d: by the paper's formula, counted from all ranks' plans, and the
    least with the same and with any split of heads.
    """

    variant: str
    paper: float
    mean: float
    busiest: float
    bound: float
    any_split: float


def counted_volumes(paper: PaperVolume, n: int) -> Volumes:
    """The volumes of one method at n GPUs, for the variant that sends least."""
    problem = Problem(n=n, seqlen=2 * n, heads=n, kv_heads=n, head_dim=8, mask=FULL, layout=LAYOUTS["contiguous"])
    method = least_volume(build(paper.method, {}), problem, PHASES[:1])
    problem = method.assigned(problem)
    volume = account.volume(method.plan(problem, "forward", COMPUTE_BOUND), problem)
    whole = problem.chunk_bytes(Q, wire=True) * n
    statistics = volume.total_bytes - volume.payload_bytes
    formula = eval(paper.formula, {"__builtins__": {}}, {"n": n, **method.symbols(problem)})
    counted = volume.payload_bytes, volume.max_bytes - statistics
    bounds = account.lower_bound_bytes(problem, "forward"), account.least_bytes(problem, "forward") or 0.0
    return Volumes(method.variant(n), formula, *(size / whole for size in (*counted, *bounds)))


def _paper_row(paper: PaperVolume, n: int) -> list[str]:
    variant, *figures = counted_volumes(paper, n)
    return [f"`{paper.method}`", _as_text(paper.formula), str(n), variant, *(f"{value:.6f}" for value in figures)]


def _as_text(formula: str) -> str:
    return formula.replace("**", "^").replace("*", " ").replace(" (", "(")


def _row(name: str) -> list[str]:
    """The cells of a method in the table of all methods."""
    cls = REGISTRY[name]
    n = TABLE_N
    try:
        build(name, {}).refuse(_problem(cls, n))
    except RequestError:
        n = 1
    method = least_volume(build(name, {}), _problem(cls, n))
    problem = method.assigned(_problem(cls, n))
    plans = [method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES]
    unit = problem.chunk_bytes(Q, wire=True) * problem.head_slices
    memory = [f"{account.peak_bytes(chosen, problem) / unit:.1f}" for chosen in (plans[:1], plans)]
    volumes = [_as_text(cls.formula[phase]) for phase in PHASES]
    return [f"`{name}`", *volumes, *memory, cls.limit, ", ".join(cls.layouts), ", ".join(MASKS), cls.citation]


def _problem(cls: type[Method], n: int) -> Problem:
    layout = LAYOUTS[cls.layouts[-1]]
    return Problem(n=n, seqlen=64 * n, heads=64, kv_heads=64, head_dim=64, layout=layout)


def least_volume(method: Method, problem: Problem, phases: Sequence[str] = PHASES) -> Method:
    """The variant of a method that sends the fewest bytes over the phases."""
    return min(method.candidates(problem), key=lambda m: sum(m.bytes_sent(problem, phase) for phase in phases))


if __name__ == "__main__":
    sys.exit(main())
