"""python -m sp_bench.traces run out=DIR key=value ...   and   python -m sp_bench.traces FILE|DIR ... [key=value ...]

`run` executes a point under torch's profiler and writes a trace of each rank to DIR, and the point to DIR/point.json.
Its keys are those of python -m sp_bench; iters and warmup count as there.

Without `run`, traces are read, .json or .json.gz, and compared with the simulator: each operation of the plan, how long
it took and how long it was simulated to take; then the step with the cluster's figures, and with figures fitted to the
traced operations. Operations are found by their names, which every execution of a plan has under torch's profiler, that
of SequenceParallelAttention in your own training too. Of any trace with kernels of a GPU, whosever code that was, each
rank's busy time by stream, the overlap of communication and compute, and the exposed communication of each collective
are printed, and NCCL's kernels listed. In a trace of other code, which names no operation, they are taken in order for
the transfers of the plan of point=: the method of ours with its algorithm.

  point=null   the point of the traces, if it is not in a DIR with them: a point.json, or a record of python -m sp_bench
  rank=null    the rank of a single FILE that doesn't say it
  out=null     write the cluster with fitted figures to this file; FOLDER/cluster/NAME.yaml, for --config-dir FOLDER
  rows=20      how many operations are listed, those with the largest differences first; 0: all
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from sp_bench import records
from sp_bench.cli.arguments import keys_and_paths, run_command, writable_folder
from sp_bench.cli.compose import Composer
from sp_bench.cli.drive import drive
from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.launch import launched
from sp_bench.measure.homes import homes_for
from sp_bench.measure.pool import RankFailure
from sp_bench.measure.ranks import open_ranks
from sp_bench.plan.method import Method
from sp_bench.point import Request, resolve
from sp_bench.point.choose import choose
from sp_bench.point.measured import spec_of
from sp_bench.reading import Natural, read
from sp_bench.terminal import fitted, say
from sp_bench.tracing.compared import BLOCKS, Row, compared, refit, steps
from sp_bench.tracing.kineto import Collective, Trace, read_trace
from sp_bench.tracing.streams import lines

COMMAND = ("traces", "run out=DIR key=value ... | DIR rows=20", "profiler traces beside the simulator, step by step")

DEFAULTS: dict[str, Any] = {"point": None, "rank": None, "out": None, "rows": 20}
POINT = "point.json"
LABEL = 60
NO_PLAN = "no operation of a plan is named in these traces: with point=, NCCL's kernels are compared with its plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    return drive(lambda: run_command("sp_bench.traces", __doc__ or "", _answer, argv))


def _answer(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return _run(arguments[1:])
    given, paths = keys_and_paths(arguments, DEFAULTS)
    return _compare({**DEFAULTS, **given}, [Path(path) for path in paths])


def _run(arguments: list[str]) -> int:
    """Execute a point under the profiler. Raises RequestError if it can't be measured here, or has no plan."""
    require("run", "tracing")
    out = next((a.removeprefix("out=") for a in arguments if a.startswith("out=")), None)
    if out is None:
        raise RequestError("out", "a folder is needed", "out=traces would work")
    with Composer() as composer:
        point = composer.point([a for a in arguments if not a.startswith("out=")])
        request = resolve({**composer.compose(point), "mode": "measure"}, launched())
    if not isinstance(request.method, Method):
        raise RequestError(f"method={request.method.name}", "has no plan to match", "a method of this suite would work")
    folder, choice = writable_folder("out", out), choose(request)
    hosts = None if request.launch else homes_for(request.cluster, choice.problem.n)
    try:
        with open_ranks(choice.problem.n, request.timeout_s, request.launch, hosts, request.devices) as pool:
            job, spec = "sp_bench.tracing.recorder:traced", spec_of(request, choice)
            contents = pool.run(job, spec, request.iters, request.warmup)
    except RankFailure as failure:
        say(f"sp_bench.traces: {failure}")
        return 1
    for rank, content in enumerate(contents):
        records.write_whole(folder / f"rank{rank}.json.gz", content)
    records.write_whole(folder / POINT, json.dumps({"config": request.config}, indent=1, default=str) + "\n")
    compares = f"python -m sp_bench.traces {folder} compares them with the simulator"
    print(f"{folder}: traces of {len(contents)} ranks; {compares}")
    return 0


def _compare(options: Mapping[str, Any], paths: Sequence[Path]) -> int:
    files, point = _files(options, paths)
    if point is None and options["rank"] is None:
        return _unmatched(files)
    traces = _by_rank(options, files)
    _print_traces([(f"rank {rank}", trace) for rank, trace in traces.items()])
    named = any(trace.ops for trace in traces.values())
    if not named and not (point and any(trace.collectives for trace in traces.values())):
        print(fitted(NO_PLAN))
        return 0
    if point is None:
        raise _no_point()
    request = _request(point)
    rows, choice = compared(request, traces)
    name = Path(options["out"]).stem if options["out"] else "refit"
    config = refit(request, rows, name)
    print("\n".join(_lines(rows, read(Natural, options["rows"], "rows"))))
    for step in steps(choice, traces, config) if named else ():
        print(
            f"{step.phase}: traced {1e3 * step.measured_s:.4g} ms, simulated {1e3 * step.simulated_s:.4g} ms "
            f"({step.simulated_s / step.measured_s - 1:+.0%}), with the fitted figures {1e3 * step.refit_s:.4g} ms "
            f"({step.refit_s / step.measured_s - 1:+.0%})"
        )
    print(config["sources"]["refit"])
    if options["out"]:
        path = Path(options["out"])
        writable_folder("out", str(path.parent))
        records.write_whole(path, yaml.safe_dump(config, sort_keys=False, width=118, default_flow_style=None))
        print(f"{path}: the cluster with the fitted figures")
    return 0


def _print_traces(labelled: Sequence[tuple[str, Trace]]) -> None:
    """Print the streams of each trace that has kernels of a GPU, and NCCL's kernels of all."""
    for label, trace in labelled:
        if trace.kernels:
            print(fitted("\n".join(lines(label, trace.kernels))))
    if collectives := [one for _, trace in labelled for one in trace.collectives]:
        print("\n".join(_nccl_lines(collectives)))


def _unmatched(files: Sequence[Path]) -> int:
    """Print what traces say without a point. Raises RequestError if they name a plan's operations, which need one."""
    traces = [(file.name, read_trace(file)) for file in files]
    _print_traces([(name if t.rank is None else f"rank {t.rank} ({name})", t) for name, t in traces])
    if any(trace.ops for _, trace in traces):
        raise _no_point()
    print(fitted(NO_PLAN))
    return 0


def _no_point() -> RequestError:
    return RequestError(
        "point=null", "the traces don't say what was run", f"point=DIR/{POINT}, or a record, would work"
    )


def _files(options: Mapping[str, Any], paths: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """The traces' files, and the file of their point. Raises RequestError for none."""
    point = Path(options["point"]) if options["point"] else None
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(
                file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")) and file.name != POINT
            )
            if point is None and (path / POINT).exists():
                point = path / POINT
        else:
            files.append(path)
    if not files:
        raise RequestError("no file", "a trace is needed", "python -m sp_bench.traces FILE would work")
    return files, point


def _by_rank(options: Mapping[str, Any], files: Sequence[Path]) -> dict[int, Trace]:
    """The traces by rank. Raises RequestError for files that are none, or say no rank."""
    given, by_rank = options["rank"], {}
    for file in files:
        trace = read_trace(file)
        rank = read(Natural, given, "rank") if given is not None and len(files) == 1 else trace.rank
        if rank is None:
            raise RequestError(str(file), "doesn't say its rank", "rank=0 would work, with one FILE")
        if rank in by_rank:
            raise RequestError(str(file), f"is a second trace of rank {rank}", "one trace of each rank would work")
        by_rank[rank] = replace(trace, rank=rank)
    return by_rank


def _request(point: Path) -> Request:
    """The point of the traces, to be simulated. Raises RequestError if the file has none, or a peer's."""
    try:
        config = json.loads(point.read_text())["config"]
        request = resolve({**config, "mode": "simulate"})
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"point={point}", f"has no config ({error})", f"a {POINT} or a record would work") from None
    if not isinstance(request.method, Method):
        raise RequestError(f"point={point}", "has no plan: it is a peer's", "a method of this suite would work")
    return request


def _lines(rows: Sequence[Row], most: int) -> list[str]:
    """The operations that differ most, then each kind's total and typical error."""
    lines = [f"{'phase':<9} {'operation':<{LABEL}} {'traced, ms':>11} {'simulated':>11} {'error':>8}"]
    shown = sorted(rows, key=lambda row: -abs(row.simulated_s - row.measured_s))[: most or len(rows)]
    for row in shown:
        times = f"{1e3 * row.measured_s:>11.4g} {1e3 * row.simulated_s:>11.4g} {row.error:>+8.0%}"
        lines.append(f"{row.phase:<9} {row.label[:LABEL]:<{LABEL}} {times}")
    for kind, of in groupby(sorted(rows, key=lambda row: (row.kind != BLOCKS, row.kind)), key=lambda row: row.kind):
        of_kind = list(of)
        sums = [1e3 * sum(getattr(row, name) for row in of_kind) for name in ("measured_s", "simulated_s")]
        what = kind if kind == BLOCKS else f"transfers {kind}"
        typical = median(abs(row.error) for row in of_kind)
        lines.append(
            f"{what}: {len(of_kind)} of the plan, {sums[0]:.4g} ms traced, {sums[1]:.4g} ms simulated, "
            f"median absolute error {typical:.0%}"
        )
    return lines


def _nccl_lines(collectives: Sequence[Collective]) -> list[str]:
    """NCCL's kernels by name and message: how many, how long, and the rate of this rank's input."""

    def key(one: Collective) -> tuple[str, int]:
        return one.name, -1 if one.message_bytes is None else one.message_bytes

    lines = [f"{'NCCL kernel':<20} {'input, bytes':>14} {'number':>7} {'median, us':>11} {'GB/s':>8}"]
    for (name, size), of in groupby(sorted(collectives, key=key), key=key):
        seconds = [one.seconds for one in of]
        typical = median(seconds)
        rate = f"{size / typical / 1e9:>8.3g}" if size > 0 and typical else f"{'-':>8}"
        lines.append(f"{name:<20} {size if size >= 0 else '-':>14} {len(seconds):>7} {1e6 * typical:>11.1f} {rate}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
