"""Workload ids: what was asked, whoever answered it, with which method, on what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sp_bench.reading import Tokens, read
from sp_bench.records.identity import digest
from sp_bench.resources import CONF, conf_content

NO_MODEL = "none"
"""The name of no model in a config."""
OF_ATTENTION_ALONE = ("attention", "decode")
"""Workloads without a model, wherever their heads are from."""
IN_WORDS = ("name", "left_out")
"""The keys of a model that are no figures."""
PACK_KEYS = ("data", "seed", "chunk")
"""The keys of a resolved config that say how long the documents of a pack are."""


def workload_id(record: Mapping[str, Any]) -> str:
    """The workload of a record's fields, in words: attention/forward_backward/causal/1048576x1/32:32:128/bfloat16.

    The parts are the operation, with its model (model_in_words) if it is a training step, the phase, the mask,
    seqlen (:kv_seqlen) x batch, heads:kv_heads:head_dim (:v_head_dim, :latent), and the dtype. A latent that travels
    has its widths. With a window or packed documents the mask has them too; documents are a hash of where their lengths
    come from. Method, GPUs, cluster and software are no part of it: records of one workload answer one question.
    """
    mask = str(record.get("mask") or ("causal" if record["causal"] else "full"))
    if record.get("documents") or record.get("window"):
        mask += "" if record["causal"] else "-full"
        mask += f"-{record['documents']}-{record['longest_document']}" if record.get("documents") else ""
        mask += "-window" + ",".join("" if x is None else str(x) for x in record["window"]) if record["window"] else ""
        config = record.get("config") or {}
        if mask.startswith("document"):
            mask += f"-{digest(_of_pack(config))[:8]}"
    if mask == "chunked":
        mask += f"{(record.get('config') or {}).get('chunk')}" + ("" if record["causal"] else "-full")
    mask += "-sinks" if record.get("sinks") else ""
    named = ("heads", "kv_heads", "head_dim", *(["v_head_dim"] if record.get("v_head_dim") else []))
    heads = ":".join(str(record[key]) for key in named)
    asked = ((record.get("config") or {}).get("decode") or {}).get("latent")  # a record that failed has it there alone
    heads += f":latent{record['latent_dim']}+{record['rope_dim']}" if record.get("latent_dim") else ""
    heads += ":latent" if record.get("latent_keys") or (record["workload"] == "decode" and asked) else ""
    keys = f":{record['kv_seqlen']}" if record.get("kv_seqlen") else ""
    size = f"{record['seqlen']}{keys}x{record['batch']}"
    model = model_in_words(record)
    operation = f"{record['workload']}:{model}" if model else record["workload"]
    if record["workload"] == "prefill":
        operation += f"[chunk={_chunk(record)}]"
    return "/".join((operation, record["phase"], mask, size, heads, record["dtype"]))


def _of_pack(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of PACK_KEYS, without lists that are empty: documents without histories are what they were before."""
    content = {key: config.get(key) for key in PACK_KEYS}
    if isinstance(content["data"], Mapping):
        content["data"] = {key: value for key, value in content["data"].items() if value != []}
    return content


def _chunk(record: Mapping[str, Any]) -> int:
    """Tokens of a prompt's chunk; a record that failed has it in its config alone."""
    asked = ((record.get("config") or {}).get("prefill") or {}).get("chunk")
    return record.get("prefill_chunk") or (read(Tokens, asked, "prefill.chunk") if asked else record["seqlen"])


def model_in_words(record: Mapping[str, Any]) -> str | None:
    """The model of a record's fields with what was changed of it: llama3_8b, llama3_8b[layers=2]; None for no model.

    Of a model that the suite doesn't have, it is the name with a hash of all figures. Heads are not among them: they
    have fields of their own.
    """
    name, own = record.get("model"), (record.get("config") or {}).get("model")
    if not isinstance(own, Mapping):
        return name
    if record["workload"] not in OF_ATTENTION_ALONE:  # whose records have no model, wherever its heads are from
        name = name or own.get("name")  # a record that failed has it in its config alone
    if not name or name == NO_MODEL:
        return None
    figures = {key: value for key, value in own.items() if key not in IN_WORDS}
    known = _shipped(name)
    if known is None:
        return f"{name}-{digest(figures)[:8]}"
    changed = [f"{key}={figures.get(key)}" for key in sorted({*figures, *known}) if figures.get(key) != known.get(key)]
    return f"{name}[{','.join(changed)}]" if changed else name


@cache
def _shipped(name: str) -> Mapping[str, Any] | None:
    """The figures of a model in the suite's own conf/model; None if it has no model of that name."""
    files = {path.stem: path for path in (CONF / "model").glob("*.yaml")}
    figures = conf_content(files[name], files)["model"] if name in files else None
    return figures and {key: value for key, value in figures.items() if key not in IN_WORDS}
