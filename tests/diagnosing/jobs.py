"""Jobs of ranks in the tests of the doctor. Imported inside the ranks: no pytest."""

from __future__ import annotations

import os

import torch.distributed as dist

from sp_bench.diagnosing import rank_jobs


def pairs(plans: object, wanted: list[tuple[int, int]]) -> list[rank_jobs.PairRate]:
    """The rates of pairs, with small messages."""
    return rank_jobs.pair_rates(plans, wanted, 4096)  # pyright: ignore[reportArgumentType]


def under_load(path: str) -> tuple[str, list[dict[str, str]]] | None:
    """With an nvidia-smi of that folder."""
    os.environ["PATH"] = f"{path}:{os.environ['PATH']}"
    try:
        return rank_jobs.under_load(0.1)
    finally:
        os.environ["PATH"] = os.environ["PATH"].removeprefix(f"{path}:")


def log_of(folder: str, texts: list[str]) -> rank_jobs.NcclLog:
    """The facts that are read of a log which NCCL would have written."""
    os.environ["NCCL_DEBUG_FILE"] = f"{folder}/%h.%p"
    name = f"{folder}/{os.uname().nodename}.{os.getpid()}"
    with open(name, "w") as file:
        file.write(texts[dist.get_rank()])
    try:
        return rank_jobs.nccl_log()
    finally:
        del os.environ["NCCL_DEBUG_FILE"]
