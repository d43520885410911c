"""The numbers of an explainer of Ring Attention: its own arithmetic checked, and what our plan and simulation give."""

from __future__ import annotations

from typing import NamedTuple

from sp_bench import account
from sp_bench.analysis.number import Number, computed, count, formula, of_record, tally
from sp_bench.analysis.paper_tables import claims, rows
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.ring.model import ring_plan, transfers_ms
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Q
from sp_bench.records import Record

FILE = "ring_explainer"
CLUSTER = "a100_hdr200"
"""The nodes whose links come nearest to the explainer's 200 GB/s."""
FITS_ONE = 2**18
"""A sequence, in tokens, that one GPU can hold. It shows how much memory more GPUs save."""
RIGHT = 0.05
"""A number counts as right within this share, because the explainer rounds."""
COUNTED = source("ring.example-plan")


class Item(NamedTuple):
    """A result of the explainer, computed again in two ways."""

    name: str
    """Its row in ring_explainer.csv."""
    again: Number
    """The explainer's own arithmetic, done again. No value for an estimate."""
    ring: Number
    """The value for Ring Attention, from our plan or simulation."""


def stated() -> dict[str, float]:
    """The explainer's numbers, by row name."""
    return {name: number.known for name, number in claims(FILE, "name").items()}


def again(name: str, what: str, value: float) -> Number:
    """A value of the explainer's own arithmetic; `what` is the calculation in words."""
    return computed(value, formula(f"explainer-{name}", what, "the explainer's own terms"))


def example() -> Problem:
    """The attention of one layer: the explainer's width as heads of 128, no mask, two bytes for each element."""
    said = stated()
    heads = int(said["width"]) // 128
    return Problem(
        n=int(said["gpus"]), seqlen=int(said["sequence"]), mask=FULL, layout=LAYOUTS["contiguous"],
        heads=heads, kv_heads=heads, head_dim=128,
    )  # fmt: skip


def ask(runs: Runs, problem: Problem) -> tuple[Record, Record, Record]:
    """Records of the example, and of a sequence of FITS_ONE tokens on one GPU and on all."""
    keys = {"method": "ring", "layout": "contiguous", "cluster": CLUSTER, "phase": "forward", "mode": "simulate"}
    keys |= {"causal": False, "heads": problem.heads}
    sizes = ((problem.n, problem.seqlen), (1, FITS_ONE), (problem.n, FITS_ONE))
    step, one, shared = runs.ask([point(gpus=n, seqlen=seqlen, **keys) for n, seqlen in sizes])
    return step, one, shared


def items(runs: Runs) -> list[Item]:
    """All results of the explainer."""
    said, problem = stated(), example()
    return [*_memory(runs, said, problem), *_communication(runs, said, problem), *_overlap(said)]


def _memory(runs: Runs, said: dict[str, float], problem: Problem) -> list[Item]:
    step, one, shared = ask(runs, problem)
    tokens = again("tokens", "tokens over GPUs", said["sequence"] / said["gpus"])
    held = of_record(step, "peak_mem_bytes_max").times(1 / problem.chunk_bytes(Q, wire=False))
    saved = of_record(one, "peak_mem_bytes_max").over(of_record(shared, "peak_mem_bytes_max"))
    return [
        Item("tokens_each", tokens, computed(problem.queries.most, COUNTED)),
        Item("held", again("held", "chunks of n/P tokens: Q, K, V", 1 + 2), held),
        Item("reduction", again("reduction", "n d over (n/P) d", said["gpus"]), saved),
    ]


def _communication(runs: Runs, said: dict[str, float], problem: Problem) -> list[Item]:
    step, *_ = ask(runs, problem)
    plan, rounds = ring_plan(problem, "forward"), said["gpus"]
    chunk = said["sequence"] / said["gpus"] * said["width"] * said["element"] / 1e9
    seconds = said["total_bytes"] / said["network"]
    sent = computed(account.volume(plan, problem).total_bytes / 1e9, COUNTED)
    transfers = computed(len(plan.transfers), COUNTED)
    on_network = sent.times(1 / said["network"])
    compute = of_record(step, "compute_ms").times(1e-3)
    share = on_network.over(compute).times(100)
    all_rounds = 100 * seconds / (rounds * said["round_compute"])
    estimate = Number(None, "computed", (COUNTED,), "an estimate, which nothing allows to compute again")
    return [
        Item("round_bytes", again("round", "tokens of each GPU x d x 2 bytes", chunk), sent.over(transfers)),
        Item("rounds", again("rounds", "one for each GPU", rounds), transfers),
        Item("total_bytes", again("total", "rounds x tokens of each GPU x d x 2 bytes", rounds * chunk), sent),
        Item("network_time", again("network", "8 GB over the network's rate", seconds), on_network),
        Item("round_compute", estimate, compute.times(1 / problem.n)),
        Item("share", again("share", "0.04 s in all rounds, over all rounds of 1 s each", all_rounds), share),
    ]


def _overlap(said: dict[str, float]) -> list[Item]:
    n, compute, transfer = said["gpus"], said["serial_compute"], said["serial_transfer"]
    apart = again("apart", "1 s over 1 s + 2 s", 100 * compute / (compute + transfer))
    busy = 100 * n * compute / (compute + (n - 1) * max(compute, transfer))
    what = "8 blocks of 1 s; 7 transfers of 2 s, each beside a block, and a block after the last"
    together = again("together", what, busy)
    return [Item("serial_use", apart, apart), Item("overlap_use", together, together)]


def is_right(said: Number, number: Number) -> bool:
    """Whether the explainer's number agrees with `number` within RIGHT."""
    return abs(number.over(said).known - 1) <= RIGHT


def verdict(said: Number, number: Number) -> str:
    """The agreement in words: right, an estimate, or `number` as a multiple of the explainer's number."""
    if number.value is None:
        return "an estimate"
    return "right" if is_right(said, number) else f"{number.over(said).text('.3g')}x of the explainer's"


def explainer(runs: Runs) -> Section:
    """Each result of the explainer beside its arithmetic, done again, and beside Ring Attention."""
    said, about = claims(FILE, "name"), {row["name"]: row for row in rows(FILE)}
    by_name, table = {item.name: item for item in items(runs)}, []
    for name, item in by_name.items():
        row, stated = about[name], said[name]
        sums = [stated, item.again, verdict(stated, item.again), item.ring, verdict(stated, item.ring)]
        table.append([row["claim"], row["unit"], *sums, row["where"]])
    checked = {name: item.again for name, item in by_name.items() if item.again.value is not None}
    rings, exposed = {name: item.ring for name, item in by_name.items()}, _exposed(runs)
    right, facts = (
        tally(sum(is_right(said[name], number) for name, number in numbers.items()), numbers.values())
        for numbers in (checked, rings)
    )
    values = {"right": RIGHT, "sums": right, "checked": count(checked.values()), "facts": facts}
    values |= {"all": count(said[name] for name in by_name), "cluster": CLUSTER}
    values |= {"bytes": rings["total_bytes"].over(said["total_bytes"]), "use": checked["overlap_use"]}
    values |= {"said": said["overlap_use"], "stands": "stands" if exposed.known <= RIGHT else "does not stand"}
    values |= {"exposed": exposed, "rows": table}
    return section("ring.explainer", **values)


def _exposed(runs: Runs) -> Number:
    """The share of the transfers' time that the simulated step exposes."""
    step, *_ = ask(runs, example())
    return of_record(step, "exposed_comm_ms").over(transfers_ms(CLUSTER, example(), ("forward",)))
