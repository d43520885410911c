"""Records for tests of what is done with them."""

from __future__ import annotations

from typing import Any

from sp_bench.records import Record

PLAIN: dict[str, Any] = {
    "status": "ok",
    "mode": "simulate",
    "method": "mesh",
    "tile_a": 16,
    "tile_b": 16,
    "variant": "16x16",
    "gpus": 256,
    "seqlen": 2**20,
    "batch": 1,
    "heads": 32,
    "kv_heads": 32,
    "head_dim": 128,
    "causal": True,
    "dtype": "bfloat16",
    "wire_dtype": "bfloat16",
    "phase": "forward_backward",
    "cluster": "h100_ndr400",
    "step_ms_median": 12.5,
    "comm_bytes_per_gpu": 7658,
    "comm_bytes_by_lane": {"forward/rings/kv/k": 1.5, "backward/kv": 2},
    "notes": ["2 ranks share a core", "so"],
    "config": {"method": {"name": "mesh", "tile": [16, 16]}, "logger": {"name": "wandb", "group": None}},
    "provenance": {"argv": ["a, b"], "host": "private-host", "git_commit": "abc", "environment": {}},
}


def made(run_id: str = "3fa2c0de", **changes: Any) -> Record:
    """A record with a few fields."""
    return Record(run_id=run_id, **(PLAIN | changes))
