"""A GPU's time in any trace: busy streams, communication beside blocks, and exposed communication.

Communication is kernels of NCCL, RCCL and NVSHMEM, and copies between GPUs; compute is all other kernels. Communication
is exposed where no compute kernel runs, as in HolisticTraceAnalysis. Times are unions: kernels side by side count once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copies"
NAMED = re.compile(r"nccl[A-Za-z]*Kernel_([A-Za-z]+)|(Memcpy PtoP|nccl\w*|nvshmem\w*)", re.IGNORECASE)
"""The names of kernels that communicate."""
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, or a copy, on a stream of a GPU."""

    name: str
    """A collective's name, such as SendRecv, where it communicates."""
    kind: str
    """compute, communication or copies."""
    stream: tuple[int, int]
    """The GPU's and the stream's number."""
    span: Interval
    """Start and end in seconds of the trace's clock."""


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels and copies among a trace's events."""
    spans = []
    for event in events:
        category, name = str(event.get("cat", "")).lower(), str(event["name"])
        if category not in ON_GPU:
            continue
        named, arguments = NAMED.match(name), event.get("args", {})
        spans.append(
            Kernel(
                name=(named[1] or named[2]) if named else name,
                kind=COMMUNICATION if named else COMPUTE if category == "kernel" else COPY,
                stream=(int(arguments.get("device", 0)), int(arguments.get("stream", event.get("tid", 0)))),
                span=(1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])),
            )
        )
    return spans


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The spans in order, joined where they overlap."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def seconds(spans: Iterable[Interval]) -> float:
    """The time in which at least one of the spans holds."""
    return sum(end - start for start, end in union(spans))


def exposed_s(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """The time of communication without compute, in seconds."""
    return seconds([*communication, *compute]) - seconds(compute)


def lines(label: str, of_rank: Sequence[Kernel]) -> list[str]:
    """A rank's summary as text, of at most 80 columns where names are short: streams, overlap, each collective."""
    by_kind = {kind: [k.span for k in of_rank if k.kind == kind] for kind in (COMPUTE, COMMUNICATION, COPY)}
    every = [kernel.span for kernel in of_rank]
    whole = max(end for _, end in every) - min(start for start, _ in every)
    idle = max(0.0, 1 - seconds(every) / whole)
    text = [f"{label}: {_ms(whole)} from the first kernel's start to the last one's end, idle {idle:.1%}"]
    text.append(f"  {'stream':<22} {'kernels':>8} {'busy, ms':>10} {'of span':>8}")
    for stream, group in groupby(sorted(of_rank, key=lambda kernel: kernel.stream), key=lambda kernel: kernel.stream):
        on_it = list(group)
        what = "+".join(kind for kind in by_kind if any(kernel.kind == kind for kernel in on_it))
        busy = seconds(kernel.span for kernel in on_it)
        text.append(f"  {f'{stream[1]} {what}':<22} {len(on_it):>8} {1e3 * busy:>10.4g} {busy / whole:>8.0%}")
    compute, communication = by_kind[COMPUTE], by_kind[COMMUNICATION]
    totals = {kind: seconds(spans) for kind, spans in by_kind.items()}
    text += [f"  {kind}: {_ms(total)}, {total / whole:.1%} of the span" for kind, total in totals.items()]
    if total := totals[COMMUNICATION]:
        bare = exposed_s(communication, compute)
        text.append(f"  overlapped: {_ms(total - bare)}, {1 - bare / total:.1%} of communication")
        text.append(f"  exposed: {_ms(bare)}, {bare / whole:.1%} of the span")
        text.append(f"  {'exposed by collective':<22} {'number':>8} {'all, ms':>10} {'exposed, ms':>12}")
        names = sorted({kernel.name for kernel in of_rank if kernel.kind == COMMUNICATION})
        for name in names:
            own = [kernel.span for kernel in of_rank if kernel.kind == COMMUNICATION and kernel.name == name]
            times = f"{1e3 * seconds(own):>10.4g} {1e3 * exposed_s(own, compute):>12.4g}"
            text.append(f"  {name:<22} {len(own):>8} {times}")
    return text


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.4g} ms"
