"""Which pairs of a block its regions compute, by the definition of their kinds."""

from __future__ import annotations

import numpy as np

from sp_bench.plan.regions import Region, RegionKind


def inside(region: Region) -> np.ndarray:
    """Which pairs of a region are computed, by the definition of its kind."""
    q, k = np.arange(len(region.q))[:, None], np.arange(len(region.kv))[None, :]
    return {RegionKind.FULL: q >= 0 * k, RegionKind.CAUSAL: k <= q, RegionKind.STRICT: k < q, RegionKind.UPPER: k >= q}[
        region.kind
    ]


def times_computed(regions: tuple[Region, ...], rows: int, columns: int) -> np.ndarray:
    """How often the regions compute each pair of a block."""
    times = np.zeros((rows, columns), int)
    for region in regions:
        times[region.q.start : region.q.stop, region.kv.start : region.kv.stop] += inside(region)
    return times
