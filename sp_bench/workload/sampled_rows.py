"""The rows of an attention's results that are compared against fp64: all of them, or a sample that bounds the time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.plan.problem import Problem
from sp_bench.run.sharding import owned

ROWS, KEYS = 16, 256
"""Queries that are sampled on each rank, and keys on all ranks together (but at least one on each)."""
GATHERED = 2**25
"""Elements of keys and values that a rank gathers at most, but those of FEWEST_UNITS heads."""
FEWEST_UNITS = 8
"""Key heads that are looked at where so many ranks may split them: a wrong rank is found by its own heads."""
WORK = {"cpu": 2.5e8, "cuda": 1e12}
"""Most multiplications of one matrix product on a rank for all rows of a problem; of more, a sample is compared."""
Unit = tuple[int, int]
"""(batch entry, key head)."""


@dataclass(frozen=True)
class Sample:
    """The rows that are compared on one rank."""

    rows: Tensor
    """This rank's queries, by their local index, ascending."""
    keys: Tensor
    """Keys of all ranks, by position, ascending; the same on all ranks."""
    mine: Tensor
    """Those of `keys` that this rank owns, by their local index."""
    units: tuple[Unit, ...]
    """The same on all ranks."""
    key_units: tuple[Unit, ...]
    """The units of which keys are compared."""
    whole: bool = False
    """Whether it is every row, on all ranks."""

    def of(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the sampled rows of this rank's results, on the CPU."""
        return {
            name: x.detach().index_select(1, (self.rows if name in ("out", "dq") else self.mine).to(x.device)).cpu()
            for name, x in results.items()
        }


def all_rows(problem: Problem, rank: int) -> Sample:
    """Every row of every head."""
    units, (rows, mine) = _units(problem), (torch.arange(int(x.tokens(rank))) for x in (problem.queries, problem.keys))
    return Sample(rows, torch.arange(problem.keys.seqlen), mine, units, units, whole=True)


def rows_for(problem: Problem, rank: int, seed: int, device: str) -> Sample:
    """Every row, if a rank can compute that soon; else a sample. It is random by `seed`."""
    work = problem.batch * problem.heads * problem.seqlen * problem.keys.seqlen * problem.head_dim / problem.n
    return all_rows(problem, rank) if work <= WORK[device] else sampled(problem, rank, seed)


def sampled(problem: Problem, rank: int, seed: int) -> Sample:
    """Rows spread over each rank's tokens, of as many heads as GATHERED allows; keys of all ranks, of one of them."""
    n, owned = problem.n, [key_positions(problem, r) for r in range(problem.n)]
    each = max(1, KEYS // n)
    picked = [mine[_spread(len(mine), each, seed + 1, r)] for r, mine in enumerate(owned)]
    units = _units(problem)
    most = max(GATHERED // (2 * problem.keys.seqlen * problem.head_dim), min(n, FEWEST_UNITS), 1)
    step = -(-len(units) // most)
    drawn = random.Random(f"{seed} {n} {problem.seqlen} {problem.head_dim}")  # the same on all ranks
    chosen = units[drawn.randrange(min(step, len(units))) :: step]
    keys = torch.cat(picked).sort().values
    mine = torch.isin(owned[rank], keys).nonzero().flatten()
    of_keys = (drawn.choice(chosen),)
    return Sample(_spread(int(problem.queries.tokens(rank)), ROWS, seed, rank), keys, mine, chosen, of_keys)


def key_positions(problem: Problem, rank: int) -> Tensor:
    """The positions of the keys that a rank owns, in its local order: (S,) int64."""
    return owned(problem.keys, rank)


def _units(problem: Problem) -> tuple[Unit, ...]:
    return tuple((entry, head) for entry in range(problem.batch) for head in range(problem.kv_heads))


def _spread(count: int, wanted: int, seed: int, rank: int) -> Tensor:
    """One index of each of so many equal parts of range(count), drawn by `seed`; of the last part the last one."""
    if count <= wanted:
        return torch.arange(count)
    edges = torch.linspace(0, count, wanted + 1).long()
    draws = torch.rand(wanted, generator=torch.Generator().manual_seed(seed * 1_000_003 + rank), dtype=torch.float64)
    indices = edges[:-1] + (draws * (edges[1:] - edges[:-1])).long()
    indices[-1] = count - 1
    return indices
