"""Training steps that others have published, beside simulated ones. Nothing is fitted to them."""

from __future__ import annotations

from collections.abc import Mapping

from sp_bench import markdown
from sp_bench.analysis.number import Number, computed, derived, ends, formula, gigabytes, median, of_record, step_ms
from sp_bench.analysis.paper_tables import of_paper, rows
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.striped.simulated import training
from sp_bench.analysis.studies.tokenring.transformer import dit
from sp_bench.analysis.table import Cell
from sp_bench.records import Record
from sp_bench.workload.model import Model

Row = Mapping[str, str]
FILE = "training_tables"
MAXTEXT, PRIME = "AI-Hypercomputer/maxtext pull request 4687", "PrimeIntellect-ai/prime-rl pull request 2418"
UPIPE = "arXiv 2602.21196, as wizwand.com lists it"
MAXTEXT_FLOPS = formula(
    "maxtext-flops",
    "6 N + 6 L S d FLOPs a token: N parameters of matrices, the causal attention's forward three times",
    "inferred from maxtext's steps of llama2-7b, whose seconds and TFLOP/s a chip are both given",
)
GLM = {"heads": 96, "kv_heads": 8, "head_dim": 128}
GLM_LAYERS, GLM_ACTIVE, GLM_TOKENS = 46, 12e9, 65536
GLM_FLOPS = formula(
    "glm-flops",
    "6 x 12e9 + 6 L S H D FLOPs a token: 12e9 active parameters, the causal attention's forward three times, L = 46,"
    " H = 96, D = 128, S = 65536",
    "the configuration of zai-org/GLM-4.5-Air",
)
GLM_FLOPS_A_TOKEN = 6 * GLM_ACTIVE + 6.0 * GLM_LAYERS * GLM_TOKENS * GLM["heads"] * GLM["head_dim"]
TOO_LONG = ("striped-training",)
"""Tables that the page leaves out."""
ATTENTIONS = ("ulysses", "ring", "all_gather")
"""prime-rl's Ulysses, and the two that its ring may be."""


def published(row: Row) -> Number:
    """The published value of a row."""
    return of_paper(float(row["value"]), FILE, f"{row['source']}, {row['method']} on {row['ranks']}, {row['quantity']}")


def rows_of(source: str) -> list[Row]:
    """The rows of a source."""
    return [row for row in rows(FILE) if row["source"] == source]


def percent_off(simulated: Number, theirs: Number) -> Number:
    """simulated / published - 1, in percent."""
    return derived(lambda a, b: 100 * (a / b - 1), simulated, theirs)


def maxtext_step(row: Row) -> Point:
    """The simulated step of one group of chips that share a sequence, with its part of the step's sequences."""
    ranks = int(row["ranks"])
    batch = int(row["sequences"]) * ranks // int(row["gpus"])
    shared = {"cluster": "tpuv5p", "mode": "simulate", "model": row["model"], "train__parameters": "sharded"}
    return point(method=row["method"], gpus=ranks, batch=batch, seqlen=int(row["seqlen"]), **shared)


def maxtext_flops(record: Record) -> float:
    """FLOPs of a token of a record's model as maxtext counts them."""
    config = record.config or {}
    model = Model(**config["model"])
    width = record.heads * record.head_dim
    layer = 2 * model.width * (width + record.kv_heads * record.head_dim) + 3 * model.width * model.ffn
    matrices = model.layers * layer + (model.vocab or 0) * model.width
    return 6.0 * matrices + 6.0 * model.layers * record.seqlen * width


def maxtext_seconds(row: Row, record: Record) -> Number:
    """The published step: as printed, or from the printed TFLOP/s a chip."""
    value = published(row)
    if row["quantity"] == "step":
        return value
    tokens = int(row["sequences"]) * int(row["seqlen"])
    return computed(maxtext_flops(record) * tokens / int(row["gpus"]) / 1e12, MAXTEXT_FLOPS).over(value)


def maxtext(runs: Runs) -> Section:
    """Steps on TPU v5p with context parallelism."""
    rows_of_table, over = rows_of(MAXTEXT), []
    table: list[list[Cell]] = []
    for row, record in zip(rows_of_table, runs.ask(map(maxtext_step, rows_of_table)), strict=True):
        theirs, ours = maxtext_seconds(row, record), step_ms(record).times(1e-3)
        over.append(ours.over(theirs))
        about = [row["model"], int(row["ranks"]), int(row["seqlen"]), row["method"]]
        table.append([*about, theirs, ours, percent_off(ours, theirs)])
    return section("training_tables.maxtext", source=MAXTEXT, **ends(over), median=median(over), rows=table)


def attention(row: Row, method: str) -> Point:
    """The attention of GLM-4.5-Air on H200 by one method."""
    shape = {"gpus": int(row["ranks"]), "seqlen": int(row["seqlen"]), "mode": "simulate", "cluster": "h200_ndr400"}
    return point(method=method, **shape, **GLM)


def prime_rl(runs: Runs) -> Section:
    """Ulysses against ring on 8 H200, and why the steps can't be those of the whole model."""
    by_setting = {(int(row["ranks"]), row["method"]): row for row in rows_of(PRIME)}
    one = by_setting[1, "none"]
    flops = computed(GLM_FLOPS_A_TOKEN * float(one["value"]) / int(one["gpus"]) / 1e12, GLM_FLOPS)
    table: list[list[Cell]] = []
    for ranks in (2, 4):
        ulysses, ring = (published(by_setting[ranks, method]) for method in ("ulysses", "ring"))
        row = by_setting[ranks, "ring"]
        first, *others = map(step_ms, runs.ask(attention(row, method) for method in ATTENTIONS))
        theirs, ours = ulysses.over(ring), [other.over(first) for other in others]
        table.append([ranks, ulysses, ring, theirs, *(x for o in ours for x in (o, percent_off(o, theirs)))])
    return section("training_tables.prime_rl", source=PRIME, rate=published(one), flops=flops, rows=table)


def upipe_step(row: Row) -> Point:
    """The simulated step of UPipe's setting: layers recomputed from inputs on the host, parameters split."""
    shared = {"cluster": "h100_ndr400", "mode": "simulate", "model": row["model"], "train__parameters": "sharded"}
    shared |= {
        "train__recompute": "full",
        "train__offload": True,
        "gpus": int(row["gpus"]),
        "seqlen": int(row["seqlen"]),
    }
    return point(method=row["method"], **shared)


def upipe(runs: Runs) -> Section:
    """The one cell of UPipe's table 3 that could be had."""
    rate, memory = rows_of(UPIPE)
    (record,) = runs.ask([upipe_step(rate)])
    ours = derived(lambda tokens: tokens / int(rate["gpus"]), of_record(record, "tokens_per_s")), gigabytes(record)
    names = (("throughput", "tokens/s a GPU"), ("peak memory", "GB"))
    table: list[list[Cell]] = [
        [*name, theirs, number, percent_off(number, theirs)]
        for name, theirs, number in zip(names, map(published, (rate, memory)), ours, strict=True)
    ]
    return section("training_tables.upipe", tokens=int(rate["seqlen"]), source=UPIPE, rows=table)


def striped_attention(runs: Runs) -> str:
    """The steps of Striped Attention, as its own study has them."""
    return _of_study("Striped Attention", training(runs))


def token_ring(runs: Runs) -> str:
    """The diffusion transformer of TokenRing, as its own study has it."""
    return _of_study("TokenRing", dit(runs))


def _of_study(paper: str, found: Section) -> str:
    """A section of another study in Markdown, which the report has there."""
    parts = [part for part in found.parts if getattr(part, "name", None) not in TOO_LONG]
    return markdown.filled(Section(f"{paper}: {found.title}", *parts).to_markdown())
