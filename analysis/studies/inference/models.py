"""Whole models with latents, or with layers of two kinds: prompts, decode steps, and packs of which latents travel."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from sp_bench.analysis.ranking import by_method, by_time
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.cli.words import number, tokens
from sp_bench.records import Record

CLUSTER = "h100_ndr400"
MODELS = ("deepseek_v2_lite", "minicpm3_4b", "gpt_oss_20b", "gemma3_27b")
OF_LATENTS = MODELS[:2]
GPUS = (8, 64)
LENGTHS = (2**17, 2**20)
"""Tokens of a prompt, and keys of a sequence in a decode step."""
CHUNK = 2**15
PROMPTS = ("ring", "pass_q", "usp", "mesh")
STEPS = ("helix", "tree", "dcp", "pass_q")
PACKS = ("ring", "all_gather", "group_cast", "usp", "mesh")
BATCHES = (1, 32)
Row = dict[str, str]


class Setting(NamedTuple):
    """A model on some GPUs, at a length."""

    model: str
    length: int
    gpus: int
    batch: int = 1


def of_models(runs: Runs) -> list[Row]:
    """A row for each model, prompt and number of GPUs: the time to the first token with every method, in chunks."""
    settings = [Setting(*each) for each in product(MODELS, LENGTHS, GPUS)]
    rows = []
    for setting, records in runs.by_setting(_prompt, settings, PROMPTS):
        row = {"model": setting.model, "prompt": tokens(setting.length), "GPUs": str(setting.gpus)}
        rows.append(row | by_method(records, "s") | _sizes(records))
    return rows


def steps(runs: Runs) -> list[Row]:
    """A row for each model, length and number of caches, and number of GPUs: the attention of all layers in a decode
    step with every method.
    """
    settings = [Setting(*each) for each in product(MODELS, LENGTHS, GPUS, BATCHES)]
    rows = []
    for setting, records in runs.by_setting(_step, settings, STEPS):
        row = {"model": setting.model, "cache": tokens(setting.length), "batch": str(setting.batch)}
        row |= {"GPUs": str(setting.gpus)}
        rows.append(row | by_method(records) | _sizes(records))
    return rows


def packs(runs: Runs) -> list[Row]:
    """A row for each model with latents and number of GPUs: the forward of one layer over a pack of documents whose
    latents travel.
    """
    settings = [Setting(*each) for each in product(OF_LATENTS, (2**17, 2**19), GPUS)]
    rows = []
    for setting, records in runs.by_setting(_pack, settings, PACKS):
        row = {"layer of": setting.model, "pack": tokens(setting.length), "GPUs": str(setting.gpus)}
        sent = " / ".join(number((records[name].comm_bytes_per_gpu or 0) / 1e6) for name in PACKS)
        rows.append(row | by_method(records) | {"sent by a GPU, MB": sent})
    return rows


def _prompt(setting: Setting, method: str) -> Point:
    return _point(setting, method, workload="prefill", seqlen=setting.length, prefill__chunk=CHUNK)


def _step(setting: Setting, method: str) -> Point:
    step: dict[str, Any] = {"seqlen": 1, "kv_seqlen": setting.length, "batch": setting.batch}
    return _point(setting, method, workload="decode", **step)


def _pack(setting: Setting, method: str) -> Point:
    of_documents = {"mask": "document", "data": "magi_attention", "seqlen": setting.length}
    return _point(setting, method, workload="attention", phase="forward", **of_documents)


def _point(setting: Setting, method: str, **keys: Any) -> Point:
    return point(method=method, model=setting.model, gpus=setting.gpus, cluster=CLUSTER, baseline=None, trace=0, **keys)


def _sizes(records: Mapping[str, Record]) -> Row:
    """The caches of all layers on a GPU, and the peak of the fastest method."""
    if not (ranked := by_time(records.values())):
        return {"cache; peak, GB": "does not fit"}
    first = ranked[0]
    sizes = first.kv_cache_bytes, first.peak_mem_bytes_max
    return {"cache; peak, GB": "; ".join(number((size or 0) / 1e9) for size in sizes)}
