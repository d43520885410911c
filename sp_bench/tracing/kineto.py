"""Read a trace of torch's profiler: the ranges of a plan's operations, and NCCL's kernels with their messages."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench.errors import RequestError
from sp_bench.run.annotations import Mark, marked
from sp_bench.tracing.streams import Kernel, kernels

ON_GPU, ON_HOST = "gpu_user_annotation", "user_annotation"
"""Kineto's categories of a range: the kernels launched in it, and the range itself."""
NCCL_KERNEL = re.compile(r"nccl[A-Za-z]*Kernel_([A-Za-z]+)")
ELEMENT_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One execution of an operation, in seconds of the trace's clock."""

    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kernel of NCCL."""

    name: str
    """SendRecv, AllGather, ReduceScatter, ..."""
    start_s: float
    """In seconds of the trace's clock."""
    seconds: float
    message_bytes: int | None
    """The bytes of this rank's input; None if the trace doesn't say."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The kernels and copies of one rank's trace."""

    rank: int | None
    """None if the trace doesn't say."""
    ops: Mapping[Mark, Sequence[Sample]]
    """The executions of each operation of a plan, in order; empty for a peer's code."""
    collectives: Sequence[Collective]
    """In the order of their start."""
    kernels: Sequence[Kernel] = ()
    """All that ran on GPUs."""


def read_trace(path: Path) -> Trace:
    """Read a trace, .json or .json.gz. Raises RequestError if it is none."""
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no trace of torch's profiler ({type(error).__name__}: {error})"
        raise RequestError(str(path), rule, "what export_chrome_trace writes, .json or .json.gz, would work") from None
    rank = (content.get("distributedInfo") or {}).get("rank")
    return Trace(rank=rank, ops=_ops(events), collectives=_collectives(events), kernels=kernels(events))


def _ops(events: Sequence[Mapping[str, Any]]) -> dict[Mark, list[Sample]]:
    """The executions of each operation: by its kernels where any ran on a GPU, else by its range on the host."""
    by_category: dict[str, dict[Mark, list[Sample]]] = {ON_GPU: {}, ON_HOST: {}}
    for event in sorted(events, key=lambda event: event["ts"]):
        mark, samples = marked(str(event["name"])), by_category.get(event.get("cat", ""))
        if mark and samples is not None:
            start_s, end_s = 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])
            samples.setdefault(mark, []).append(Sample(start_s=start_s, end_s=end_s))
    on_host, on_gpu = by_category[ON_HOST], by_category[ON_GPU]
    if not on_gpu:
        return on_host
    return {mark: _joined(on_gpu[mark], len(samples)) for mark, samples in on_host.items() if mark in on_gpu}


def _joined(samples: Sequence[Sample], executions: int) -> list[Sample]:
    """One sample an execution: an operation has a range on each stream that its kernels run on."""
    each, rest = divmod(len(samples), executions)
    if rest:
        return list(samples)
    groups = (samples[i * each : (i + 1) * each] for i in range(executions))
    return [Sample(start_s=min(s.start_s for s in of), end_s=max(s.end_s for s in of)) for of in groups]


def _collectives(events: Iterable[Mapping[str, Any]]) -> list[Collective]:
    collectives = []
    for event in sorted(events, key=lambda event: event["ts"]):
        kernel = NCCL_KERNEL.match(str(event["name"])) if event.get("cat") == "kernel" else None
        if kernel:
            arguments = event.get("args", {})
            elements, width = arguments.get("In msg nelems"), ELEMENT_BYTES.get(arguments.get("dtype", ""))
            message_bytes = int(elements) * width if elements is not None and width else None
            start_s, seconds = 1e-6 * event["ts"], 1e-6 * event["dur"]
            collectives.append(
                Collective(name=kernel[1], start_s=start_s, seconds=seconds, message_bytes=message_bytes)
            )
    return collectives
