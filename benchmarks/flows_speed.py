"""Wall times of the flow simulator: `python -m benchmarks.flows_speed [--largest]`.

Each numba row is the second run: the first loads or compiles the kernel, a cost with a row of its own. The plain Python
solver runs only where it takes seconds. `--largest` adds the 4096-rank meshes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from sp_bench.simulate.flows import Solver, TaskGraph, solve

LINK_BYTES_PER_S = 50e9
LATENCY_S = 4e-6
COMPUTE_S = 100e-6
BLOCK_BYTES = 8 * 2.0**20


def exchange_steps(
    sends_to: np.ndarray, step_bytes: np.ndarray, compute_s: np.ndarray, ranks_per_link: int = 1
) -> TaskGraph:
    """Steps of one send and one computation per rank, all over one outgoing and one incoming link per rank.

    sends_to: [steps, ranks] permutations; step_bytes, compute_s: [steps, ranks]. A send waits for the sends that its
    rank sent and received in the step before. A computation waits for that receive and for the computation before.
    `ranks_per_link` neighbouring ranks share their links, which keep the bandwidth of one.
    """
    steps, ranks = sends_to.shape
    kind_step_rank = np.arange(2 * steps * ranks).reshape(2, steps, ranks)
    send, compute = kind_step_rank
    received = np.empty_like(send)
    np.put_along_axis(received, sends_to, send, axis=1)
    deps = np.stack([np.stack([send[:-1], received[:-1]], -1), np.stack([compute[:-1], received[:-1]], -1)])
    dep_count = np.full((2, steps, ranks), 2)
    dep_count[:, 0] = 0

    rank = np.broadcast_to(np.arange(ranks), send.shape)
    links = -(-ranks // ranks_per_link)
    path_links = np.stack([rank // ranks_per_link, links + sends_to // ranks_per_link], -1)
    hop_count = np.stack([np.full(send.shape, 2), np.zeros(send.shape, int)])
    return TaskGraph(
        delay_s=np.concatenate([np.full(send.size, LATENCY_S), compute_s.ravel()]),
        flow_bytes=np.concatenate([step_bytes.ravel(), np.zeros(send.size)]),
        path_start=np.concatenate([[0], np.cumsum(hop_count)]),
        path_links=path_links.ravel(),
        path_loads=np.ones(path_links.size),
        dep_start=np.concatenate([[0], np.cumsum(dep_count)]),
        dep_tasks=deps.ravel(),
        rate_cap=np.full(2 * send.size, np.inf),
        weight=np.ones(2 * send.size),
        link_bytes_per_s=np.full(2 * links, LINK_BYTES_PER_S),
    )


def ring(ranks: int, steps: int) -> TaskGraph:
    sends_to = np.broadcast_to((np.arange(ranks) + 1) % ranks, (steps, ranks))
    return exchange_steps(sends_to, np.full(sends_to.shape, BLOCK_BYTES), np.full(sends_to.shape, COMPUTE_S))


def mesh(side: int, irregular: bool = False, ranks_per_link: int = 1) -> TaskGraph:
    """A ring along each row, then along each column, then along each row again."""
    row, column = np.divmod(np.arange(side * side), side)
    along_row = row * side + (column + 1) % side
    along_column = (row + 1) % side * side + column
    sends_to = np.repeat([along_row, along_column, along_row], side - 1, axis=0)
    spread = np.random.default_rng(0).uniform(0.5, 1.5, sends_to.shape) if irregular else np.ones(sends_to.shape)
    return exchange_steps(sends_to, BLOCK_BYTES * spread, COMPUTE_S * spread, ranks_per_link)


def random_permutations(ranks: int, steps: int, ranks_per_link: int) -> TaskGraph:
    rng = np.random.default_rng(0)
    sends_to = np.stack([rng.permutation(ranks) for _ in range(steps)])
    spread = rng.uniform(0.1, 2.0, sends_to.shape)
    return exchange_steps(sends_to, BLOCK_BYTES * spread, COMPUTE_S * spread, ranks_per_link)


CASES: dict[str, Callable[[], TaskGraph]] = {
    "ring, 16 ranks": lambda: ring(16, 15),
    "random, 16 ranks x 16 steps, 4 ranks per link": lambda: random_permutations(16, 16, 4),
    "ring, 256 ranks": lambda: ring(256, 255),
    "random, 256 ranks x 64 steps": lambda: random_permutations(256, 64, 1),
    "random, 256 ranks x 64 steps, 8 ranks per link": lambda: random_permutations(256, 64, 8),
}
LARGEST: dict[str, Callable[[], TaskGraph]] = {
    "mesh 64 x 64, all alike": lambda: mesh(64),
    "mesh 64 x 64, irregular": lambda: mesh(64, irregular=True),
    "mesh 64 x 64, irregular, 8 ranks per link": lambda: mesh(64, irregular=True, ranks_per_link=8),
}
PYTHON_LIMIT_TASKS = 40_000


def wall_s(graph: TaskGraph, solver: Solver) -> float:
    begin = time.perf_counter()
    solve(graph, solver)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", action="store_true", help="add the 4096-rank meshes")
    cases = CASES | (LARGEST if parser.parse_args().largest else {})
    print(f"{'import numba, compile or load the kernel':<50}{wall_s(ring(2, 1), 'numba'):>10.3f} s")
    print(f"{'case':<50}{'tasks':>10}{'numba s':>10}{'python s':>10}")
    for name, build in cases.items():
        graph = build()
        tasks = graph.delay_s.size
        python = f"{wall_s(graph, 'python'):.3f}" if tasks <= PYTHON_LIMIT_TASKS else "-"
        print(f"{name:<50}{tasks:>10}{wall_s(graph, 'numba'):>10.3f}{python:>10}", flush=True)


if __name__ == "__main__":
    main()
