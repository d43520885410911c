"""Which method and tile to choose: a study of ours, with all methods of the papers on the same clusters.

All times are simulated. Volumes, bounds on them and memory are computed from the plans.
"""

from __future__ import annotations

from sp_bench.analysis.number import of_record
from sp_bench.analysis.pictures import bound_bars
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.choosing.ladders import limits
from sp_bench.analysis.studies.choosing.places import METHODS, grid
from sp_bench.analysis.studies.choosing.schedules import orders
from sp_bench.analysis.studies.choosing.shapes import memory, tiles, volume
from sp_bench.analysis.studies.choosing.winners import maps, maps_whole_heads, points

BOUND_AT = ("h100_ndr400", 32, "512k", 64)


def bounds(runs: Runs) -> Section:
    """How near each method's step is to its bound, the least time that its own plan takes on the cluster."""
    found = grid(runs)
    records = [record for method in METHODS if (record := found[BOUND_AT, method]).status == "ok"]
    shares = {r.method: of_record(r, "bound_ms").over(of_record(r, "step_ms_median")) for r in records}
    low = min(shares, key=lambda method: shares[method].known)
    cluster, _, seqlen, gpus = BOUND_AT
    title = f"Steps and their bounds, {seqlen} tokens on {gpus} GPUs, {cluster}"
    return Section(
        "How near to their bounds",
        text(
            "A method's bound is the least time that its own plan takes: that of the busiest rank's blocks, of the"
            " busiest link at its full rate, or of a lane's latencies. Bound and step are both simulated. The rest of"
            " the step is waiting, which a better schedule of the same transfers might hide."
        ),
        bound_bars(records, "choosing-bounds", title),
        text("{method} is farthest from its bound, which is {share:.0%} of its step.", method=low, share=shares[low]),
    )
