"""Each method's assignment matrix beside its timeline, for one problem."""

from __future__ import annotations

from collections.abc import Callable

from sp_bench import draw
from sp_bench.analysis.assignments import matrix, panel, planned
from sp_bench.analysis.figure import Figure, labelled, new_figure
from sp_bench.analysis.frames import named
from sp_bench.analysis.number import record_source
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.timelines import TRANSFERS, draw_spans, spans_of
from sp_bench.cli.words import amount, number
from sp_bench.plan.ops import BLOCKS

ASKED = {"gpus": 16, "seqlen": "128k", "cluster": "h100_ndr400", "phase": "forward", "mode": "simulate", "trace": 1}
METHODS = ("ring", "striped", "zigzag", "all_gather", "ulysses", "usp", "tokenring", "startrail", "pass_q", "mesh")
WIDTH, HEIGHT = 9.0, 3.6


def figure_of(method: str) -> Callable[[Runs], Figure]:
    """A method's forward: the rank that computes each block, and when rank 0 computes and sends."""

    def drawn(runs: Runs) -> Figure:
        record = runs.one(method=method, **ASKED)
        path = runs.folder / f"{record.run_id}.json"
        plan, problem, _ = planned(record, "forward")
        canvas, axes = new_figure(2, width=WIDTH, height=HEIGHT, width_ratios=(1, 1.9))
        left, right = axes[0]
        panel(left, matrix(plan, problem, "rank"), draw.assignment(plan, problem))
        left.set_xlabel("KV chunk")
        left.set_ylabel("Q chunk")
        by_rank, marks = spans_of(record, path)
        rows = list(dict.fromkeys(span.row for span in by_rank[0]))
        legend = {BLOCKS: labelled("blocks and folds", "simulated"), TRANSFERS: labelled("transfers", "simulated")}
        draw_spans(right, by_rank[0], rows, marks, legend)
        right.set_xlabel("ms")
        source = record_source(record)
        return Figure(f"side_by_side-{method}", f"{named(record)}: assignment matrix and timeline", canvas, (source,))

    return drawn


ring, striped, zigzag, all_gather, ulysses, usp, tokenring, startrail, pass_q, mesh = map(figure_of, METHODS)


def table(runs: Runs) -> list[dict[str, str]]:
    """Time, bytes and memory of each method, the fastest first."""
    records = [runs.one(method=method, **ASKED) for method in METHODS]
    return [
        {
            "method": named(record),
            "layout": record.layout or "-",
            "forward, ms": number(record.step_ms_median, 4),
            "exposed, ms": number(record.exposed_comm_ms),
            "sent by each GPU": amount(record.comm_bytes_per_gpu),
            "to other nodes, by the busiest": amount(record.comm_bytes_across_nodes_max),
            "peak memory": amount(record.peak_mem_bytes_max),
        }
        for record in sorted(records, key=lambda record: record.step_ms_median or 0)
    ]
