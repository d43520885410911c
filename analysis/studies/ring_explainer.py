"""An explainer's numbers on Ring Attention: its arithmetic again, and what Ring Attention does in its example."""

from __future__ import annotations

from dataclasses import dataclass

from sp_bench import account
from sp_bench.analysis.number import Number, derived, formula, of_record
from sp_bench.analysis.paper_tables import claims, rows
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.ring_model import ring_plan, transfers_ms
from sp_bench.analysis.table import Column, Table
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.ops import Transfer
from sp_bench.plan.problem import Problem
from sp_bench.records import Record

FILE = "ring_explainer"
CLUSTER = "a100_hdr200"
"""The nodes whose links come nearest to the explainer's 200 GB/s."""
FITS_ONE = 2**18
"""Tokens that one GPU can hold, for what more of them save."""
RIGHT = 0.05
"""A number is right if it is within this share, since the explainer rounds."""
COUNTED = formula("ring-example-plan", "counted from Ring's forward plan for the example", "sp_bench/account.py")


@dataclass(frozen=True)
class Item:
    """One of the explainer's results."""

    name: str
    """Its row in the file."""
    again: Number
    """Its own arithmetic, or what its words come to, again; none for an estimate."""
    ring: Number
    """What Ring Attention does."""


def stated() -> dict[str, float]:
    """The explainer's numbers by name."""
    return {name: number.known for name, number in claims(FILE, "name").items()}


def again(name: str, what: str, value: float) -> Number:
    """The explainer's own arithmetic."""
    return Number(value, "computed", (formula(f"explainer-{name}", what, "the explainer's own terms"),))


def example() -> Problem:
    """One layer's attention: the width as heads of 128, without a mask, in two bytes."""
    said = stated()
    n, heads = int(said["gpus"]), int(said["width"]) // 128
    return Problem(
        n=n,
        seqlen=int(said["sequence"]),
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        mask=FULL,
        layout=LAYOUTS["contiguous"],
    )


def ask(runs: Runs, problem: Problem) -> tuple[Record, Record, Record]:
    """The example, simulated, and a sequence that one GPU can hold on one GPU and on all."""
    keys = {"method": "ring", "layout": "contiguous", "cluster": CLUSTER, "phase": "forward", "mode": "simulate"}
    keys |= {"causal": False, "heads": problem.heads}
    sizes = ((problem.n, problem.seqlen), (1, FITS_ONE), (problem.n, FITS_ONE))
    step, one, shared = runs.ask([point(gpus=n, seqlen=seqlen, **keys) for n, seqlen in sizes])
    return step, one, shared


def items(runs: Runs) -> list[Item]:
    """All of the explainer's results."""
    said, problem = stated(), example()
    return [*_memory(runs, said, problem), *_communication(runs, said, problem), *_overlap(said)]


def _memory(runs: Runs, said: dict[str, float], problem: Problem) -> list[Item]:
    step, one, shared = ask(runs, problem)
    tokens = again("tokens", "tokens over GPUs", said["sequence"] / said["gpus"])
    held = of_record(step, "peak_mem_bytes_max").times(1 / problem.chunk_bytes("q", wire=False))
    saved = of_record(one, "peak_mem_bytes_max").over(of_record(shared, "peak_mem_bytes_max"))
    return [
        Item("tokens_each", tokens, Number(problem.local_seqlen, "computed", (COUNTED,))),
        Item("held", again("held", "chunks of n/P tokens: Q, K, V", 1 + 2), held),
        Item("reduction", again("reduction", "n d over (n/P) d", said["gpus"]), saved),
    ]


def _communication(runs: Runs, said: dict[str, float], problem: Problem) -> list[Item]:
    step, *_ = ask(runs, problem)
    plan, rounds = ring_plan(problem, "forward"), said["gpus"]
    chunk = said["sequence"] / said["gpus"] * said["width"] * said["element"] / 1e9
    seconds = said["total_bytes"] / said["network"]
    sent = Number(account.volume(plan, problem).total_bytes / 1e9, "computed", (COUNTED,))
    transfers = Number(sum(isinstance(op, Transfer) for op in plan.ops), "computed", (COUNTED,))
    on_network = sent.times(1 / said["network"])
    computed = of_record(step, "compute_ms").times(1e-3)
    share = derived(lambda network, compute: 100 * network / compute, on_network, computed)
    all_rounds = 100 * seconds / (rounds * said["round_compute"])
    estimate = Number(None, "computed", (COUNTED,), "an estimate, with nothing to work it out from")
    return [
        Item("round_bytes", again("round", "tokens of each GPU x d x 2 bytes", chunk), sent.over(transfers)),
        Item("rounds", again("rounds", "one for each GPU", rounds), transfers),
        Item("total_bytes", again("total", "rounds x tokens of each GPU x d x 2 bytes", rounds * chunk), sent),
        Item("network_time", again("network", "8 GB over the network's rate", seconds), on_network),
        Item("round_compute", estimate, computed.times(1 / problem.n)),
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
    """Whether the explainer's number is the other one, as far as it rounds."""
    return abs(number.over(said).known - 1) <= RIGHT


def verdict(said: Number, number: Number) -> str:
    """In words, with the factor where it is off."""
    if number.value is None:
        return "an estimate"
    return "right" if is_right(said, number) else f"off: {number.over(said).text('.3g')} times as much"


def explainer(runs: Runs) -> Section:
    """Each of its results with the two verdicts."""
    said, about = claims(FILE, "name"), {row["name"]: row for row in rows(FILE)}
    found = items(runs)
    table = [
        [
            about[item.name]["claim"],
            about[item.name]["unit"],
            said[item.name],
            item.again,
            verdict(said[item.name], item.again),
            item.ring,
            verdict(said[item.name], item.ring),
            about[item.name]["where"],
        ]
        for item in found
    ]
    checked = [item for item in found if item.again.value is not None]
    sums = sum(is_right(said[item.name], item.again) for item in checked)
    facts = sum(is_right(said[item.name], item.ring) for item in found)
    by_name = {item.name: item for item in found}
    everything = [said[item.name] for item in found]
    exposed = _exposed(runs)
    stands = "Its point stands:" if exposed.known <= RIGHT else "Its point, hidden communication, doesn't stand:"
    columns = (
        *(Column("claim"), Column("unit"), Column("explainer", "", ".4g"), Column("its arithmetic again", "", ".4g")),
        *(Column("verdict on that"), Column("Ring Attention", "", ".4g"), Column("verdict on that"), Column("where")),
    )
    return Section(
        "An explainer's example of 1M tokens on 8 GPUs",
        [
            text(
                f"Its own arithmetic comes out, within {RIGHT:.0%}, in {{sums:.0f}} of {{checked:.0f}} results; what it"
                " says of Ring Attention in {facts:.0f} of {all:.0f}. Computed are the first and what a plan counts;"
                " the compute time and its share are simulated on cluster=" + CLUSTER + ". A KV chunk is a K and a V,"
                " of which the explainer's bytes have one; the last round needs no transfer. Together that makes"
                " {bytes:.3g} times its bytes. Its share of communication sets the transfers of all rounds against the"
                " compute of one. A transfer of 2 s is not hidden by a block of 1 s: such a ring computes {use:.0f}% of"
                " the time, not {said:.0f}%. Memory falls by less than the number of GPUs since a ring needs buffers"
                f" that one GPU doesn't. {stands} in this example {{exposed:.1%}} of the transfers' time is not"
                " hidden.",
                sums=derived(lambda *_: sums, *(item.again for item in checked)),
                checked=derived(lambda *_: len(checked), *(item.again for item in checked)),
                facts=derived(lambda *_: facts, *(item.ring for item in found)),
                all=derived(lambda *_: len(found), *everything),
                bytes=by_name["total_bytes"].ring.over(said["total_bytes"]),
                use=by_name["overlap_use"].again,
                said=said["overlap_use"],
                exposed=exposed,
            ),
            Table("ring-explainer", "The explainer's numbers, again", columns, table),
        ],
    )


def _exposed(runs: Runs) -> Number:
    """The share of the transfers' time that the simulated step shows."""
    step, *_ = ask(runs, example())
    return of_record(step, "exposed_comm_ms").over(transfers_ms(CLUSTER, example(), ("forward",)))
