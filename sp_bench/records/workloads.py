"""Workload ids: what was asked, whoever answered it, with which method, on what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.records.identity import digest

PACK_KEYS = ("data", "seed", "chunk")
"""The keys of a resolved config that say how long the documents of a pack are."""


def workload_id(record: Mapping[str, Any]) -> str:
    """The workload of a record's fields, in words: attention/forward_backward/causal/1048576x1/32:32:128/bfloat16.

    The parts are the operation, with its model if it is a training step, the phase, the mask, seqlen x batch,
    heads:kv_heads:head_dim, and the dtype. With a window or packed documents the mask has them too; documents are a
    hash of where their lengths come from. Method, GPUs, cluster and software are no part of it: records of one workload
    answer one question.
    """
    mask = str(record.get("mask") or ("causal" if record["causal"] else "full"))
    if record.get("documents") or record.get("window"):
        mask += "" if record["causal"] else "-full"
        mask += f"-{record['documents']}-{record['longest_document']}" if record.get("documents") else ""
        mask += "-window" + ",".join("" if x is None else str(x) for x in record["window"]) if record["window"] else ""
        config = record.get("config") or {}
        if mask.startswith("document"):
            mask += f"-{digest({key: config.get(key) for key in PACK_KEYS})[:8]}"
    heads = ":".join(str(record[key]) for key in ("heads", "kv_heads", "head_dim"))
    size = f"{record['seqlen']}x{record['batch']}"
    operation = f"{record['workload']}:{record['model']}" if record.get("model") else record["workload"]
    return "/".join((operation, record["phase"], mask, size, heads, record["dtype"]))
