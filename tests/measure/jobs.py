"""Jobs of ranks in the tests of the pool. Imported inside the ranks: no pytest."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sp_bench import SequenceParallelAttention
from sp_bench.errors import RequestError
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.measure import job
from sp_bench.measure.pool import report
from sp_bench.measure.start import Start
from sp_bench.run import engine as engine_module
from sp_bench.run.devices import HostClock
from sp_bench.run.engine import Engine
from sp_bench.run.groups import own_group, world
from sp_bench.workload import GateErrors, Spec, exact_rows, prefill_step

BAD = 1
"""The rank that goes wrong."""


def rank_and_world(*extra: object) -> tuple:
    return (dist.get_rank(), dist.get_world_size(), *extra)


def total() -> float:
    """A sum over all ranks, to see that the group still works."""
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return float(x)


def connect_slowly(seconds: float) -> int:
    """Rank 0 says that it connects, and all are then silent for so long."""
    report("connecting", connecting=not dist.get_rank())
    time.sleep(seconds)
    return dist.get_rank()


def begin_together(on_a_stream: bool) -> list[float | None]:
    """Seconds that ranks waited for each other before phases: by gloo, which blocks where a GPU's stream would wait."""
    group = own_group(world(), range(dist.get_world_size()), "start", backend="gloo") if on_a_stream else None
    start, found = Start(HostClock(), torch.device("cpu"), group), []
    for _ in range(3):
        began = start.together()
        found.append(start.waited_s(began))
    return found


def report_often(times: int, seconds: float) -> int:
    """Rank r reports (r, 0), (r, 1), ..."""
    for i in range(times):
        time.sleep(seconds)
        report((dist.get_rank(), i))
    return times


class Unpicklable(Exception):
    """Exceptions of libraries often are."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail(kind: str, who: int | None) -> int:
    """Raise on one rank, or on all."""
    if who is None or dist.get_rank() == who:
        match kind:
            case "value":
                raise ValueError("seven is not even")
            case "request":
                raise RequestError("tile=[2,2]", "a * b must be gpus=3", "tile=[1,3] would work")
            case "unpicklable":
                raise Unpicklable(3, 5)
    return dist.get_rank()


def answer_with_a_lambda() -> object:
    return lambda: None


def go_wrong(how: str, others: str, reports: int = 0) -> None:
    """Rank BAD goes wrong, after some reports half a second apart, while the others wait for it."""
    # In its first call an attention is agreed on; what is waited for in a later one is a lane's.
    attention = attend(SequenceParallelAttention("mesh", causal=True)) if others == "attention" else None
    if dist.get_rank() != BAD:
        attend(attention) if attention else wait_in(others)
        return
    for i in range(reports):
        time.sleep(0.5)
        report(i)
    match how:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("seven is not even")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(10_000)
        case "spin":
            while True:
                pass


def attend(attention: SequenceParallelAttention) -> SequenceParallelAttention:
    """Call it, and return it."""
    attention(*(attention.shard(torch.ones(1, 2 * dist.get_world_size(), 2, 4)) for _ in range(3)))
    return attention


def wait_in(others: str) -> None:
    """Wait for rank BAD, which never comes."""
    x = torch.ones(1, 2 * dist.get_world_size(), 2, 4)
    match others:
        case "barrier":
            dist.barrier()
        case "all_gather":
            dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)
        case "all_reduce":
            dist.all_reduce(x)
        case "recv":
            dist.recv(x, BAD)
        case "work":
            work = dist.irecv(x, BAD)
            assert work is not None
            work.wait()


def report_then_fail(who: int) -> None:
    """Every rank reports its own name; one fails right after it, the others go on reporting."""
    report(f"before the fall of {dist.get_rank()}")
    if dist.get_rank() == who:
        raise ValueError("fell")
    report("further on")


def gated(spec: Spec, spoiled: tuple[str, int] | None = None, with_: float = 0.0) -> GateErrors:
    """The gate's answer on a point whose kernel fills one head of one tensor with a number."""
    methods = {"_forward": ("out", "lse"), "_backward": ("dq", "dk", "dv")}

    def spoiling(method: str, names: tuple[str, ...]) -> Any:
        right = getattr(AtenCpu, method)

        def wrong(self: AtenCpu, *arguments: Any, **given: Any) -> tuple[Tensor, ...]:
            results = right(self, *arguments, **given)
            if spoiled and spoiled[0] in names:
                results[names.index(spoiled[0])][:, :, spoiled[1]] = with_
            return results

        return patch.object(AtenCpu, method, wrong)

    with spoiling("_forward", methods["_forward"]), spoiling("_backward", methods["_backward"]):
        return job._gate(0, spec)


def measured_with_a_kernel_wrong_from(spec: Spec, tokens: int, name: str) -> tuple[str, str, tuple[int, int] | None]:
    """The gate's answer, then the rows of what was timed, of a kernel whose rows from `tokens` on are off by 1%."""
    names = {"_forward": ("out",), "_backward": ("dq", "dk", "dv")}
    method = next(method for method, results in names.items() if name in results)
    right = getattr(AtenCpu, method)

    def wrong(self: AtenCpu, *arguments: Any, **given: Any) -> tuple[Tensor, ...]:
        results = right(self, *arguments, **given)
        results[names[method].index(name)][:, tokens:] *= 1.01
        return results

    with patch.object(AtenCpu, method, wrong):
        (found,) = job.measure([spec], 1, 0)
    dtype = spec.problem.dtype
    return found.gate.wrong(dtype), found.timed.wrong(dtype), found.timed.rows


def measured_where_memory_runs_out(spec: Spec) -> tuple[GateErrors, int]:
    """Answers of rank BAD and the others on rows of what was timed if it has no memory for them; and its samples."""
    point = job.TimedPoint(0, spec)
    point.iterate(0)

    def rows(*given: Any) -> Any:
        if dist.get_rank() == BAD:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return right(*given)

    right = exact_rows._rows
    with patch.object(exact_rows, "_rows", rows):
        found = point.result(GateErrors())
    return found.timed, len(found.samples.seconds)


def groups_of_points(specs: list[Spec]) -> list[int]:
    """How many process groups there are before points are measured, as each has its result, and in the end."""
    counts = [len(c10d._world.pg_map)]
    right = job.TimedPoint.result

    def result(self: job.TimedPoint, gate: GateErrors) -> Any:
        counts.append(len(c10d._world.pg_map))
        return right(self, gate)

    with patch.object(job.TimedPoint, "result", result):
        results = job.measure(specs, 1, 0)
    said = [found.wrong("float32") for found in results]
    assert not any(said), said
    return [*counts, len(c10d._world.pg_map)]


def gated_without_writing(spec: Spec, index: int) -> str:
    """The gate's answer on a prompt of which one chunk never comes into the cache."""
    right = prefill_step.Cached.write

    def write(self: prefill_step.Cached, chunk: int) -> None:
        if chunk != index:
            right(self, chunk)

    with patch.object(prefill_step.Cached, "write", write):
        return job._gate(0, spec).wrong("float32")


def gated_with_wrong_sinks(spec: Spec, wrong: str) -> str:
    """The gate's answer on a point whose sinks are left out, or whose gradient isn't summed or is off."""
    forward, gradient = Engine.forward, engine_module.of_sinks

    def without(self: Engine, *arguments: Any) -> Any:
        *others, sinks = arguments
        return forward(self, *others, sinks=torch.full_like(sinks, -torch.inf))

    def alone(*arguments: Any) -> Tensor:
        found = gradient(*arguments)
        return found if dist.get_rank() == 0 else torch.zeros_like(found)

    patches = {
        "left out": patch.object(Engine, "forward", without),
        "not summed": patch.object(engine_module, "of_sinks", alone),
        "off": patch.object(engine_module, "of_sinks", lambda *arguments: 1.01 * gradient(*arguments)),
    }
    with patches[wrong]:
        return job._gate(0, spec).wrong("float32")
