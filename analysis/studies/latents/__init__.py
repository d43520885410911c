"""Multi-head latent attention whose keys and values of all heads travel, or the latents that they are made of."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from sp_bench.analysis.measured import known
from sp_bench.analysis.ranking import as_fast
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.cli.words import tokens
from sp_bench.records import Record

METHODS = ("ring", "ulysses", "usp", "mesh")
CLUSTER = "h200_ndr400"
HEADS = {"heads": 128, "head_dim": 192, "v_head_dim": 128}
"""DeepSeek-V3's attention (DeepSeek-AI 2024, section 4.2)."""
KEYS, LATENTS = {"kv_heads": 128}, {"kv_heads": 1, "latent_dim": 512, "rope_dim": 64}
FORMS = {"keys": KEYS, "latents": LATENTS}


class Setting(NamedTuple):
    """An attention on some GPUs."""

    kind: str
    gpus: int
    seqlen: int
    kv_seqlen: int | None = None
    phase: str = "forward_backward"


SETTINGS = [Setting("training", 8, seqlen) for seqlen in (2**16, 2**18)]
SETTINGS += [Setting("training", 64, seqlen) for seqlen in (2**16, 2**18, 2**20)]
SETTINGS += [
    Setting("prefill", gpus, part, part + history, "forward")
    for gpus, part, history in product((8, 64), (2**13, 2**16), (2**17, 2**20))
]
Row = dict[str, str]


def _point(setting: Setting, method: str, form: str) -> Point:
    size = {"gpus": setting.gpus, "seqlen": setting.seqlen, "kv_seqlen": setting.kv_seqlen, "phase": setting.phase}
    return point(method=method, cluster=CLUSTER, baseline=None, trace=0, **size, **HEADS, **FORMS[form])


def by_form(runs: Runs) -> list[Row]:
    """A row for each setting: every method's step with keys and with latents, and the fastest of all."""
    records, rows = runs.grid(_point, SETTINGS, METHODS, FORMS), []
    for setting in SETTINGS:
        steps = {
            (name, form): known(records[setting, name, form].step_ms_median) for name, form in product(METHODS, FORMS)
        }
        size = tokens(setting.seqlen)
        size += f" behind {tokens(setting.kv_seqlen - setting.seqlen)}" if setting.kv_seqlen else ""
        row = {"of": setting.kind, "GPUs": str(setting.gpus), "tokens": size}
        row |= {f"{name}, ms": " / ".join(f"{steps[name, form]:,.4g}" for form in FORMS) for name in METHODS}
        rows.append(row | {"fastest": ", ".join(f"{name} ({form})" for name, form in as_fast(steps))})
    return rows


def sent(runs: Runs) -> list[Row]:
    """A row for each number of GPUs: what each sends for a training step of 256k tokens, and holds."""
    rows = []
    for gpus, form in product((8, 64), FORMS):
        setting = Setting("training", gpus, 2**18)
        records = runs.by_key({name: _point(setting, name, form) for name in METHODS})
        row = {"GPUs": str(gpus), "what travels": form}
        rows.append(row | {f"{name}, sent / peak GB": _gigabytes(records[name]) for name in METHODS})
    return rows


def _gigabytes(record: Record) -> str:
    assert record.peak_mem_bytes_max is not None and record.comm_bytes_per_gpu is not None, record.error
    return f"{record.comm_bytes_per_gpu / 1e9:,.3g} / {record.peak_mem_bytes_max / 1e9:,.3g}"
