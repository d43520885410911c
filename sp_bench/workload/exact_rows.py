"""Rows of an attention's results against fp64: all of them, or a sample that bounds time and memory.

A row of out or dq takes its query and the keys that it sees. A row of dk or dv takes all queries that see its key, and
all keys that these see: of the sampled keys each rank computes what its own queries add, and the sum is compared.
Beside the errors stands what roundings to the dtype do to these rows of any attention: they are no mistake.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.problem import Problem
from sp_bench.run.sharding import positions, unshard
from sp_bench.workload.base import RankContext
from sp_bench.workload.exactness import NAMES, relative_error
from sp_bench.workload.gate import HEAD_FACTOR, TOLERANCE, UNIT_ROUNDOFF, GateErrors
from sp_bench.workload.seen import Seen

ROWS, KEYS = 16, 256
"""Queries that are sampled on each rank, and keys on all ranks together (but at least one on each)."""
GATHERED = 2**25
"""Elements of keys and values that a rank gathers at most, but those of FEWEST_UNITS heads."""
FEWEST_UNITS = 8
"""Key heads that are looked at where so many ranks may split them: a wrong rank is found by its own heads."""
WORK = {"cpu": 1e9, "cuda": 4e12}
"""Most multiplications of one matrix product on a rank for sampled keys; a quarter of it for all rows of a problem."""
BLOCK, BLOCK_ROWS = {"cpu": 2**21, "cuda": 2**24}, {"cpu": 128, "cuda": 4096}
"""Most scores, and most queries, that are computed at a time."""

Unit = tuple[int, int]
"""(batch entry, key head)."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""This rank's (q, k, v, dout), each (B, S, H, D)."""


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

    def of(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the sampled rows of this rank's results, on the CPU."""
        return {
            name: x.detach().index_select(1, (self.rows if name in ("out", "dq") else self.mine).to(x.device)).cpu()
            for name, x in results.items()
        }


def all_rows(problem: Problem, rank: int) -> Sample:
    """Every row of every head."""
    everything, units = torch.arange(problem.tokens(rank)), _units(problem)
    return Sample(everything, torch.arange(problem.seqlen), everything, units, units)


def rows_for(problem: Problem, rank: int, seed: int, device: str) -> Sample:
    """Every row, if a rank can compute that soon; else a sample. It is random by `seed`."""
    work = problem.batch * problem.heads * problem.seqlen**2 * problem.head_dim / problem.n
    return all_rows(problem, rank) if work <= WORK[device] / 4 else sampled(problem, rank, seed, device)


def sampled(problem: Problem, rank: int, seed: int, device: str) -> Sample:
    """Rows spread over each rank's tokens, of as many heads as GATHERED allows; keys of one of them, within WORK.

    Where all queries of the sampled keys together would take too long, those with the least work stay: the last ones
    of a causal sequence, and none where every query sees every key.
    """
    n, owned = problem.n, [positions(problem.layout, r, problem.n, problem.seqlen) for r in range(problem.n)]
    each = max(1, KEYS // n)
    picked = [mine[_spread(len(mine), each, seed + 1, r)] for r, mine in enumerate(owned)]
    units = _units(problem)
    most = max(GATHERED // (2 * problem.seqlen * problem.head_dim), min(n, FEWEST_UNITS), 1)
    step = -(-len(units) // most)
    drawn = random.Random(f"{seed} {n} {problem.seqlen} {problem.head_dim}")  # the same on all ranks
    chosen = units[drawn.randrange(min(step, len(units))) :: step]
    keys = _within(torch.cat(picked).sort().values, problem, WORK[device])
    mine = torch.isin(owned[rank], keys).nonzero().flatten()
    of_keys = (drawn.choice(chosen),)
    return Sample(_spread(len(owned[rank]), ROWS, seed, rank), keys, mine, chosen, of_keys)


def _units(problem: Problem) -> tuple[Unit, ...]:
    return tuple((entry, head) for entry in range(problem.batch) for head in range(problem.kv_heads))


def _spread(count: int, wanted: int, seed: int, rank: int) -> Tensor:
    """One index of each of so many equal parts of range(count), drawn by `seed`; of the last part the last one."""
    if count <= wanted:
        return torch.arange(count)
    edges = torch.linspace(0, count, wanted + 1).long()
    draws = torch.rand(wanted, generator=torch.Generator().manual_seed(seed * 1_000_003 + rank), dtype=torch.float64)
    found = edges[:-1] + (draws * (edges[1:] - edges[:-1])).long()
    found[-1] = count - 1
    return found


def _within(keys: Tensor, problem: Problem, most: float) -> Tensor:
    """The keys, or as many of those with the least work as a rank can compute with `most`."""
    seen = Seen(problem.mask, problem.seqlen)
    each = problem.heads // problem.kv_heads * problem.head_dim / problem.n

    def work(some: Tensor) -> float:
        return each * seen.pairs(seen.see_any(some))

    if work(keys) <= most:
        return keys
    order = keys[seen.pairs_of_keys()[keys].argsort()]
    fits, too_many = 0, len(order)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if work(order[:middle].sort().values) <= most else (fits, middle)
    return order[:fits].sort().values


def errors_of_rows(
    problem: Problem, context: RankContext, inputs: Inputs, found: Mapping[str, Tensor], sample: Sample
) -> GateErrors:
    """Errors of sampled rows of a problem's results, the same on all ranks. All ranks must call it.

    `found` has rows as `Sample.of` returns them, by the names of NAMES.
    """
    totals = torch.zeros(len(_TOTALS), len(NAMES), problem.heads, dtype=torch.float64)
    seen = Seen(problem.mask, problem.seqlen)
    for unit in sample.units:
        context.alive()
        _compare(_Unit(problem, context, inputs, sample, seen, unit), found, totals)
    if dist.is_initialized() and problem.n > 1:
        dist.all_reduce(totals)
    overall, worst_head, rounding, worst_rounding = {}, {}, {}, {}
    for i, name in enumerate(NAMES):
        of_heads = totals[:, i, totals[2, i] > 0]
        if not of_heads.numel():
            continue
        together = of_heads.sum(1, keepdim=True)
        overall[name], rounding[name] = (float(x) for x in _errors(together))
        each, possible = _errors(of_heads)
        usual = HEAD_FACTOR * TOLERANCE[problem.dtype]
        worst = int((each / (UNIT_ROUNDOFF[problem.dtype] * possible).clamp_min(usual)).argmax())
        worst_head[name], worst_rounding[name] = float(each[worst]), float(possible[worst])
    elements = totals[2]
    of_queries, of_keys = (
        int(elements[pair].max(0).values.sum()) // problem.head_dim for pair in (slice(2), slice(2, 4))
    )
    return GateErrors(
        overall=overall,
        worst_head=worst_head,
        rounding=rounding,
        worst_rounding=worst_rounding,
        seqlen=problem.seqlen,
        rows=(of_queries, of_keys),
        lost={name: int(totals[5, i].sum()) for i, name in enumerate(NAMES)},
    )


_TOTALS = ("errors^2", "norms^2", "elements", "variances", "variances of rows^2", "lost rows")
LOST, LOST_DEVIATIONS = 0.25, 64.0
"""A row is lost if its error is more than this share of it, and more than so many standard deviations of roundings. One
among thousands is nothing to the error of all: under a causal mask the last rows are the smallest."""
ROUNDINGS, TAIL = 2.0, 3.0
"""Errors of partial results, which are rounded when they travel and where they are added, as a multiple of one call's;
how many standard deviations the error of a single row can be above the usual one."""


def _errors(totals: Tensor) -> tuple[Tensor, Tensor]:
    """The relative errors, and the largest ones of roundings alone in unit roundoffs, from totals (6, ...).

    A rounding's error is uniform, up to a unit: its standard deviation is a unit over sqrt(3). The sum of few rows'
    errors varies more than that of many; rows count as many as have the variance among them.
    """
    error2, norm2, elements, variance, of_rows2, _ = totals
    rows = variance.square() / of_rows2.clamp_min(torch.finfo(torch.float64).tiny)
    usual = relative_error(torch.stack([variance / 3, norm2]), elements)
    most = ROUNDINGS * usual * (1 + TAIL / rows.clamp_min(1.0).sqrt())
    return relative_error(torch.stack([error2, norm2]), elements), torch.where(most.isfinite(), most, 0.0)


class _Unit:
    """A key head of a batch entry: its keys and values of all ranks, and this rank's queries."""

    def __init__(
        self, problem: Problem, context: RankContext, inputs: Inputs, sample: Sample, seen: Seen, unit: Unit
    ) -> None:
        self.entry, self.kv_head = unit
        q, k, v, dout = inputs
        sharing = problem.heads // problem.kv_heads
        self.heads = range(self.kv_head * sharing, (self.kv_head + 1) * sharing)
        self.sample, self.device, self.alive = sample, context.device, context.alive
        self.ranks = problem.n
        self.roundoff = max(UNIT_ROUNDOFF[problem.dtype], UNIT_ROUNDOFF[problem.wire_dtype])
        self.mine = positions(problem.layout, context.rank, problem.n, problem.seqlen)
        self.seen = seen
        self.keys = sample.keys if unit in sample.key_units else sample.keys[:0]
        self._q, self._dout = q, dout
        self.k, self.v = (self._whole(x, problem) for x in (k, v))

    def _whole(self, x: Tensor, problem: Problem) -> Tensor:
        """The head's rows of all ranks: (seqlen, D)."""
        head = x[self.entry : self.entry + 1, :, self.kv_head : self.kv_head + 1].cpu()
        return unshard(head, problem.layout, None, problem.n)[0, :, 0].to(self.device)

    def blocks(self) -> Iterator[tuple[Tensor, bool]]:
        """Local indices of queries, and whether they are compared themselves or only add to sampled keys."""
        most = min(BLOCK_ROWS[self.device.type], max(1, BLOCK[self.device.type] // len(self.k)))
        for rows in self.sample.rows.split(most):
            yield rows, True
        if len(self.keys):
            others = self.seen.see_any(self.keys)[self.mine]
            others[self.sample.rows] = False
            for rows in others.nonzero().flatten().split(most):
                yield rows, False

    def queries(self, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Their rows of q and dout: (rows, D) each."""
        rows = rows.to(self._q.device)
        q, dout = (x[self.entry, rows, head].to(self.device) for x in (self._q, self._dout))
        return q, dout


def _compare(unit: _Unit, found: Mapping[str, Tensor], totals: Tensor) -> None:
    """Add the totals of one unit's rows that this rank has."""
    sample, gradients = unit.sample, any(name != "out" for name in found)
    of_keys = torch.zeros(4, len(unit.keys), unit.k.shape[1], dtype=torch.float64, device=unit.device)
    """dk, dv, and the variances that roundings give them: (4, keys, D)."""

    def add(name: str, head: int, mine: Tensor, exact: Tensor, variance: Tensor) -> None:
        exact, of_rows = exact.cpu(), variance.sum(1).cpu()
        error2, norm2 = (mine.double() - exact).square().sum(1), exact.square().sum(1)
        by_chance = LOST_DEVIATIONS**2 * unit.roundoff**2 / 3 * of_rows
        lost = ~(error2 <= torch.maximum(LOST**2 * norm2, by_chance))  # NaN is lost
        more = torch.tensor(exact.numel()).double(), of_rows.sum(), of_rows.square().sum(), lost.double().sum()
        totals[:, NAMES.index(name), head] += torch.stack([error2.sum(), norm2.sum(), *more])

    for head in unit.heads:
        done = 0
        for rows, compared in unit.blocks():
            unit.alive()
            if not compared and not gradients:
                break
            results = _rows(unit, head, rows, of_keys, gradients, compared)
            if compared:
                place = slice(done, done + len(rows))
                done += len(rows)
                for name, (exact, variance) in zip(("out", "dq"), results, strict=False):
                    if name in found:
                        add(name, head, found[name][unit.entry, place, head], exact, variance)
    if len(unit.keys) and gradients:
        summed = of_keys.cpu()
        if dist.is_initialized() and unit.ranks > 1:
            dist.all_reduce(summed)
        at = torch.searchsorted(unit.keys, unit.mine[sample.mine])
        for name, exact, variance in zip(("dk", "dv"), summed[:2, at], summed[2:, at], strict=True):
            if name in found:
                mine = found[name][unit.entry, :, unit.kv_head]
                add(name, unit.kv_head, mine, exact, variance + exact.square())


def _rows(
    unit: _Unit, head: int, rows: Tensor, of_keys: Tensor, gradients: bool, compared: bool
) -> list[tuple[Tensor, Tensor]]:
    """out and dq of some queries, if they are compared; what they add to dk and dv is summed into `of_keys`.

    All in fp64, and each with the variance that roundings give it. A flash kernel rounds the probabilities, ds and
    results to its dtype, and takes rowsum(dO * O) of the rounded O. Each such rounding adds a random error; in units of
    its standard deviation it has the size of what is rounded.
    """
    places = unit.mine[rows]
    keys = unit.seen.range_of(places)
    q, dout = (x.double() for x in unit.queries(head, rows))
    k, v = (x[keys.start : keys.stop].double() for x in (unit.k, unit.v))
    scale = 1 / math.sqrt(k.shape[1])
    scores = (q @ k.T).mul_(scale).masked_fill_(~unit.seen.of(places, keys, unit.device), -math.inf)
    most = scores.amax(1, keepdim=True) if len(keys) else scores.new_zeros(len(q), 1)
    p = scores.sub_(most.masked_fill(most.isinf(), 0.0)).exp_()
    p.div_(p.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny))
    out, p2 = p @ v, p.square()
    found = [(out, p2 @ v.square() + out.square())] if compared else []
    if not gradients:
        return found
    delta, delta2 = (dout * out).sum(1, keepdim=True), (dout * out).square().sum(1, keepdim=True) * scale**2
    first, last = (int(torch.searchsorted(unit.keys, edge)) for edge in (keys.start, keys.stop))
    columns = (unit.keys[first:last] - keys.start).to(unit.device)
    ds = None
    if compared:
        ds = (dout @ v.T).sub_(delta).mul_(p).mul_(scale)
        dq, of_delta2 = ds @ k, (p @ k).square() * delta2
        found.append((dq, ds.square() @ k.square() + of_delta2 + dq.square()))
    if len(columns):
        some = slice(None) if len(columns) == len(keys) else columns
        p, p2 = p[:, some], p2[:, some]
        ds = ds[:, some] if ds is not None else (dout @ v[some].T).sub_(delta).mul_(p).mul_(scale)
        of_keys[0, first:last] += ds.T @ q
        of_keys[1, first:last] += p.T @ dout
        of_keys[2, first:last] += (ds.square() + p2 * delta2).T @ q.square()
        of_keys[3, first:last] += p2.T @ dout.square()
    return found
