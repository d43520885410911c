"""Training steps that others have published, beside simulated ones. Nothing is fitted to them."""

from __future__ import annotations

from collections.abc import Mapping

from sp_bench.analysis.number import Number, computed, derived, formula, least, median, most, of_paper, of_record
from sp_bench.analysis.paper_tables import PAPERS, rows
from sp_bench.analysis.runs import Point, Runs, group, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Table, columns

FILE = "training_tables"
PATH = PAPERS / f"{FILE}.csv"
MAXTEXT, PRIME = "AI-Hypercomputer/maxtext pull request 4687", "PrimeIntellect-ai/prime-rl pull request 2418"
MAXTEXT_FLOPS = formula(
    "maxtext-flops",
    "6 N + 6 L S d FLOPs a token: N parameters of matrices, the causal attention's forward three times",
    "inferred from maxtext's steps of llama2-7b, whose seconds and TFLOP/s a chip are both given",
)
GLM = {"layers": 46, "heads": 96, "kv_heads": 8, "head_dim": 128}
GLM_FLOPS = formula(
    "glm-flops",
    "6 x 12e9 + 6 L S H D FLOPs a token: 12e9 active parameters, the causal attention's forward three times, L = 46,"
    " H = 96, D = 128, S = 65536",
    "the configuration of zai-org/GLM-4.5-Air",
)


def published(row: Mapping[str, str]) -> Number:
    """The published value of a row."""
    return of_paper(float(row["value"]), PATH, f"{row['source']}, {row['method']} on {row['ranks']}")


def step(row: Mapping[str, str]) -> Point:
    """The simulated step of one group of chips that share a sequence: its part of the step's sequences at a time."""
    ranks = int(row["ranks"])
    batch = int(row["sequences"]) * ranks // int(row["gpus"])
    shared = {"cluster": "tpuv5p", "mode": "simulate", "model": row["model"], "train__parameters": "sharded"}
    return point(method=row["method"], gpus=ranks, batch=batch, seqlen=int(row["seqlen"]), **shared)


def maxtext_flops(row: Mapping[str, str]) -> float:
    """FLOPs of a token as maxtext counts them."""
    model, seqlen = group_of(row["model"]), int(row["seqlen"])
    width, kv = model["width"], model["kv_heads"] * model["head_dim"]
    layer = 2 * width * width + 2 * width * kv + 3 * width * model["ffn"]
    matrices = model["layers"] * layer + model["vocab"] * width
    return 6.0 * matrices + 6.0 * model["layers"] * seqlen * model["heads"] * model["head_dim"]


def group_of(model: str) -> dict[str, int]:
    """The numbers of a decoder of conf/model, its heads among them."""
    return {**group("model", model), **HEADS[model]}


HEADS = {
    "llama_7b": {"heads": 32, "kv_heads": 32, "head_dim": 128},
    "llama3_8b": {"heads": 32, "kv_heads": 8, "head_dim": 128},
}
"""As in conf/model."""


def seconds(row: Mapping[str, str]) -> Number:
    """The published step: as printed, or from the printed TFLOP/s a chip."""
    value = published(row)
    if row["quantity"] == "step":
        return value
    tokens = int(row["sequences"]) * int(row["seqlen"])
    flops = computed(maxtext_flops(row) * tokens / int(row["gpus"]) / 1e12, MAXTEXT_FLOPS)
    return flops.over(value)


def maxtext(runs: Runs) -> Section:
    """Steps on TPU v5p with context parallelism."""
    found = [row for row in rows(FILE) if row["source"] == MAXTEXT]
    records = runs.ask(step(row) for row in found)
    table, over = [], []
    for row, record in zip(found, records, strict=True):
        theirs, ours = seconds(row), of_record(record, "step_ms_median").times(1e-3)
        over.append(ours.over(theirs))
        error = derived(lambda ratio: 100 * (ratio - 1), over[-1])
        table.append([row["model"], int(row["ranks"]), int(row["seqlen"]), row["method"], theirs, ours, over[-1], error])
    heads = columns(
        "model; chips that share a sequence; seqlen | tokens; method; published | s || .2f; simulated | s | .2f;"
        " simulated / published || .2f; error | % | .0f"
    )
    return Section(
        "maxtext on 64 TPU v5p",
        text(
            "{source}: 2M tokens a step, bfloat16, attention outputs kept and the rest computed again. The simulated step"
            " is that of the chips that share a sequence, with parameters split over them rather than over all 64. It"
            " takes {low:.2f} to {high:.2f} times the published time, {median:.2f} in the median. Nothing is fitted to"
            " it; the rates of kernels on TPUs are assumptions (cluster=tpuv5p). The step of llama3-8b is computed from"
            " its TFLOP/s. Its other lengths, and pull request 4893 with USP on 64 chips, could not be had: stored text"
            " of the thread ends before them.",
            source=MAXTEXT,
            low=least(over),
            high=most(over),
            median=median(over),
        ),
        Table("training-maxtext", "Seconds of a step", heads, table),
    )


def attention(row: Mapping[str, str], method: str) -> Point:
    """The attention of GLM-4.5-Air by one of prime-rl's methods on H200."""
    shape = {"gpus": int(row["ranks"]), "seqlen": int(row["seqlen"]), "mode": "simulate", "cluster": "h200_ndr400"}
    heads = {key: GLM[key] for key in ("heads", "kv_heads", "head_dim")}
    return point(method=method, **shape, **heads)


def prime_rl(runs: Runs) -> Section:
    """Ulysses against ring on 8 H200, and why the steps can't be those of the whole model."""
    found = {(int(row["ranks"]), row["method"]): row for row in rows(FILE) if row["source"] == PRIME}
    one = found[1, "none"]
    flops = computed(GLM_FLOPS_A_TOKEN * float(one["value"]) / int(one["gpus"]) / 1e12, GLM_FLOPS)
    table = []
    for ranks in (2, 4):
        ulysses, ring = (found[ranks, method] for method in ("ulysses", "ring"))
        theirs = published(ulysses).over(published(ring))
        times = [of_record(r, "step_ms_median") for r in runs.ask(attention(ring, m) for m in ("ulysses", "ring", "all_gather"))]
        table.append([ranks, published(ulysses), published(ring), theirs, times[1].over(times[0]), times[2].over(times[0])])
    heads = columns(
        "GPUs that share a sequence; Ulysses | tokens/s | .0f; ring | tokens/s | .0f; Ulysses / ring, published || .2f;"
        " attention alone, ring / Ulysses, simulated || .2f; attention alone, all-gather / Ulysses, simulated || .2f"
    )
    return Section(
        "prime-rl on 8 H200",
        text(
            "{source}: GLM-4.5-Air, FlashAttention-3, 64k tokens. Without context parallelism it trains {rate:.0f} tokens/s"
            " on 8 GPUs. With the whole model and one causal sequence this would be {flops:.0f} TFLOP/s for each GPU,"
            " above the dense peak of 989: documents were packed or layers left out, which the text does not say. So"
            " there is no step to simulate, and no error to state. The table has the published ratios of steps beside"
            " those of the attention alone, which a step can't exceed; what its ring passes on is not said either.",
            source=PRIME,
            rate=published(one),
            flops=flops,
        ),
        Table("training-prime-rl", "Ulysses against ring", heads, table),
    )


GLM_FLOPS_A_TOKEN = 6 * 12e9 + 6.0 * GLM["layers"] * 65536 * GLM["heads"] * GLM["head_dim"]


def not_had(_: Runs) -> Section:
    """What could not be had."""
    return Section(
        "UPipe",
        text(
            "Table 3 of Ghadia et al. 2026 (arXiv {paper}), Llama3-8B on 8 H100 at 128k to 5M tokens, could not be had:"
            " of the paper and of an analysis of it only the beginnings are stored, its repository has scripts and no"
            " results. Its longest lengths also need activations on the host, which is not simulated.",
            paper="2602.21196",
        ),
    )


SECTIONS = (maxtext, prime_rl, not_had)
