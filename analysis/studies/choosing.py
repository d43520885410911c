"""Which method and tile to choose: a study of ours, over all methods of the papers on the same clusters.

All times are simulated. Volumes, bounds on them and memory are computed from the plans.
"""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.number import derived, of_record
from sp_bench.analysis.pictures import bound_bars
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.choosing_grid import METHODS, grid
from sp_bench.analysis.studies.choosing_limits import limits
from sp_bench.analysis.studies.choosing_maps import maps, maps_whole_heads, points
from sp_bench.analysis.studies.choosing_tiles import memory, tiles, volume

BOUND_AT = ("h100_ndr400", 32, "512k", 64)

__all__ = ["bounds", "limits", "maps", "maps_whole_heads", "memory", "points", "sections", "tiles", "volume"]


def sections(runs: Runs) -> Iterator[Section]:
    """What to choose, why, and where it stops."""
    yield points(runs)
    yield maps(runs)
    yield maps_whole_heads(runs)
    yield tiles(runs)
    yield volume(runs)
    yield memory(runs)
    yield bounds(runs)
    yield limits(runs)


def bounds(runs: Runs) -> Section:
    """How near each method is to the least that its own plan takes on that cluster."""
    found = grid(runs)
    records = [record for method in METHODS if (record := found[BOUND_AT, method]).status == "ok"]
    shares = [of_record(record, "bound_ms").over(of_record(record, "step_ms_median")) for record in records]
    low = derived(lambda *values: min(values), *shares)
    far = records[[share.value for share in shares].index(low.value)].method
    cluster, _, seqlen, gpus = BOUND_AT
    figure = bound_bars(
        records, "choosing-bounds", f"Steps and their bounds, {seqlen} tokens on {gpus} GPUs, {cluster}"
    )
    return Section(
        "How near to their bounds",
        [
            text(
                "A method's bound is what its own plan takes at least: the busiest rank's blocks, the busiest link at"
                " its full rate, or a lane's latencies. Bound and step are both of the model. What is above it is"
                " waiting that a better schedule of the same transfers might hide."
            ),
            figure,
            text(f"Furthest from its bound is {far}: the bound is {{low:.0%}} of its step.", low=low),
        ],
    )
