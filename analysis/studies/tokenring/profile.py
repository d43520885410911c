"""Figure 6 of TokenRing: the times of steps on four A10. One of them sets our link rate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sp_bench.analysis.figure import Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, computed, formula, least, most, of_record, record_source, total
from sp_bench.analysis.paper_tables import of_paper, rows
from sp_bench.analysis.plans import step_ends_ms
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

TESTBED = {"cluster": "a10_pcie", "gpus": 4, "seqlen": 24000, "phase": "forward", "layout": "zigzag"}
"""The setup of figure 6; heads and head_dim are the defaults of conf/config.yaml."""


def figure6(runs: Runs) -> Section:
    """The times of steps on four A10 with PCIe, Ring against TokenRing."""
    ring, trimmed, whole = runs.ask(
        [
            point(method="ring", **TESTBED),
            point(method="tokenring", **TESTBED),
            point(method="tokenring", trim=False, **TESTBED),
        ]
    )
    paper = _paper_steps()
    ours = {"ring": _steps(ring), "tokenring": _steps(trimmed), "tokenring, whole Q": _steps(whole)}
    lines: list[list[Cell]] = []
    for name, steps in ours.items():
        method = name.partition(",")[0]
        for step, number in enumerate(steps):
            printed = paper[method].get(step)
            fitted = "link rate set from it" if method == "ring" else "no"
            lines.append([name, step, printed or "not given", number])
            lines[-1] += [number.over(printed) if printed else "-", fitted if printed else "-"]
    held_out = [ours["tokenring"][step].over(paper["tokenring"][step]) for step in paper["tokenring"]]
    heads = columns("method; step; paper | ms | .3g; ours | ms | .3g; ours / paper || .2f; used for the cluster file")
    return Section(
        "Figure 6: steps on 4 x A10, PCIe, 24,000 tokens",
        _about_fit(ring, paper["ring"][0]),
        Table("tokenring-figure6", "Times of steps, forward, causal, zigzag", heads, lines),
        _steps_figure(paper, ours),
        _about_held_out(held_out),
        _about_mask(trimmed, paper["tokenring"]),
        _about_rest(ring, trimmed, paper["tokenring"]),
    )


def _paper_steps() -> dict[str, dict[int, Number]]:
    """The printed milliseconds by method and step. Ring's one number stands for its three steps with transfers."""
    found: dict[str, dict[int, Number]] = {"ring": {}, "tokenring": {}}
    for row in rows("token_ring_figure6"):
        method = row["method"].replace("_", "")
        steps = range(int(row["gpus"]) - 1) if row["step"] == "every step" else (int(row["step"]),)
        number = of_paper(float(row["time_ms"]), "token_ring_figure6", f"{row['method']}, {row['step']}")
        found[method] |= dict.fromkeys(steps, number)
    return found


def _steps(record: Record) -> list[Number]:
    """The milliseconds of each step: from the end of the step before to its own end, both on all ranks."""
    ends = step_ends_ms(record)
    return [Number(end - start, "simulated", (record_source(record),)) for start, end in pairwise((0.0, *ends))]


def _about_fit(ring: Record, printed: Number) -> Text:
    cluster = (ring.config or {})["cluster"]
    rate = formula("tokenring-hop", "a chunk of K and of V / intra.uplink_bytes_per_s", "conf/cluster/a10_pcie.yaml")
    kv = 4.0 * ring.seqlen / ring.gpus * ring.heads * ring.head_dim
    return text(
        "Our times are simulated on cluster=a10_pcie; there is no A10 here. The uplink rate of this cluster depends on"
        ' the figure: its source is "{source}". At that rate K and V of a chunk take {hop:.3g} ms, and the paper prints'
        " {printed}. Ring's steps are therefore fitted and test nothing. TokenRing's three steps are predictions,"
        " except for the kernel rates. These are scaled from another GPU, and the cluster file says that they were"
        " compared with TokenRing's first step. A step ends when the last rank has computed and sent all of it, like"
        " the synchronize() of algorithm 1.",
        source=cluster["sources"]["uplink_bytes_per_s"],
        hop=computed(kv / cluster["intra"]["uplink_bytes_per_s"] * 1e3, rate),
        printed=printed,
    )


def _about_held_out(ratios: Sequence[Number]) -> Text:
    low, high = least(ratios), most(ratios)
    return text(
        "TokenRing's steps were not fitted. Ours are {word} the paper's, {low:.2f} to {high:.2f} times as long. The"
        " first two are blocks alone in our model, so their error is that of the assumed kernel rate. In the third, the"
        " first partial output travels at the same time as Q.",
        word="slower than" if low.known > 1 else "faster than" if high.known < 1 else "around",
        low=low,
        high=high,
    )


def _about_mask(record: Record, printed: dict[int, Number]) -> Text:
    tokens, peak = record.seqlen / record.gpus, (record.config or {})["cluster"]["device"]["peak_tflops"]["bfloat16"]
    flops = 4 * tokens**2 * record.heads * record.head_dim
    full = formula("tokenring-full-block", "4 (N/n)^2 H D / the A10's dense peak", "sp_bench.account.model_flops")
    rate = formula("tokenring-rate", "4 (N/n)^2 H D / 2 / the time of step 0", "sp_bench.account.model_flops")
    shortest = computed(flops / peak / 1e9, full)
    return text(
        "The text of figure 6 doesn't say whether attention was causal. A full block would take at least {shortest:.3g}"
        " ms at the A10's peak and a step took {printed}: it {verdict}. The kernel of a step then runs at"
        " {rate:.3g} TFLOP/s at least.",
        shortest=shortest,
        printed=printed[0],
        verdict="was causal" if shortest.known > printed[0].known else "may have been full",
        rate=computed(flops / 2 / printed[0].known / 1e9, rate, *printed[0].sources),
    )


def _about_rest(ring: Record, token: Record, printed: dict[int, Number]) -> Text:
    whole, ring_whole = of_record(token, "forward_ms_median"), of_record(ring, "forward_ms_median")
    share = whole.over(ring_whole)
    modest = "is not one of the whole pass. The paper itself calls the benefit on 4 GPUs modest"
    return text(
        "Figure 6 leaves out the last block and the partial outputs that go home after it. They take {rest:.3g} ms more"
        " in our model. TokenRing's whole forward pass then takes {whole:.3g} ms, {share:.2f} of Ring's {ring:.3g}: the"
        " gain of the figure's steps {verdict}. The paper doesn't print the times of these last steps.",
        rest=total(_steps(token)[len(printed) :]),
        whole=whole,
        share=share,
        ring=ring_whole,
        verdict=modest if share.known > 0.95 else "is one of the whole pass too",
    )


def _steps_figure(paper: dict[str, dict[int, Number]], ours: dict[str, list[Number]]) -> Figure:
    canvas, axes = new_figure(height=3.0)
    axis, colour = axes[0, 0], colours(["ring", "tokenring"])
    shown = [("ring", "paper"), ("ring", "simulated"), ("tokenring", "paper"), ("tokenring", "simulated")]
    used: list[Number] = []
    for place, (method, kind) in enumerate(shown):
        numbers = dict(enumerate(ours[method])) if kind == "simulated" else paper[method]
        used += numbers.values()
        axis.bar(
            [step + (place - 1.5) * 0.2 for step in numbers],
            [number.known for number in numbers.values()],
            width=0.2,
            color=colour[method],
            edgecolor="black",
            hatch="//" if kind == "paper" else None,
            alpha=0.55 if kind == "paper" else 1.0,
            label=labelled(method, kind),
        )
    axis.set(xlabel="step", ylabel="time, ms", xticks=range(max(map(len, ours.values()))))
    axis.grid(visible=False, axis="x")
    axis.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 1.22))
    return Figure(
        "tokenring-figure6-steps",
        "Times of steps on 4 x A10, 24,000 tokens",
        canvas,
        sources(used),
        "The paper gives no time for a step without a hatched bar. Ring's first three set the link rate.",
    )
