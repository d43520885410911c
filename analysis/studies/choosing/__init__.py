"""The choice of a method and a tile: a study of ours, with all methods of the papers on the same clusters.

All times are simulated. Volumes, bounds on them and memory are computed from the plans.
"""

from __future__ import annotations

from sp_bench.analysis.number import of_record, step_ms
from sp_bench.analysis.pictures import bound_bars
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.choosing.ladders import limits
from sp_bench.analysis.studies.choosing.places import METHODS, grid
from sp_bench.analysis.studies.choosing.shapes import memory, orders, tiles, volume
from sp_bench.analysis.studies.choosing.winners import maps, maps_whole_heads, points

BOUND_AT = cluster, kv_heads, seqlen, gpus = ("h100_ndr400", 32, "512k", 64)


def bounds(runs: Runs) -> Section:
    """The step of each method beside its bound, the least time that its own plan takes on the cluster."""
    records_at = grid(runs)
    records = [record for method in METHODS if (record := records_at[BOUND_AT, method]).status == "ok"]
    shares = {record.method: of_record(record, "bound_ms").over(step_ms(record)) for record in records}
    low = min(shares, key=lambda method: shares[method].known)
    bars = bound_bars(records, "choosing-bounds", f"Steps and their bounds, {seqlen} tokens on {gpus} GPUs, {cluster}")
    return section("choosing.bounds", bars=bars, method=low, share=shares[low])
