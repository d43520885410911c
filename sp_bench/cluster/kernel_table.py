"""Rates of block kernels on a device: tables at some block sizes, and interpolation between them.

A device has any number of tables, each for one kernel, head_dim and set of dtypes:

    rates:
      flash_attn_3:               # a name
        kernel: flash_attn_3      # default: the name
        figures: published        # published, measured, or assumed
        source: where they are from
        head_dim: 128
        v_head_dim: 64            # of a kernel that takes narrower values as such; default: values as wide as keys
        dtypes: {bfloat16: 1.0}   # each with a factor on the rates
        heads: 16                 # heads of the blocks that the rates were measured at
        total_tokens: 16384       # tokens of a batch of these blocks; null: a batch of one
        tile_tokens: 128          # tokens of one thread block: queries forward, keys backward
        causal_order: ascending   # of causal thread blocks, head by head; ascending_forward: forward alone;
                                  #   default: longest_first, over all heads
        blocks_per_sm: 2          # of those forward, how many a multiprocessor has at once; default: 1
        forward_full: {512: 467, 1024: 565}           # TFLOP/s by tokens of a square block,
        backward_full: {512x512: 404, 512x1024: 440}  #   or by queries x keys, every pair of some sizes
        forward_causal: ...                           # square blocks only
        backward_causal: ...
        variable: {forward_full: 0.95, ...}   # of a call for variable lengths, to the rates of its pieces; default: 1
        variable_least_s: {forward: 6.0e-5}   # the shortest call of several pieces; default: 0
        variable_block_s: {backward: 1.0e-6}  # a multiprocessor's time for a thread block without work; default: 0

Between points a table is linear in log(tokens), or bilinear if it has pairs; outside them it is constant. Rates of
causal blocks with `causal_order: ascending` are constant as they are given, not in full waves (below). If a table has
no pairs, a block that is not square gets the rate of the square block with the same inner loop: forward thread blocks
loop over keys, backward thread blocks over queries. Waves account for the number of thread blocks.

Waves. A device with `sms` multiprocessors runs `sms` thread blocks at once: a full block of b (batch x heads) by q
queries takes W = ceil(b * ceil(q / tile_tokens) / sms) waves and fills b * q / tile_tokens / (sms * W) of them. Rates
are proportional to this fill. A table's rates are first divided by the fill of its own configuration, so that its
points are reproduced there.

Thread blocks of a causal block have all lengths up to the longest (sp_bench/cluster/waves.py). Kernels that start the
longest first fill the rest with the others, and take at least as long as the longest. One that has `causal_order:
ascending`, as FlashAttention-2, goes head by head: forward it begins with the first queries, so that each head ends
with its longest thread blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from msgspec import Meta, field

from sp_bench.cluster.waves import CausalOrder, Waves
from sp_bench.errors import RequestError, unknown
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.reading import Count, Positive, Section, figure

Block = Annotated[
    Count | Annotated[str, Meta(pattern=r"^0*[1-9]\d*(x0*[1-9]\d*)?$")],
    Meta(description="a whole number of at least 1, or two of them, queries x keys", examples=[512, "512x1024"]),
]
Points = Annotated[
    dict[Block, Annotated[Positive, figure(1e-4, 2e4, "TFLOP/s of each GPU, or of each CPU core")]],
    Meta(min_length=1, description="a table of rates, with at least one", examples=["{512: 100}"]),
]
"""{block: TFLOP/s}, with a block as tokens or queries x keys."""
LONGER = 8
"""How many times as long as the longest known block one is in which the end doesn't matter."""


class Rates(Section, frozen=True, kw_only=True):
    """One table of a cluster file's section `rates`; the module docstring explains its keys."""

    kernel: str | None = None
    figures: Literal["published", "measured", "assumed"]
    source: Any = None
    head_dim: Annotated[Count, figure(8, 1024, "elements of a head")]
    v_head_dim: Annotated[Count, figure(8, 1024, "elements of a head of values")] | None = None
    dtypes: dict[str, Annotated[Positive, figure(1e-3, 100, "times the table's rates")]]
    heads: Annotated[Count, figure(1, 4096, "heads of the blocks that were timed")] | None = None
    total_tokens: Annotated[Count, figure(64, 2**24, "tokens of the batch that was timed")] | None = None
    tile_tokens: Annotated[Count, figure(8, 4096, "tokens of a thread block")] | None = None
    causal_order: CausalOrder = "longest_first"
    blocks_per_sm: Annotated[Count, figure(1, 32, "thread blocks of a multiprocessor")] = 1
    forward_full: Points
    forward_causal: Points
    backward_full: Points
    backward_causal: Points
    variable: dict[str, Annotated[Positive, figure(0.05, 5, "times the rates of a call's pieces")]] = field(
        default_factory=dict
    )
    variable_least_s: dict[Literal["forward", "backward"], Annotated[Positive, figure(0, 1e-2, "seconds")]] = field(
        default_factory=dict
    )
    variable_block_s: dict[Literal["forward", "backward"], Annotated[Positive, figure(0, 1e-4, "seconds")]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Raises RequestError for blocks that can't be interpolated: a causal one not square, or a pair missing."""
        for name in self.variable:
            if name not in RATES:
                raise unknown("variable", name, RATES)
        for name in RATES:
            known = self.points(name)
            if all(q == kv for q, kv in known):
                continue
            if name.endswith("causal"):
                q, kv = next(pair for pair in known if pair[0] != pair[1])
                raise RequestError(f"{name}.{q}x{kv}", "a causal block must be square", f"{name}.{q} would work")
            missing = {(q, kv) for q, _ in known for _, kv in known} - known.keys()
            if missing:
                q, kv = min(missing)
                rule = "is missing: with blocks that are not square, every pair of the sizes is needed"
                raise RequestError(f"{name}.{q}x{kv}", rule, "a rate for it, or square blocks alone, would work")

    def points(self, name: str) -> dict[tuple[int, int], float]:
        """The table `name`, one of RATES: {(queries, keys): TFLOP/s}."""
        rates = {}
        for block, rate in getattr(self, name).items():
            q_tokens, _, kv_tokens = str(block).partition("x")
            rates[int(q_tokens), int(kv_tokens or q_tokens)] = rate
        return rates


RATES = tuple(name for name in Rates.__struct_fields__ if name.partition("_")[0] in PHASES)
"""The names of the rates of a table: phase_kind, of the kinds of blocks that kernels compute."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Rates by the tokens of a square block."""

    log_tokens: np.ndarray
    rates: np.ndarray

    def rate(self, phase: str, q_tokens: int, kv_tokens: int) -> float:
        """The interpolated rate of a block of q_tokens queries and kv_tokens keys."""
        return float(self.rates_of(phase, q_tokens, kv_tokens))

    def rates_of(self, phase: str, q_tokens, kv_tokens) -> np.ndarray:
        """The rates of many blocks; of what is shorter than the shortest known, that one's."""
        inner = kv_tokens if phase == "forward" else q_tokens
        return np.interp(np.log2(inner), self.log_tokens, self.rates)

    def shortest(self, phase: str) -> tuple[float, float]:
        """The shortest known inner loop in tokens, and its rate."""
        return float(2 ** self.log_tokens[0]), float(self.rates[0])


@dataclass(frozen=True, eq=False)
class Surface:
    """Rates by the queries and keys of a block."""

    log_q: np.ndarray
    """Logarithms of the queries: (Q,)."""
    log_kv: np.ndarray
    """Logarithms of the keys: (K,)."""
    rates: np.ndarray
    """TFLOP/s by queries and keys: (Q, K)."""

    def rate(self, phase: str, q_tokens: int, kv_tokens: int) -> float:
        """The interpolated rate of a block of q_tokens queries and kv_tokens keys."""
        by_q = [np.interp(math.log2(kv_tokens), self.log_kv, row) for row in self.rates]
        return float(np.interp(math.log2(q_tokens), self.log_q, by_q))

    def rates_of(self, phase: str, q_tokens: np.ndarray, kv_tokens: np.ndarray) -> np.ndarray:
        """The rates of many blocks; of what is shorter than the shortest known, that one's."""
        i, q = _between(self.log_q, q_tokens)
        j, kv = _between(self.log_kv, kv_tokens)
        low, high = (self.rates[row, j] * (1 - kv) + self.rates[row, j + 1] * kv for row in (i, i + 1))
        return low * (1 - q) + high * q

    def shortest(self, phase: str) -> tuple[float, float]:
        """The shortest known inner loop in tokens, and its best rate."""
        log_inner, axis = (self.log_kv, 1) if phase == "forward" else (self.log_q, 0)
        return float(2 ** log_inner[0]), float(self.rates.take(0, axis=axis).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTable:
    """The rates of one kernel at one head_dim."""

    kernel: str
    figures: str
    """published, measured or assumed."""
    head_dim: int
    v_head_dim: int | None
    """The width of values, if the kernel takes some that are narrower than keys."""
    dtypes: Mapping[str, float]
    """{dtype: factor on the rates}."""
    smallest: int
    """The smallest block, in tokens, that every table of rates covers."""
    waves: Waves | None
    """None: rates don't depend on the number of thread blocks."""
    points: Mapping[str, Mapping[tuple[int, int], float]]
    """TFLOP/s of blocks of so many queries and keys, by `phase_mask`, such as forward_causal."""
    timed_heads: int
    """The heads of these blocks."""
    timed_tokens: int | None
    """The tokens of the batch that they are of; None: each is a batch of its own."""
    variable: Mapping[str, float]
    """The rate of a call for variable lengths over those of its pieces, by `phase_mask`; 1 where it is missing."""
    variable_least_s: Mapping[str, float]
    """Seconds of the shortest call of several pieces, by phase; none where it is missing."""
    variable_block_s: Mapping[str, float]
    """Seconds that a multiprocessor takes for a thread block without work, by phase. A grid has as many thread blocks
    for each piece of a call as for the longest one."""

    @classmethod
    def build(cls, name: str, rates: Rates, sms: int | None) -> Self:
        """The table `name` on a device with `sms` multiprocessors."""
        tile, order, per_sm = rates.tile_tokens, rates.causal_order, rates.blocks_per_sm
        waves = Waves(sms=sms, tile_tokens=tile, causal_order=order, per_sm=per_sm) if sms and tile else None
        points = {rate: rates.points(rate) for rate in RATES}
        return cls(
            kernel=rates.kernel or name,
            figures=rates.figures,
            head_dim=rates.head_dim,
            v_head_dim=rates.v_head_dim,
            dtypes=rates.dtypes,
            smallest=max(min(min(pair) for pair in known) for known in points.values()),
            waves=waves,
            points=points,
            timed_heads=rates.heads or 1,
            timed_tokens=rates.total_tokens,
            variable=rates.variable,
            variable_least_s={**rates.variable_least_s},
            variable_block_s={**rates.variable_block_s},
        )

    @cached_property
    def rates(self) -> Mapping[str, Curve | Surface]:
        """TFLOP/s in full waves, by `phase_mask`: found when they are asked for, as a point needs one table of many."""
        return {rate: _shape(self._in_full_waves(rate, known)) for rate, known in self.points.items()}

    def _in_full_waves(self, name: str, known: Mapping[tuple[int, int], float]) -> Mapping[tuple[int, int], float]:
        """The rates divided by the fill of their waves."""
        if not self.waves:
            return known
        in_full = {}
        for (q_tokens, kv_tokens), rate in (_lengthened(known) if self.waves.late(name) else known).items():
            batch = max(self.timed_tokens // q_tokens, 1) if self.timed_tokens else 1
            tokens = _outer(name.partition("_")[0], q_tokens, kv_tokens)
            in_full[q_tokens, kv_tokens] = rate / self.waves.fill(name, tokens, batch * self.timed_heads)
        return in_full

    def fits(self, problem: Problem) -> bool:
        """Whether the table has the problem's dtype and head_dim, and its kernel takes the problem's values: padded to
        the width of keys, or of the one narrower width that it is built for.
        """
        takes = self.v_head_dim in (None, problem.value_dim)
        return problem.dtype in self.dtypes and problem.head_dim == self.head_dim and takes

    def flops_per_s(
        self, phase: str, mask: str, q_tokens: int, kv_tokens: int, *, batch_heads: int, dtype: str
    ) -> float:
        """FLOP/s of a block of q_tokens queries and kv_tokens keys; a dtype that the table lacks has factor 1."""
        name = f"{phase}_{mask}"
        rate = self.rates[name].rate(phase, q_tokens, kv_tokens)
        if self.waves:
            rate *= self.waves.fill(name, _outer(phase, q_tokens, kv_tokens), batch_heads)
        return 1e12 * rate * self.dtypes.get(dtype, 1.0)

    def flops_per_s_of(self, phase: str, mask: str, q_tokens, kv_tokens, *, batch_heads, dtype: str) -> np.ndarray:
        """FLOP/s of many blocks, each with its batch x heads: arrays of one shape, as is what is returned."""
        name = f"{phase}_{mask}"
        rates = self.rates[name].rates_of(phase, q_tokens, kv_tokens)
        rates = rates * self._shorter(phase, mask, kv_tokens if phase == "forward" else q_tokens)
        if self.waves:
            rates = rates * self.waves.fills(name, _outer(phase, q_tokens, kv_tokens), batch_heads)
        return 1e12 * rates * self.dtypes.get(dtype, 1.0)

    def _shorter(self, phase: str, mask: str, tokens: np.ndarray) -> np.ndarray:
        """The rates of blocks over that of the shortest known one: 1, or less of what is shorter.

        A thread block takes as long as its inner loop, and a start and an end, which are worth so many tokens of the
        loop that the shortest known one has its rate in the place of the best. Of a causal block the loops have half of
        the tokens in the mean, and half a tile, which the fill counts as work. Kernels on packs of short documents bear
        it out (analysis/published/kernel_documents.csv).
        """
        known = self.rates[f"{phase}_{mask}"]
        shortest, rate = known.shortest(phase)
        tile = self.waves.tile_tokens if self.waves else 0
        inner = np.minimum(tokens, shortest)
        if mask == "causal":
            inner, shortest = (inner + tile) / 2, (shortest + tile) / 2
        ends = shortest * (float(known.rates.max()) / rate - 1)
        return inner * (shortest + ends) / (shortest * (inner + ends))

    def idle_blocks_s(self, phase: str, pieces, tokens, longest, batch_heads):
        """Seconds that the thread blocks without work take of calls: arrays of one shape.

        A call has so many `pieces` of so many `tokens` together, the longest of which has `longest`, along what is
        split among thread blocks.
        """
        each_s = self.variable_block_s.get(phase, 0.0)
        if not (each_s and self.waves):
            return 0.0 * tokens
        tile = self.waves.tile_tokens
        grid = pieces * np.ceil(longest / tile)
        at_work = np.minimum(tokens / tile + pieces / 2, grid)  # the last of a piece is half full, in the mean
        return each_s * (grid - at_work) * batch_heads / self.waves.sms


def _between(points: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last point (a logarithm) below each number of tokens that has a next one, and the share of the way to it."""
    x = np.clip(np.log2(tokens), points[0], points[-1])
    i = np.clip(np.searchsorted(points, x, side="right") - 1, 0, points.size - 2)
    return i, (x - points[i]) / (points[i + 1] - points[i])


def _outer(phase: str, q_tokens, kv_tokens):
    """The tokens that are split among thread blocks."""
    return q_tokens if phase == "forward" else kv_tokens


def _lengthened(points: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The rates with one for blocks that are so long that no multiprocessor waits: as that of the longest known.

    A longer block has less to wait for, but no kernel was seen to gain by it.
    """
    longest, _ = max(points)
    return {**points, (LONGER * longest, LONGER * longest): points[longest, longest]}


def _shape(points: Mapping[tuple[int, int], float]) -> Curve | Surface:
    """A curve if all blocks are square, else a surface."""
    if all(q == kv for q, kv in points):
        sizes = sorted(q for q, _ in points)
        return Curve(np.log2(sizes), np.array([points[size, size] for size in sizes]))
    q_sizes, kv_sizes = sorted({q for q, _ in points}), sorted({kv for _, kv in points})
    rates = np.array([[points[q, kv] for kv in kv_sizes] for q in q_sizes])
    return Surface(np.log2(q_sizes), np.log2(kv_sizes), rates)
