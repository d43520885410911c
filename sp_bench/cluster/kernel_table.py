"""What block kernels do on a device: tables of rates at some block sizes, and what lies between and beside these.

A device has any number of tables, each of one kernel, head_dim and set of dtypes:

    rates:
      flash_attn_3:               # a name
        kernel: flash_attn_3      # default: the name
        figures: published        # published, measured, or assumed
        source: where they are from
        head_dim: 128
        dtypes: {bfloat16: 1.0}   # each with a factor on the rates
        heads: 16                 # of the blocks that the rates were taken at,
        total_tokens: 16384       #   in batches that make up so many tokens; null: a batch of one
        tile_tokens: 128          # what one thread block takes: queries forward, keys backward
        forward_full: {512: 467, 1024: 565}           # TFLOP/s by tokens of a square block,
        backward_full: {512x512: 404, 512x1024: 440}  #   or by queries x keys, every pair of some sizes
        forward_causal: ...                           # square blocks only
        backward_causal: ...

Between its points a table is linear in log(tokens), bilinear where it has pairs; outside them it is flat. A block that
is not square takes, from a table without pairs, the rate of the square one with as long an inner loop: a thread block
of a forward kernel keeps its queries and goes over the keys, one of a backward kernel keeps its keys and goes over the
queries. How many thread blocks there are is what waves account for.

Waves. A device with `sms` multiprocessors works on so many thread blocks at once: a block of b (batch x heads) by q
queries takes W = ceil(b * ceil(q / tile_tokens) / sms) waves and fills b * q / tile_tokens / (sms * W) of them. Rates
are proportional to that fill, and those of a table are taken to have been so in its own configuration, so that a
table's point comes out as it stands for the blocks that it was taken at. Causal blocks have shorter and longer thread
blocks, which kernels hand out longest first: for them this is too much where waves are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from msgspec import Meta

from sp_bench.errors import RequestError
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.reading import Count, Positive, Section

MASKS = ("full", "causal")
RATES = tuple(f"{phase}_{mask}" for phase in PHASES for mask in MASKS)
Block = Annotated[
    Count | Annotated[str, Meta(pattern=r"^0*[1-9]\d*(x0*[1-9]\d*)?$")],
    Meta(description="a whole number of at least 1, or two of them, queries x keys", examples=[512, "512x1024"]),
]
Points = Annotated[
    dict[Block, Positive],
    Meta(min_length=1, description="a table of rates, with at least one", examples=["{512: 100}"]),
]
"""TFLOP/s by the tokens of a block."""


class Rates(Section, frozen=True, kw_only=True):
    """A table as a cluster file has it."""

    kernel: str | None = None
    figures: Literal["published", "measured", "assumed"]
    source: Any = None
    head_dim: Count
    dtypes: dict[str, Positive]
    heads: Count | None = None
    total_tokens: Count | None = None
    tile_tokens: Count | None = None
    forward_full: Points
    forward_causal: Points
    backward_full: Points
    backward_causal: Points

    def __post_init__(self) -> None:
        """Raises RequestError for a set of blocks that can't be interpolated."""
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
        """One of RATES by (queries, keys)."""
        found = {}
        for block, rate in getattr(self, name).items():
            q_tokens, _, kv_tokens = str(block).partition("x")
            found[int(q_tokens), int(kv_tokens or q_tokens)] = rate
        return found


@dataclass(frozen=True, kw_only=True)
class Waves:
    """The thread blocks that a device works on at once, and what each takes."""

    sms: int
    tile_tokens: int

    def fill(self, tokens: int, batch_heads: int) -> float:
        """The part of the waves' room that is used by so many queries (keys, backward) of each of batch x heads."""
        waves = math.ceil(batch_heads * math.ceil(tokens / self.tile_tokens) / self.sms)
        return batch_heads * tokens / self.tile_tokens / (self.sms * waves)


@dataclass(frozen=True, eq=False)
class Curve:
    """A rate by the tokens of a square block."""

    log_tokens: np.ndarray
    rates: np.ndarray

    def rate(self, phase: str, q_tokens: int, kv_tokens: int) -> float:
        """The rate at a block of that many queries and keys."""
        inner = kv_tokens if phase == "forward" else q_tokens
        return float(np.interp(math.log2(inner), self.log_tokens, self.rates))


@dataclass(frozen=True, eq=False)
class Surface:
    """A rate by the queries and keys of a block."""

    log_q: np.ndarray
    """(Q,)"""
    log_kv: np.ndarray
    """(K,)"""
    rates: np.ndarray
    """(Q, K)"""

    def rate(self, phase: str, q_tokens: int, kv_tokens: int) -> float:
        """The rate at a block of that many queries and keys."""
        by_q = [np.interp(math.log2(kv_tokens), self.log_kv, row) for row in self.rates]
        return float(np.interp(math.log2(q_tokens), self.log_q, by_q))


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """The rates of one kernel at one head_dim."""

    kernel: str
    figures: str
    """published, measured or assumed."""
    head_dim: int
    dtypes: Mapping[str, float]
    """The dtypes that the rates hold for, each with a factor on them."""
    smallest: int
    """The least tokens of a block that every rate is known for."""
    waves: Waves | None
    """None: rates don't depend on how many thread blocks there are."""
    rates: Mapping[str, Curve | Surface]
    """TFLOP/s in full waves, by phase and mask."""

    @classmethod
    def build(cls, name: str, rates: Rates, sms: int | None) -> Self:
        """The table of that name on a device with so many multiprocessors."""
        waves = Waves(sms=sms, tile_tokens=rates.tile_tokens) if sms and rates.tile_tokens else None
        points = {rate: rates.points(rate) for rate in RATES}
        if waves:
            points = {
                rate: _in_full_waves(rate, known, waves, rates.heads or 1, rates.total_tokens)
                for rate, known in points.items()
            }
        return cls(
            kernel=rates.kernel or name,
            figures=rates.figures,
            head_dim=rates.head_dim,
            dtypes=rates.dtypes,
            smallest=max(min(min(pair) for pair in known) for known in points.values()),
            waves=waves,
            rates={rate: _shape(known) for rate, known in points.items()},
        )

    def fits(self, problem: Problem) -> bool:
        """Whether the table has the problem's dtype and head_dim."""
        return problem.dtype in self.dtypes and problem.head_dim == self.head_dim

    def flops_per_s(
        self, phase: str, mask: str, q_tokens: int, kv_tokens: int, *, batch_heads: int, dtype: str
    ) -> float:
        """FLOP/s on a block of that many queries and keys; of a dtype that the table lacks, as if it had it."""
        rate = self.rates[f"{phase}_{mask}"].rate(phase, q_tokens, kv_tokens)
        if self.waves:
            rate *= self.waves.fill(_outer(phase, q_tokens, kv_tokens), batch_heads)
        return 1e12 * rate * self.dtypes.get(dtype, 1.0)


def _outer(phase: str, q_tokens: int, kv_tokens: int) -> int:
    """The tokens that thread blocks share out among them."""
    return q_tokens if phase == "forward" else kv_tokens


def _in_full_waves(
    name: str, points: Mapping[tuple[int, int], float], waves: Waves, heads: int, total_tokens: int | None
) -> dict[tuple[int, int], float]:
    """The rates that full waves would have reached."""
    found = {}
    for (q_tokens, kv_tokens), rate in points.items():
        batch = max(total_tokens // q_tokens, 1) if total_tokens else 1
        tokens = _outer(name.partition("_")[0], q_tokens, kv_tokens)
        found[q_tokens, kv_tokens] = rate / waves.fill(tokens, batch * heads)
    return found


def _shape(points: Mapping[tuple[int, int], float]) -> Curve | Surface:
    """A curve through squares, or a surface through every pair of some sizes."""
    if all(q == kv for q, kv in points):
        sizes = sorted(q for q, _ in points)
        return Curve(np.log2(sizes), np.array([points[size, size] for size in sizes]))
    q_sizes, kv_sizes = sorted({q for q, _ in points}), sorted({kv for _, kv in points})
    rates = np.array([[points[q, kv] for kv in kv_sizes] for q in q_sizes])
    return Surface(np.log2(q_sizes), np.log2(kv_sizes), rates)
