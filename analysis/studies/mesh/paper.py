"""Tables 3 to 5 of the Mesh-Attention paper by cell, and the cluster that was fitted to them (studies/mesh_paper).

The paper names no hardware. 30 of the 48 cells of table 3 are fitted: all of Ring, and Mesh on 32 GPUs. The other 18
Mesh cells are held out: they choose neither a parameter nor a set of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import yaml

from sp_bench.analysis.paper_tables import rows
from sp_bench.cluster import Cluster
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.problem import Problem
from sp_bench.resources import CONF

CLUSTER = CONF / "cluster" / "mesh_paper.yaml"
HEADS, HEAD_DIM = 32, 128
"""The shape of section 4.1. The batch and the dtype are not named and assumed to be 1 and bf16."""
TOKENS = {"256k": 2**18, "512k": 2**19, "1M": 2**20}
NAMES = {tokens: name for name, tokens in TOKENS.items()}
FITTED_MESH_GPUS = 32


@dataclass(frozen=True)
class Cell:
    """One cell of the paper's tables."""

    causal: bool
    seqlen: int
    gpus: int
    method: str

    @property
    def fitted(self) -> bool:
        """Whether parameters are fitted to the cell; else it is held out."""
        return self.method == "ring" or self.gpus == FITTED_MESH_GPUS

    @property
    def mask(self) -> Mask:
        """The mask of the cell."""
        return CAUSAL if self.causal else FULL

    @property
    def problem(self) -> Problem:
        """The attention of the cell, with a striped layout if causal (section 3.7), else contiguous."""
        return Problem(
            n=self.gpus, seqlen=self.seqlen, mask=self.mask, layout=self.mask.layout("auto"),
            heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM,
        )  # fmt: skip

    @property
    def flops_per_gpu(self) -> float:
        """The FLOPs that MFU counts: 3.5 times the forward's 4 * seqlen^2 * hidden size, half of it if causal."""
        return 3.5 * 4 * self.seqlen**2 * HEADS * HEAD_DIM / self.gpus / (2 if self.causal else 1)


def table(number: int, name: str) -> dict[Cell, tuple[float, ...]]:
    """The values of mesh_table<number>_<name>.csv by cell, in the order of the file."""
    return {
        Cell(causal == "true", TOKENS[seqlen], int(gpus), method): tuple(map(float, values))
        for causal, seqlen, gpus, method, *values in (row.values() for row in rows(f"mesh_table{number}_{name}"))
    }


def paper_s() -> dict[Cell, float]:
    """Table 3 in seconds of an iteration."""
    return {cell: 100 / value for cell, (value,) in table(3, "throughput").items()}


def implied_peak_tflops(cells: Iterable[Cell]) -> float:
    """The peak in TFLOP/s that tables 3 and 4 imply together, the median of the cells."""
    seconds, mfu = paper_s(), {cell: value for cell, (value,) in table(4, "mfu").items()}
    return float(np.median([c.flops_per_gpu / seconds[c] / (mfu[c] / 100) / 1e12 for c in cells]))


@cache
def fitted() -> tuple[Cell, ...]:
    """The cells that parameters are fitted to."""
    return tuple(cell for cell in paper_s() if cell.fitted)


@cache
def held_out() -> tuple[Cell, ...]:
    """The cells that are not fitted."""
    return tuple(cell for cell in paper_s() if not cell.fitted)


def errors(ratios: Iterable[float]) -> tuple[float, float]:
    """The median and the maximum of |ratio - 1|."""
    off = np.abs(np.array(list(ratios)) - 1)
    return float(np.median(off)), float(off.max())


def load_cluster() -> Cluster:
    """The fitted cluster, from its file."""
    return Cluster.build(yaml.safe_load(CLUSTER.read_text()))
