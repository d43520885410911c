"""Execute a point under torch's profiler, inside its ranks."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from sp_bench.measure.devices import device_here, transport_here
from sp_bench.measure.pool import report
from sp_bench.run.annotations import marked
from sp_bench.run.devices import clock_of
from sp_bench.run.executor import Action
from sp_bench.workload import RankContext, Spec


def traced(spec: Spec, iters: int, warmup: int) -> bytes:
    """This rank's trace, compressed, of `iters` steps after `warmup` others. All ranks must call it.

    On CPUs only the ranges of operations are kept.
    """
    context = RankContext(dist.get_rank(), device_here(), transport_here, alive=lambda: report("step", step=False))
    step, clock = spec.workload.prepare(spec, context), clock_of(context.device)

    def execute() -> None:
        step.untimed()
        for phase in spec.workload.phases:
            clock.synchronize()
            dist.barrier()
            step.run(phase, Action.EVERYTHING)
            clock.synchronize()

    for _ in range(warmup):
        execute()
    on_gpu = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # On CPUs each lane has a thread of its own, which a profiler doesn't see by default.
    threads = _ExperimentalConfig(profile_all_threads=not on_gpu)
    with profile(activities=activities, experimental_config=threads) as profiler:
        for _ in range(iters):
            report("step", step=False)
            execute()
    step.close()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        content = json.loads(Path(file.name).read_bytes())
    if not on_gpu:
        content["traceEvents"] = [x for x in content["traceEvents"] if marked(str(x.get("name", "")))]
    for name in ("host_name", "traceName"):  # traces are sent to others
        content.pop(name, None)
    content["distributedInfo"] = {**(content.get("distributedInfo") or {}), "rank": context.rank}
    return gzip.compress(json.dumps(content).encode(), mtime=0)
