"""The cost of causal attention with Ring and with Striped Attention by formula, and the speedup of a whole model.

The formulas are from Brandon et al. 2023, "Striped Attention". Work is in (query, key) pairs, FLOPs are those of one
layer and token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from sp_bench.analysis.paper_tables import claims, rows
from sp_bench.analysis.section import source

PAPER = "Brandon et al. 2023"
TMS = source("striped.tms")
TILED = source("striped.tiled")
LIMIT = source("striped.limit")
WORK = source("striped.work")
TILE_SHARE = source("striped.tile-share")


@dataclass(frozen=True)
class Model:
    """A model of the paper's table 1."""

    name: str
    width: int
    """d: heads x head_dim."""
    ff: int
    heads: int

    @property
    def rest_flops(self) -> float:
        """FLOPs of the forward pass beside attention: four projections, and a gated feed-forward of three matrices."""
        return 2.0 * (4 * self.width**2 + 3 * self.width * self.ff)

    def attention_flops(self, seqlen: int) -> float:
        """FLOPs of the forward pass of attention without a mask: QK^T and PV."""
        return 4.0 * seqlen * self.width


@cache
def models() -> dict[str, Model]:
    """The models of table 1, by name."""
    table = rows("striped_table1_models")
    return {r["model"]: Model(r["model"], int(r["d_model"]), int(r["d_ff"]), int(r["heads"])) for r in table}


@dataclass(frozen=True)
class Passes:
    """The number of times that a training step computes the FLOPs of a forward pass, for attention and for the rest."""

    attention: float
    rest: float
    why: str


RECOMPUTED = Passes(5, 4, "each layer again before its backward, and in it attention once more, block by block")
ASSUMPTIONS = (
    Passes(3, 3, "nothing is computed again"),
    Passes(4, 4, "each layer again before its backward"),
    Passes(4, 3, "attention again within its backward"),
    Passes(3.5, 3, "QK^T again within attention's backward (FlashAttention)"),
    Passes(4.5, 4, "each layer again, and QK^T once more"),
    RECOMPUTED,
)
"""Passes that a step may need: 1 for the forward, 2 for the backward, and what is computed again."""


@dataclass(frozen=True)
class Cell:
    """A row of the paper's tables 3 to 5 and appendix A."""

    device: str
    model: str
    tensor_parallel: int
    n: int
    """Devices that share the sequence."""
    seqlen: int
    paper_tms: float
    paper_measured: float

    @property
    def mesh(self) -> str:
        """The device mesh as the paper writes it: model x sequence."""
        return f"{self.tensor_parallel}x{self.n}"

    @property
    def block(self) -> int:
        """The tokens of a device: c."""
        return self.seqlen // self.n


@cache
def cells() -> tuple[Cell, ...]:
    """All rows of the paper's tables 3 to 5 and appendix A."""
    all_cells = []
    for row in rows("striped_full_results"):
        tensor_parallel, n = map(int, row["mesh_model_x_sequence"].split("x"))
        speedups = float(row["theoretical_maximum_speedup"]), float(row["measured_speedup"])
        all_cells.append(Cell(row["device"], row["model"], tensor_parallel, n, int(row["seqlen"]), *speedups))
    return tuple(all_cells)


DEVICES = {"a100": "A100", "tpuv4": "TPUv4"}


@cache
def flops_cost(device: str) -> float:
    """The cost of a FLOP of attention over the cost of another FLOP (section 5)."""
    return claims("striped_claims")[f"attention FLOPs over other FLOPs {DEVICES[device]}"].known


def maximum_speedup(cell: Cell, passes: Passes = RECOMPUTED, masked_share: float = 0.5) -> float:
    """The paper's theoretical maximum speedup (section 5).

    A masked block costs `masked_share` of a full one: half at best. Ring's slowest device has one of them and n - 1
    full blocks, each of Striped's has n.
    """
    model = models()[cell.model]
    attention = passes.attention * flops_cost(cell.device) * model.attention_flops(cell.seqlen)
    rest = passes.rest * model.rest_flops
    ring, striped = (cell.n - 1 + masked_share) / cell.n, masked_share
    return (rest + attention * ring) / (rest + attention * striped)


def tiles_computed(block: int, tile_queries: int, tile_keys: int) -> float:
    """The share of a causal block's tiles that hold an unmasked element (section 2.2.1). Sizes are in tokens."""
    tile_rows, columns = math.ceil(block / tile_queries), math.ceil(block / tile_keys)
    kept = sum(math.ceil(min((r + 1) * tile_queries, block) / tile_keys) for r in range(tile_rows))
    return kept / (tile_rows * columns)


def tile(device: str) -> tuple[int, int]:
    """Queries and keys of the paper's tiles (section 4.1)."""
    stated, name = claims("striped_claims"), DEVICES[device]
    return int(stated[f"tile queries {name}"].known), int(stated[f"tile keys {name}"].known)


def tiled_speedup(cell: Cell) -> float:
    """The maximum speedup if only whole tiles are left out, as in the paper's implementation."""
    return maximum_speedup(cell, masked_share=tiles_computed(cell.block, *tile(cell.device)))


def attention_limit(n: int) -> float:
    """Ring's time over Striped's for attention alone, with a device for each of n ranks."""
    return 2 - 1 / n


def shared_limit(n: int, cores: int, masked_share: float = 0.5) -> float:
    """`attention_limit` for ranks that share cores: a step takes as long as its busiest rank, or all work on all cores.

    Of n^2 blocks Ring computes n masked and n (n - 1) / 2 full ones, Striped n^2 masked ones.
    """
    cores = min(n, cores)
    ring = max(n - 1 + masked_share, (n * (n - 1) / 2 + n * masked_share) / cores)
    striped = max(n * masked_share, n * n * masked_share / cores)
    return ring / striped
