"""How far Mesh-Attention's schedules are above a certified bound (docs/results/mesh_schedules.md).

python -m benchmarks.mesh_schedules > docs/results/mesh_schedules.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from sp_bench import markdown
from sp_bench.bench import resolve
from sp_bench.cli.compose import Composer
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan.method import PHASES

GPUS = (16, 64, 256)
HEAD = ["gpus", "tile", "phase", "bound ms", "paper", "searched"]
ABOUT = """
# Mesh-Attention's schedules against a bound

Made by `python -m benchmarks.mesh_schedules` at the default point (`conf/config.yaml`) and fewer GPUs.

**Idea.** Algorithms 2 and 3 of the paper are greedy, and `method.schedule=searched` is a local search. Neither says how
far it is from the best order of a tile's hops and blocks. A lower bound on all orders does.

**Formula.** A lane carries one hop at a time, a stream computes one block at a time. With i Q and j KV chunks received,
(i + 1)(j + 1) blocks are unlocked. Before row x and column y of the partials leave, x b + y a - x y blocks are done.
The bound is the least time of the problem in which only these numbers count, not which blocks they are. It is found
exactly, by dynamic programming over (i, j, x, y), for every tile.

**Proof.** Every schedule of the tile meets both conditions, so that it is a schedule of the relaxed problem with equal
times. `methods/mesh_bounds.py` shows why two numbers say all about a schedule's past. Folds are left out, which only
lowers the bound: in Ring's and Pass-Q's tiles (1 x n, n x 1) a part of the gap is the fold that each hop waits for.

Times are those of the cost profile that schedules are made with, in which the slowest hop of a ring counts for all; the
simulator's times, with shared links, differ. `describe` prints the same for one point. `paper` and `searched` are how
far their schedules are above the bound.
"""


def rows(gpus: int) -> Iterator[list[str]]:
    """The table's rows for one number of GPUs."""
    with Composer() as composer:
        (point,) = composer.points(["method=mesh", f"gpus={gpus}", "mode=simulate"], sweep=False)
        request = resolve(composer.compose(point))
    costs = request.cluster.profile(request.problem)
    for tile in tiles(gpus):
        for phase in PHASES:
            found = {}
            for schedule in ("paper", "searched"):
                method = build("mesh", {"tile": tile, "schedule": schedule})
                found[schedule] = method.schedule_time(request.problem, phase, costs)
            paper, searched = found["paper"], found["searched"]
            assert paper and searched
            above = (f"{max(time.scheduled_s / time.least_s - 1, 0.0):.2%}" for time in (paper, searched))
            yield [str(gpus), f"{tile[0]} x {tile[1]}", phase, f"{paper.least_s * 1e3:.4g}", *above]


def main() -> int:
    """Print the page."""
    print(ABOUT.strip() + "\n\n" + markdown.table(HEAD, [row for gpus in GPUS for row in rows(gpus)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
