"""Whole prompts in chunks: the simulated time to the first token of a model, by method and size of the chunks."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from sp_bench.analysis.ranking import as_fast
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.cli.words import number, tokens
from sp_bench.records import Record

METHODS = ("ring", "pass_q", "usp", "mesh")
CLUSTER, MODEL = "h100_ndr400", "llama3_8b"
GPUS = (8, 64)
PROMPTS = (2**17, 2**20)
CHUNKS = (2**13, 2**15, 2**17)
"""Tokens of a chunk; the whole prompt in one piece is simulated too."""
Row = dict[str, str]


class Setting(NamedTuple):
    """A prompt on some GPUs."""

    prompt: int
    gpus: int
    chunk: int


SETTINGS = [Setting(*each, chunk) for each in product(PROMPTS, GPUS) for chunk in (*CHUNKS, 2**20) if chunk <= each[0]]


class Published(NamedTuple):
    """A time to the first token that others have measured."""

    prompt: int
    ttft_s: float


PUBLISHED = (Published(2**17, 3.8), Published(2**20, 77.0))
"""Llama 3 405B on 128 H100 of 500 W, context parallel 16 x tensor parallel 8, KV passed on: Yang et al. 2024
(arXiv 2411.01783), abstract."""


def prompts(runs: Runs) -> list[Row]:
    """A row for each prompt, number of GPUs and chunk: the time to the first token with every method, and what the
    fastest one takes over one piece, sends and holds.
    """
    records, rows = runs.grid(_point, SETTINGS, METHODS), []
    for setting in SETTINGS:
        times_s = {name: _ttft_s(records[setting, name]) for name in METHODS}
        first = min(times_s, key=lambda name: times_s[name])
        whole_s = min(_ttft_s(records[setting._replace(chunk=setting.prompt), name]) for name in METHODS)
        record = records[setting, first]
        each_ms = record.chunk_ms or []
        row = {"prompt": tokens(setting.prompt), "GPUs": str(setting.gpus)}
        row |= {"chunk": tokens(setting.chunk) if setting.chunk < setting.prompt else "all of it"}
        row |= {f"{name}, s": f"{times_s[name]:.3g}" for name in METHODS}
        row |= {"fastest": ", ".join(as_fast(times_s)), "over one piece": f"{times_s[first] / whole_s:.2f}x"}
        row |= {"its first and last chunk, ms": ", ".join(f"{each_ms[end]:,.0f}" for end in (0, -1))}
        row |= {"its bound, s": f"{(record.bound_ms or 0) / 1e3:.3g}, by {record.bound_by}"}
        sizes = record.comm_bytes_per_gpu, record.kv_cache_bytes, record.peak_mem_bytes_max
        rows.append(row | {"it sends, GB; cache; peak": "; ".join(number((size or 0) / 1e9) for size in sizes)})
    return rows


def published(runs: Runs) -> list[Row]:
    """A row for each published time: the simulated one, and how far off it is."""
    asked = {one: _published_point(one.prompt) for one in PUBLISHED}
    rows = []
    for one, record in runs.by_key(asked).items():
        ttft_s = _ttft_s(record)
        row = {"prompt": tokens(one.prompt), "measured, s": f"{one.ttft_s:g}", "simulated, s": f"{ttft_s:.3g}"}
        row |= {"error": f"{ttft_s / one.ttft_s - 1:+.0%}"}
        parts = record.attention_ms, record.dense_ms, record.tensor_sum_ms
        rows.append(row | {"of it attention, products, sums, s": ", ".join(f"{(x or 0) / 1e3:.3g}" for x in parts)})
    return rows


def _point(setting: Setting, method: str) -> Point:
    return point(
        method=method,
        model=MODEL,
        workload="prefill",
        gpus=setting.gpus,
        seqlen=setting.prompt,
        cluster=CLUSTER,
        baseline=None,
        trace=0,
        prefill__chunk=setting.chunk if setting.chunk < setting.prompt else None,
    )


def _published_point(prompt: int) -> Point:
    """With memory for weights in bf16: theirs of the feed-forwards are in FP8."""
    return point(
        method="ring",
        model="llama3_405b",
        workload="prefill",
        gpus=128,
        seqlen=prompt,
        cluster="h100_ndr400_500w",
        kernel="flash_attn_3",
        cluster__device__memory_bytes=1.2e11,
        prefill__tensor_parallel=8,
        baseline=None,
        trace=0,
    )


def _ttft_s(record: Record) -> float:
    assert record.ttft_s is not None, record.error
    return record.ttft_s
