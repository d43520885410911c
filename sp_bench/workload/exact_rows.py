"""Rows of an attention's results against fp64: all of them, or a sample that bounds time and memory.

A row of out or dq takes its query and the keys that it sees. A row of dk or dv takes all queries that see its key, and
all keys that these see: of the sampled keys each rank computes what its own queries add, and the sum is compared. That
is the work of one key head of a forward, so it stays a share of what is timed at any length.
Beside the errors stands what roundings to the dtype do to these rows of any attention: they are no mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import out_of_memory
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.run.latents import Latents, Matrices, expanded, folded, parts_of_keys
from sp_bench.run.sharding import gathered, owned
from sp_bench.workload.base import RankContext
from sp_bench.workload.exactness import NAMES, relative_error
from sp_bench.workload.gate import HEAD_FACTOR, TOLERANCE, UNIT_ROUNDOFF, GateErrors
from sp_bench.workload.sampled_rows import Sample, Unit, key_positions
from sp_bench.workload.seen import Seen

BLOCK, BLOCK_ROWS = {"cpu": 2**21, "cuda": 2**24}, {"cpu": 128, "cuda": 4096}
"""Most scores or elements of keys, and most queries, that are computed at a time: their tensors are all the memory that
it takes, with the keys and values of a head."""
HELD = 2**28
"""Elements of a head's keys, or values, that a device holds at most; longer ones are read from the host in blocks."""
WIDE = {"float64": torch.float64, "float32": torch.float64}
"""Dtype of what queries add to sampled keys, by the problem's; others have float32. Compared rows are in float64."""

SINKS = "dsinks"
"""The gradient of sinks, which has no rows."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""This rank's (q, k, v, dout), each (B, S, H, D)."""


@dataclass
class SunkRows:
    """The scores that every row's softmax has besides those of keys, and their gradient."""

    scores: Tensor
    """By head, the same on all ranks: (H,). Of a decode step by key head and the query heads in it, which are rows in
    turn: (H, rows of a token)."""
    found: Tensor | None = None
    """Their gradient by all ranks, (H,); None where it isn't compared."""
    exact: Tensor = field(init=False)
    """The exact gradient by the rows seen so far, and the variance that rounded outputs give it: (2, H)."""

    def __post_init__(self) -> None:
        self.exact = torch.zeros(2, len(self.scores), dtype=torch.float64)

    def of(self, head: int, places: Tensor) -> Tensor:
        """The scores of a head for rows at these places: one for all, or (rows, 1)."""
        scores = self.scores[head]
        return scores[places.to(scores.device) % len(scores), None] if scores.ndim else scores

    def errors(self) -> tuple[float, float]:
        """(the relative error of their gradient, the largest one of roundings alone in unit roundoffs)."""
        assert self.found is not None, "it is compared"
        norm = float(self.exact[0].norm())
        off = float((self.found.double().cpu() - self.exact[0]).norm())
        return off / norm, ROUNDINGS * (1 + TAIL) * math.sqrt(float(self.exact[1].sum()) / 3) / norm


def errors_of_rows(
    problem: Problem,
    context: RankContext,
    inputs: Inputs,
    found: Mapping[str, Tensor],
    sample: Sample,
    sinks: SunkRows | None = None,
    *,
    latents: Latents | None = None,
) -> GateErrors:
    """Errors of sampled rows of a problem's results, the same on all ranks. All ranks must call it.

    `found` has rows as `Sample.of` returns them, by the names of NAMES. The gradient of `sinks`, if they have one, is
    compared where the sample is whole. `latents` make keys where they travel. If memory runs out on any rank, there are
    no errors, and `uncompared` says so.
    """
    totals = torch.zeros(len(_TOTALS), len(NAMES), problem.heads, dtype=torch.float64)
    seen, several = Seen(problem.mask, problem.seqlen, problem.keys.seqlen), dist.is_initialized() and problem.n > 1
    failed = torch.zeros(1)
    of_keys_width = max(problem.head_dim, problem.width(KV.fields[0]))
    for each in sample.units:
        context.alive()
        unit = _Unit(problem, context, inputs, sample, seen, each, sinks, latents)
        of_keys = torch.zeros(4, len(unit.keys), of_keys_width, dtype=torch.float64)
        try:
            if not failed:
                _compare_queries(unit, found, totals, of_keys)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            failed += 1  # the others wait for this rank
        if len(unit.keys) and any(name != "out" for name in found):
            if several:
                dist.all_reduce(of_keys)
            _compare_keys(unit, found, totals, of_keys)
    if several:
        dist.all_reduce(failed)
        dist.all_reduce(totals)
        if sinks:
            dist.all_reduce(sinks.exact)
    if failed:
        why = f"memory ran out on {int(failed)} of {problem.n} ranks"
        return GateErrors(seqlen=problem.seqlen, uncompared=why)
    errors = _of_totals(problem, totals)
    if not sinks or sinks.found is None or not sample.whole:
        return errors
    error, rounding = sinks.errors()
    return replace(errors, overall={**errors.overall, SINKS: error}, rounding={**errors.rounding, SINKS: rounding})


def _of_totals(problem: Problem, totals: Tensor) -> GateErrors:
    """The errors of all rows that were compared, from totals (_TOTALS, NAMES, heads) of all ranks."""
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
    widths = problem.value_dim, problem.head_dim, *(max(problem.width(field), 1) for field in KV.fields)
    rows = elements / torch.tensor(widths)[:, None]
    of_queries, of_keys = (int(rows[pair].max(0).values.sum()) for pair in (slice(2), slice(2, 4)))
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
        self,
        problem: Problem,
        context: RankContext,
        inputs: Inputs,
        sample: Sample,
        seen: Seen,
        unit: Unit,
        sinks: SunkRows | None = None,
        latents: Latents | None = None,
    ) -> None:
        """Gather the head's keys and values, or the `latents` that they are made of. All ranks must call it."""
        self.entry, self.kv_head = unit
        self.sinks, self._latents = sinks, latents
        q, k, v, dout = inputs
        sharing = problem.heads // problem.kv_heads
        self.heads = range(self.kv_head * sharing, (self.kv_head + 1) * sharing)
        self.sample, self.device, self.alive = sample, context.device, context.alive
        self.roundoff = max(UNIT_ROUNDOFF[problem.dtype], UNIT_ROUNDOFF[problem.wire_dtype])
        self.wide = WIDE.get(problem.dtype, torch.float32)
        self.places = owned(problem.queries, context.rank)
        """This rank's queries, by their place in the sequence of queries."""
        self.owned = key_positions(problem, context.rank)
        """This rank's keys, by position."""
        self.seen, self.scale, self.value_dim = seen, 1 / math.sqrt(problem.head_dim), problem.value_dim
        self.keys = sample.keys if unit in sample.key_units else sample.keys[:0]
        self._q, self._dout = q, dout
        self._k, self._v = (self._whole(x, problem) for x in (k, k[..., : self.value_dim] if problem.absorbed else v))
        self._made_of = self._k
        self._matrices: Matrices | None = None

    def _whole(self, x: Tensor, problem: Problem) -> Tensor:
        """The head's rows of all ranks, on the CPU: (kv_seqlen, D)."""
        head = x[self.entry : self.entry + 1, :, self.kv_head : self.kv_head + 1].cpu()
        return gathered(head, problem.keys, None)[0, :, 0]

    def turn_to(self, head: int) -> None:
        """Make the keys and values of a query head, if they are made of latents, and move them to the device, but for
        very long ones.
        """
        if self._latents:
            to_keys, to_values = (x.double().cpu() for x in self._latents.of(slice(head, head + 1)))
            self._matrices = to_keys, to_values
            k, v = expanded(self._made_of[None, :, None].double(), self._matrices)
            self._k, self._v = k[0, :, 0], v[0, :, 0]
        if self._k.numel() <= HELD:
            self._k, self._v = self._k.to(self.device), self._v.to(self.device)

    def blocks(self) -> Iterator[tuple[Tensor, bool]]:
        """Local indices of queries, and whether they are compared themselves or only add to sampled keys."""
        most = BLOCK_ROWS[self.device.type]
        for rows in filter(len, self.sample.rows.split(most)):
            yield rows, True
        if len(self.keys):
            others = self.seen.see_any(self.keys)[self.places]
            others[self.sample.rows] = False
            for rows in filter(len, others.nonzero().flatten().split(most)):
                yield rows, False

    def queries(self, head: int, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Their rows of q and dout: (rows, D) each."""
        rows = rows.to(self._q.device)
        q, dout = (x[self.entry, rows, head].to(self.device, dtype) for x in (self._q, self._dout))
        return q, dout

    def key_blocks(self, places: Tensor) -> Iterator[Tensor]:
        """Positions of keys that queries at some positions may see, in blocks."""
        keys = self.seen.range_of(places)
        yield from filter(len, torch.arange(keys.start, keys.stop).split(self.most_keys(places)))

    def most_keys(self, places: Tensor) -> int:
        """How many keys these queries take at a time: neither scores nor keys have more elements than BLOCK."""
        return max(1, BLOCK[self.device.type] // max(len(places), self._k.shape[1]))

    def add(self, of_keys: Tensor, some: Tensor, rows: Sequence[Tensor]) -> None:
        """Add rows of (dk, dv, their variances) of some keys to the sums, or those of the latents that they give."""
        dk, dv, of_dk, of_dv = rows
        if self._matrices:
            to_keys, to_values = self._matrices
            rounded = of_dk + dk.square(), of_dv + dv.square()  # before latents are made of them
            of_keys[0, some] += _folded(dk, dv, self._matrices)
            of_keys[2, some] += _folded(*rounded, (to_keys.square(), to_values.square()))
            return
        for total, x in zip(of_keys, (dk, dv, of_dk, of_dv), strict=True):
            total[some, : x.shape[1]] += x

    def scores(self, q: Tensor, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(scores of queries at these positions with some keys, the keys, their values), in the dtype of q."""
        rows = keys.to(self._k.device)
        k, v = (x[rows].to(self.device, q.dtype) for x in (self._k, self._v))
        unseen = ~self.seen.of(places, keys.to(self.device))
        return (q @ k.T).mul_(self.scale).masked_fill_(unseen, -math.inf), k, v


def _folded(dk: Tensor, dv: Tensor, matrices: Matrices) -> Tensor:
    """Rows of the gradient of latents, (S, W), by those of one head's keys (S, D) and values (S, V)."""
    return folded(*parts_of_keys(dk[None, :, None], matrices), dv[None, :, None], matrices)[0, :, 0]


def _compare_queries(unit: _Unit, found: Mapping[str, Tensor], totals: Tensor, of_keys: Tensor) -> None:
    """Add the totals of one unit's rows of out and dq that this rank has, and what its queries add to sampled keys."""
    gradients = any(name != "out" for name in found)
    for head in unit.heads:
        unit.turn_to(head)
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
                        mine = found[name][unit.entry, place, head]
                        _add(unit, totals[:, NAMES.index(name), head], mine, exact, variance)


def _compare_keys(unit: _Unit, found: Mapping[str, Tensor], totals: Tensor, of_keys: Tensor) -> None:
    """Add the totals of one unit's rows of dk and dv that this rank has; `of_keys` is what all queries add to them."""
    at = torch.searchsorted(unit.keys, unit.owned[unit.sample.mine])
    for name, exact, variance in zip(("dk", "dv"), of_keys[:2, at], of_keys[2:, at], strict=True):
        if name in found:
            mine = found[name][unit.entry, :, unit.kv_head]
            exact, variance = exact[:, : mine.shape[1]], variance[:, : mine.shape[1]]
            _add(unit, totals[:, NAMES.index(name), unit.kv_head], mine, exact, variance + exact.square())


def _add(unit: _Unit, totals: Tensor, mine: Tensor, exact: Tensor, variance: Tensor) -> None:
    """Add rows of one tensor and head to its totals."""
    exact, of_rows = exact.cpu(), variance.sum(1).cpu()
    error2, norm2 = (mine.double() - exact).square().sum(1), exact.square().sum(1)
    by_chance = LOST_DEVIATIONS**2 * unit.roundoff**2 / 3 * of_rows
    lost = ~(error2 <= torch.maximum(LOST**2 * norm2, by_chance))  # NaN is lost
    more = torch.tensor(exact.numel()).double(), of_rows.sum(), of_rows.square().sum(), lost.double().sum()
    totals += torch.stack([error2.sum(), norm2.sum(), *more])


def _rows(
    unit: _Unit, head: int, rows: Tensor, of_keys: Tensor, gradients: bool, compared: bool
) -> list[tuple[Tensor, Tensor]]:
    """out and dq of some queries, if they are compared; what they add to dk and dv is summed into `of_keys`.

    Compared rows are in fp64, and have the variance that roundings give them. A flash kernel rounds the probabilities,
    ds and results to its dtype, and takes rowsum(dO * O) of the rounded O. Each such rounding adds a random error; in
    units of its standard deviation it has the size of what is rounded.
    """
    places, scale = unit.places[rows], unit.scale
    q, dout = unit.queries(head, rows, torch.float64 if compared else unit.wide)
    lse, out, of_out = _attended(unit, q, places, head)
    results = [(out, of_out + out.square())] if compared else []
    if not gradients:
        return results
    delta, delta2 = (dout * out).sum(1, keepdim=True), (dout * out).square().sum(1, keepdim=True) * scale**2
    if compared and unit.sinks:
        p = (unit.sinks.scores[head].to(q) - lse).exp_()
        unit.sinks.exact[0, head] -= (p * delta).sum().cpu()
        unit.sinks.exact[1, head] += (p.square() * delta2).sum().cpu() / scale**2
    if compared:
        dq, of_dq, p_k = (torch.zeros_like(q) for _ in range(3))
        for keys in unit.key_blocks(places):
            scores, k, v = unit.scores(q, places, keys)
            p = scores.sub_(lse).exp_()
            ds = (dout @ v.T).sub_(delta).mul_(p).mul_(scale)
            dq += ds @ k
            p_k += p @ k
            of_dq += ds.square() @ k.square()
        results.append((dq, of_dq + p_k.square() * delta2 + dq.square()))
    seen = unit.seen.range_of(places)
    first, last = (int(torch.searchsorted(unit.keys, edge)) for edge in (seen.start, seen.stop))
    for some in torch.arange(first, last).split(unit.most_keys(places)):
        scores, _, v = unit.scores(q, places, unit.keys[some])
        p = scores.sub_(lse).exp_()
        ds = (dout @ v.T).sub_(delta).mul_(p).mul_(scale)
        p2 = p.square()
        dk, dv = ds.T @ q, p.T @ dout
        of_dk, of_dv = (ds.square() + p2 * delta2).T @ q.square(), p2.T @ dout.square()
        unit.add(of_keys, some, [x.double().cpu() for x in (dk, dv, of_dk, of_dv)])
    return results


def _attended(unit: _Unit, q: Tensor, places: Tensor, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lse (rows, 1), out (rows, D), the variance that rounded probabilities give out) of a head's queries at these
    positions.

    The softmax is taken block by block, with sums scaled to the largest score so far.
    """
    most, total = q.new_full((len(q), 1), -math.inf), q.new_zeros(len(q), 1)
    if unit.sinks:  # a score of its own, with a value of 0
        most, total = most.copy_(unit.sinks.of(head, places)), total + 1
    out, of_out = (q.new_zeros(len(q), unit.value_dim) for _ in range(2))
    for keys in unit.key_blocks(places):
        scores, _, v = unit.scores(q, places, keys)
        before, most = most, torch.maximum(most, scores.amax(1, keepdim=True))
        base = most.masked_fill(most.isinf(), 0.0)
        shrunk, p = (before - base).exp(), scores.sub_(base).exp_()
        total = total * shrunk + p.sum(1, keepdim=True)
        out = out * shrunk + p @ v
        if q.dtype == torch.float64:
            of_out = of_out * shrunk.square() + p.square() @ v.square()
    total = total.clamp_min(torch.finfo(q.dtype).tiny)  # whose square is 0: queries that see no key are 0, not NaN
    return most.masked_fill(most.isinf(), 0.0) + total.log(), out / total, of_out / total / total
