"""What measured ranks spend a step on, what they run on, and what can be said of ranks that were executed alone."""

from __future__ import annotations

import re

import numpy as np

from sp_bench.bench.request import Request
from sp_bench.measure.spec import Measured
from sp_bench.plan import PHASES
from sp_bench.records import Record

FORMS = ("PCIe", "NVL")
"""Of one model, with other clocks and peaks."""


def inside_for(record: Record, ranks: list[Measured]) -> np.ndarray:
    """Blocks, kernels, folds and interpreter of the busiest rank; returns the milliseconds of each rank's blocks."""
    blocks_ms, kernels_ms, folds_ms, caller_ms = (
        1e3 * np.median([getattr(rank, name) for rank in ranks], axis=1)
        for name in ("blocks_s", "kernels_s", "folds_s", "caller_s")
    )
    on_gpus = any(rank.device_bytes for rank in ranks)
    record.compute_ms, record.kernels_ms = float(blocks_ms.max()), float(kernels_ms.max())
    record.folds_ms = float(folds_ms.max())
    record.interpreter_ms = float((caller_ms if on_gpus else blocks_ms - kernels_ms - folds_ms).max())
    return blocks_ms


def describe_devices(record: Record, request: Request, rank: Measured) -> None:
    """Name what ranks ran on, where that is not what the cluster's figures are for."""
    found = rank.device.get("device", "")
    figures = record.device_name or ""
    if request.devices.kind == "cuda" or request.alone:
        record.device_name = found
        if not same_model(found, figures):
            note = (
                f"ranks are on {found}; the figures of cluster={record.cluster} are of {figures}, and chose the variant"
            )
            record.notes = [*(record.notes or []), note]
    record.provenance = {**(record.provenance or {}), "device": {**rank.device, "nccl_settings": request.devices.nccl}}


def same_model(found: str, figures: str) -> bool:
    """Whether a device is the one that a cluster's figures are for: by its model, such as H100, and its form."""
    models, words = set(re.findall(r"[A-Za-z]+[0-9]+\w*", figures)), set(re.findall(r"\w+", found))
    return bool(models) and models <= words and all((form in found) == (form in figures) for form in FORMS)


def describe_alone(record: Record, request: Request, ranks: list[Measured]) -> None:
    """What ranks take that were executed without their peers. No step, rate or share of one: nothing was sent."""
    record.alone_ranks, record.nodes = list(request.alone), None
    record.alone_ms_median = _slowest_ms(ranks, "")
    inside_for(record, ranks)
    if request.parts:
        record.compute_only_ms_median = _slowest_ms(ranks, "compute_only_")
    record.kernel = ranks[0].kernel
    listed = ", ".join(map(str, record.alone_ranks))
    note = (
        f"rank{'s' * (len(ranks) > 1)} {listed} of {record.gpus}, alone: what was to come is a copy of what was to go, "
        "so that these are times of kernels, folds, copies and interpreter, not of a step; results were not checked"
    )
    record.notes = [*(record.notes or []), note]


def _slowest_ms(ranks: list[Measured], part: str) -> float:
    """The median over iterations of the phases of a part of the step together, each time of the slowest rank."""
    phases_ms = 1e3 * np.array([[getattr(rank, f"{part}{phase}_s") for phase in PHASES] for rank in ranks])
    return float(np.median(phases_ms.sum(axis=1).max(axis=0)))
