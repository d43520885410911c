"""Traces of torch's profiler: read, matched to plans, compared with the simulator, and fitted to."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.plan.ops import AllGather, Plan, ReduceScatter, Transfer
from sp_bench.plan.schedule import Segment
from sp_bench.point import Request
from sp_bench.point.choose import choose
from sp_bench.run.annotations import Mark, annotation, marked
from sp_bench.traces import main
from sp_bench.tracing.compared import ACROSS, BLOCKS, INSIDE, compared, refit, steps
from sp_bench.tracing.kineto import Sample, Trace, read_trace
from tests.support.marks import exhaustive
from tests.support.points import point
from tests.tracing.make_cpu import FOLDER, KEYS

SIZES = ("seqlen=64k", "gpus=16", "mode=simulate")


def point_file(folder: Path, *overrides: str) -> Path:
    """As `run` writes it beside its traces."""
    with Composer() as composer:
        path = folder / "point.json"
        path.write_text(json.dumps({"config": composer.compose(overrides)}))
    return path


def event(name: str, ts: float, dur: float, cat: str = "user_annotation", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def written(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **more}))
    return path


def of_simulation(request: Request, slower: Mapping[str, float]) -> dict[int, Trace]:
    """The traces of all ranks if each kind of operation took so many times what is simulated."""
    choice = choose(request)
    found: dict[int, dict[Mark, list[Sample]]] = {rank: {} for rank in range(choice.problem.n)}
    for phase, run in choice.runs.items():
        for rank, ops in found.items():
            for item, span in zip(run.graph.items, run.spans(rank), strict=True):
                indices = item.what.ops if isinstance(item.what, Segment) else [item.what]
                transfer = isinstance(run.plan.ops[indices[0]], Transfer)
                seconds = (span.end_s - span.start_s) * slower["transfers" if transfer else "blocks"]
                for index in indices:
                    ops[Mark(phase, index)] = [
                        Sample(start_s=span.start_s, end_s=span.start_s + seconds / len(indices))
                    ]
    return {rank: Trace(rank=rank, ops=ops, collectives=()) for rank, ops in found.items()}


def test_names_of_operations() -> None:
    assert marked(annotation("backward", 17)) == Mark("backward", 17)
    assert marked("aten::mm") is None and marked("sp_bench forward 3 more") is None


@pytest.mark.parametrize("method", ["ring", "mesh", "ulysses", "usp"])
def test_a_trace_as_simulated_has_no_error(method: str) -> None:
    request = point(f"method={method}", *SIZES)
    rows, _ = compared(request, of_simulation(request, {"blocks": 1.0, "transfers": 1.0}))
    assert {row.kind for row in rows} <= {BLOCKS, INSIDE, ACROSS} and len(rows) >= 4
    assert all(row.error == pytest.approx(0, abs=1e-9) for row in rows)


def test_figures_are_fitted_to_the_trace() -> None:
    """Kernels take twice as long and links four times: the fitted cluster has them so."""
    request = point("method=ring", *SIZES)
    rows, choice = compared(request, traces := of_simulation(request, {"blocks": 2.0, "transfers": 4.0}))
    assert all(row.error == pytest.approx(-0.5 if row.kind == BLOCKS else -0.75) for row in rows)
    config = refit(request, rows, "fitted")
    old, new = request.cluster, Cluster.build(config)
    assert new.topology.inter and old.topology.inter
    assert new.topology.inter.bytes_per_s == pytest.approx(old.topology.inter.bytes_per_s / 4, rel=1e-3)
    assert new.topology.inter.latency_s == pytest.approx(4 * old.topology.inter.latency_s, rel=1e-3)
    again = replace(request, cluster=new, given=replace(request.given, config={**request.config, "cluster": config}))
    blocks = [row for row in compared(again, traces)[0] if row.kind == BLOCKS]
    assert blocks and all(row.error == pytest.approx(0, abs=0.01) for row in blocks)
    assert "blocks 0.5 times as fast" in config["sources"]["refit"]
    found = steps(choice, traces, config)
    assert [step.phase for step in found] == ["forward", "backward"]
    assert all(2 <= step.refit_s / step.simulated_s <= 4 for step in found)


def test_traces_of_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that tests.tracing.make_cpu made here: every operation of the plan is there, three times on each rank."""
    files = sorted(FOLDER.glob("*.json.gz"))
    traces = [read_trace(path) for path in files]
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    plans = choose(point(*KEYS, "mode=simulate")).plans
    wanted = {Mark(phase, index) for phase, plan in plans.items() for index, _ in plan}
    for trace in traces:
        assert set(trace.ops) == wanted
        assert all(len(samples) == 3 and all(s.end_s >= s.start_s for s in samples) for samples in trace.ops.values())
    out = tmp_path / "cluster" / "mine.yaml"
    assert main([*map(str, files), f"point={point_file(tmp_path, *KEYS)}", f"out={out}", "rows=3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("AttendBackward") + shown.count("Attend ") >= 1 and "blocks: " in shown
    assert "forward: traced " in shown and "backward: traced " in shown
    config = yaml.safe_load(out.read_text())
    assert Cluster.build(config).name == "mine" and "traced operations" in config["sources"]["refit"]


@pytest.mark.long
def test_a_point_is_traced_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks: transfers of lanes' own threads are seen, and the folder stands alone."""
    keys = ("method=ring", "gpus=2", "cluster=local", "seqlen=64", "heads=2", "head_dim=64", "dtype=float32")
    assert main(["run", f"out={tmp_path}", *keys, "iters=2", "warmup=1"]) == 0
    assert "traces of 2 ranks" in capsys.readouterr().out
    trace = read_trace(tmp_path / "rank1.json.gz")
    plans = choose(point(*keys, "mode=simulate")).plans
    assert set(trace.ops) == {Mark(phase, index) for phase, plan in plans.items() for index, _ in plan}
    assert {len(samples) for samples in trace.ops.values()} == {2}
    assert b"host_name" not in gzip.decompress((tmp_path / "rank1.json.gz").read_bytes())
    assert main([str(tmp_path)]) == 0
    assert "transfers inside nodes: " in capsys.readouterr().out


def test_kernels_on_a_gpu_count_and_not_their_launch(tmp_path: Path) -> None:
    """In Kineto's format: a range on the host, and one for each stream that its kernels ran on."""
    name = annotation("forward", 0)
    events = [event(name, 0, 5), event(name, 100, 5), event(annotation("forward", 1), 6, 1)]
    events += [event(name, at, 40, "gpu_user_annotation") for at in (10, 30, 210, 230)]
    trace = read_trace(written(tmp_path / "t.json", events, distributedInfo={"rank": 3, "world_size": 8}))
    assert trace.rank == 3
    assert {mark: [round(1e6 * (s.end_s - s.start_s)) for s in of] for mark, of in trace.ops.items()} == {
        Mark("forward", 0): [60, 60]
    }  # a Join has no kernel


def test_nccls_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the names and arguments that NCCL and torch give them, in a trace without a plan."""
    message: dict[str, Any] = {"In msg nelems": 2**20, "dtype": "BFloat16", "Group size": 8}
    storage = "(ncclDevKernelArgsStorage<4096ul>)"
    events = [event(f"ncclDevKernel_SendRecv{storage}", 0, 100.0, "kernel", **message) for _ in range(3)]
    events.append(event(f"ncclDevKernel_AllGather_RING_LL{storage}", 0, 50.0, "kernel", **message))
    events.append(event(f"ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL{storage}", 0, 20.0, "kernel"))
    events.append(event("flash_fwd_kernel", 0, 900.0, "kernel"))
    path = written(tmp_path / "t.json", events)
    found = read_trace(path).collectives
    assert [(one.name, one.start_s, one.seconds, one.message_bytes) for one in found] == [
        *[("SendRecv", 0, pytest.approx(1e-4), 2**21)] * 3,
        ("AllGather", 0, pytest.approx(5e-5), 2**21),
        ("ReduceScatter", 0, pytest.approx(2e-5), None),
    ]
    assert main([str(path), "rank=0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["SendRecv", "2097152", "3", "100.0", "21"] in lines
    assert ["ReduceScatter", "-", "1", "20.0", "-"] in lines
    assert lines[-1][:5] == ["no", "operation", "of", "a", "plan"]


def on(stream: int, name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return event(name, ts, dur, cat, device=0, stream=stream)


def test_any_trace_says_how_much_communication_is_exposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks at 0-100 and 150-200; sends at 50-160, of which 100-150 is bare; an all-gather at 180-220, bare from 200,
    beside the copy at 205-215, which isn't compute; two kernels side by side count once."""
    events = [on(7, "gemm", 0, 100), on(8, "gemm", 20, 30), on(7, "flash", 150, 50)]
    events += [on(20, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 50, 110)]
    events += [on(20, "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork*)", 180, 40)]
    events += [on(7, "Memcpy DtoD (Device -> Device)", 205, 10, "gpu_memcpy"), event("aten::mm", 0, 999, "cpu_op")]
    for rank in (0, 1):
        written(tmp_path / f"r{rank}.json", events, distributedInfo={"rank": rank})
    written(tmp_path / "unranked.json", events[:1])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    text = [line.strip() for line in out.splitlines()]
    assert text.count("overlapped: 0.08 ms, 53.3% of communication") == 2
    assert text.count("exposed: 0.07 ms, 31.8% of the span") == 2
    assert text.count("compute: 0.15 ms, 68.2% of the span") == 2
    cells = [line.split() for line in text]
    assert cells.count(["SendRecv", "1", "0.11", "0.05"]) == cells.count(["AllGather", "1", "0.04", "0.02"]) == 2
    assert cells.count(["7", "compute+copies", "3", "0.16", "73%"]) == 2
    assert cells.count(["8", "compute", "1", "0.03", "14%"]) == 2
    assert [line.partition(":")[0] for line in text if "from the first kernel" in line] == [
        "rank 0 (r0.json)", "rank 1 (r1.json)", "unranked.json",
    ]  # fmt: skip


KERNELS = {AllGather: "AllGather_RING_LL", ReduceScatter: "ReduceScatter_Sum_bf16_RING_LL"}


def in_nccls_format(plans: Mapping[str, Plan], trace: Trace, steps: int) -> list[dict[str, Any]]:
    """The trace's transfers as kernels of NCCL, one after the other, among other kernels and in any order."""
    transfers = [
        (phase, index, op)
        for phase, plan in plans.items() for index, op in plan if isinstance(op, Transfer)
    ]  # fmt: skip
    events, at = [event("flash_fwd_kernel", 0, 900.0, "kernel")], 0.0
    for phase, index, op in transfers * steps:
        (sample,) = trace.ops[Mark(phase, index)]
        name = f"ncclDevKernel_{KERNELS.get(type(op), 'SendRecv')}(ncclDevKernelArgsStorage<4096ul>)"
        events.append(event(name, at, dur := 1e6 * (sample.end_s - sample.start_s), "kernel"))
        at += dur
    return events[::-1]


@pytest.mark.parametrize("method", ["all_gather", *map(exhaustive, ("ring", "ulysses", "usp"))])
def test_nccls_kernels_of_a_peer_are_the_transfers_of_our_plan(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step for step, in the order of each kind: where all take twice as long as simulated, links are half as fast."""
    keys = (f"method={method}", "seqlen=16k", "gpus=4", "mode=simulate")
    request, folder = point(*keys), tmp_path / "traces"
    folder.mkdir()
    plans, traces = choose(request).plans, of_simulation(request, {"blocks": 1.0, "transfers": 2.0})
    for rank, trace in traces.items():
        written(folder / f"rank{rank}.json", in_nccls_format(plans, trace, steps=2), distributedInfo={"rank": rank})
    rows, _ = compared(request, {rank: read_trace(folder / f"rank{rank}.json") for rank in traces})
    assert rows and {row.kind for row in rows} == {INSIDE}
    assert all(row.error == pytest.approx(-0.5, rel=1e-6) for row in rows)
    path = point_file(tmp_path, *keys)
    assert main([str(folder), f"point={path}"]) == 0
    shown = capsys.readouterr().out
    assert "inside nodes 0.5 times as fast" in shown and "blocks" not in shown and "with the fitted" not in shown
    cut = written(tmp_path / "cut.json", json.loads((folder / "rank0.json").read_text())["traceEvents"][1:])
    assert main([str(cut), "rank=0", f"point={path}"]) == 2
    assert "kernels of NCCL, and a step of the plan" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": 3}', "\x1f\x8b broken"])
def test_what_is_no_trace(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(RequestError, match="is no trace of torch's profiler"):
        read_trace(path)


def test_bad_arguments_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, file = tmp_path / "empty", str(FOLDER / "rank0.json.gz")
    empty.mkdir()
    other = written(tmp_path / "other.json", [event("sp_bench update 0", 0, 1)], distributedInfo={"rank": 0})
    unranked = written(tmp_path / "unranked.json", [event(annotation("forward", 0), 0, 1)])
    for arguments, message in (
        ([], "no file: a trace is needed"),
        ([str(empty)], "no file: a trace is needed"),
        (["run", "method=ring"], "out: a folder is needed"),
        (["run", f"out={tmp_path}", "gpus=256"], "mode=measure on cluster=h100_ndr400: this machine has"),
        ([file], "point=null: the traces don't say what was run"),
        ([file, file, f"point={point_file(tmp_path, *KEYS)}"], f"{file}: is a second trace of rank 0"),
        ([str(unranked)], "point=null: the traces don't say what was run"),
        (
            [str(unranked), f"point={point_file(tmp_path, *KEYS)}"],
            f"{unranked}: doesn't say its rank; rank=0 would work",
        ),
        ([file, f"point={unranked}"], f"point={unranked}: has no config"),
        ([str(other), f"point={point_file(tmp_path, *KEYS)}"], "the trace of rank 0: has no operation of the forward"),
        ([file, "row=3"], "row: there is no such key; did you mean rows"),
    ):
        assert main(arguments) == 2
        assert f"sp_bench.traces: {message}" in capsys.readouterr().err
