r"""python -m sp_bench.first_hour out=DIR [key=value ...]

The first hour on a machine: examines it, calibrates it, checks every method against fp64, and measures the methods side
by side, each point beside its simulation with the calibrated figures. All of it goes to one folder, to keep or to send.
Killed or cut off, and started again with the same keys, it goes on where it was: finished steps and points are kept.

  python -m sp_bench.first_hour out=first_hour
  srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none \
      --cpus-per-task=8 --distribution=block:block \
      python -m sp_bench.first_hour out=first_hour

  out=DIR           the folder; in a launch of several hosts, on a file system that they share
  device=auto       cpu or cuda; auto: cuda where there is a GPU and a torch for CUDA
  ranks=auto        1, 2, 8, 16 ...; auto: the launch's; else one a GPU or, on CPUs, as many as cores, from 2 to 4
  cluster=null      on GPUs that no cluster file has: the one whose links are similar
  quick=false       small shapes and few iterations, for a try: minutes instead of an hour
  force=false       go on though a row of the doctor fails

Writes manifest.json (options, versions, steps, files with their hashes), report.md, doctor.json, conf/cluster/here.yaml
(for --config-dir DIR/conf), the records of exactness/, headline/, simulated/ and, on one rank, alone/, and logs/.

Exit codes: 0 all steps ended well, 1 one did not, 2 a request that can't be served.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench import __main__ as points
from sp_bench import calibrate, doctor, records
from sp_bench.cli.arguments import flag, only_keys, run_command, writable_folder
from sp_bench.cli.drive import drive
from sp_bench.diagnosing.manifest import Manifest
from sp_bench.diagnosing.summary import report
from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.launch import launched
from sp_bench.methods import REGISTRY
from sp_bench.terminal import say

COMMAND = ("first-hour", "out=DIR quick=false", "doctor, calibration, exactness, points: all in one folder")

DEFAULTS: dict[str, Any] = {
    "out": "first_hour", "device": "auto", "ranks": "auto", "cluster": "null", "quick": "false", "force": "false",
}  # fmt: skip
MOST_CPU_RANKS = 4
ALONE_OF = {"cuda": 32, "cpu": 4}
"""The number of GPUs of which one rank is executed alone; every method can split the heads among them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a first hour."""

    keys: tuple[str, ...]
    """The keys that all points share."""
    exact_tokens: int
    """Tokens a rank of points that are only checked."""
    tokens: tuple[int, ...]
    """Tokens a rank of measured points."""
    iters: int


GPUS = Shape(
    keys=("heads=32", "kv_heads=8", "head_dim=128", "dtype=bfloat16"), exact_tokens=1024,
    tokens=(8192, 16384, 32768), iters=10,
)  # fmt: skip
CPUS = Shape(keys=("heads=8", "head_dim=64", "dtype=float32"), exact_tokens=64, tokens=(256, 512), iters=10)
QUICK_GPUS = Shape(keys=GPUS.keys, exact_tokens=256, tokens=(2048,), iters=5)
QUICK_CPUS = Shape(keys=("heads=4", "head_dim=16", "dtype=float32"), exact_tokens=32, tokens=(64,), iters=3)
SHAPES = {("cuda", False): GPUS, ("cpu", False): CPUS, ("cuda", True): QUICK_GPUS, ("cpu", True): QUICK_CPUS}

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "sp_bench.doctor": doctor.doctor, "sp_bench.calibrate": calibrate.calibrate, "sp_bench": points.answer,
}  # fmt: skip
"""The commands that steps run, by the module that `python -m` names."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of a first hour."""

    name: str
    module: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command as it is typed."""
        return ["python", "-m", self.module, *self.arguments]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    return drive(lambda: run_command("sp_bench.first_hour", __doc__ or "", first_hour, argv))


def first_hour(arguments: Sequence[str]) -> int:
    """Run all steps that are not done; return the exit code. Raises RequestError for an invalid argument."""
    given = only_keys(arguments, DEFAULTS)
    if "out" not in given:
        raise RequestError("out", "a folder is needed", "out=first_hour would work")
    require("run", "measuring")
    options = {**DEFAULTS, **given}
    device, force = doctor.device_of(options["device"]), flag(options, "force")
    ranks = doctor.ranks_of(options["ranks"], device, MOST_CPU_RANKS)
    folder = writable_folder("out", options["out"])
    kept = {"device": device, "ranks": ranks, "cluster": options["cluster"], "quick": flag(options, "quick")}
    manifest = Manifest(folder, kept)
    for step in steps(folder, **kept):
        if manifest.done(step.name):
            print(f"{step.name}: done before", flush=True)
            continue
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        manifest.begin(step.name, step.command)
        code = _run(step, folder / "logs" / f"{step.name}.txt")
        manifest.end(step.name, code)
        _write_report(folder, manifest)
        if step.name == "doctor" and code and not force:
            say(f"the doctor failed: {_failed(folder / 'doctor.json')}; force=true would go on")
            return 1
        if step.name == "calibrate" and code:
            return 1  # the other steps need its file
    _write_report(folder, manifest)
    codes = {name: step["exit_code"] for name, step in manifest.steps().items()}
    failed = [name for name, code in codes.items() if code and not (name == "doctor" and force)]
    print(f"{folder}: {'all steps ended well' if not failed else 'see ' + ', '.join(failed)}; {folder}/report.md")
    return 1 if failed else 0


def _failed(path: Path) -> str:
    """The rows of the doctor's that failed, as it wrote them."""
    if not path.exists():
        return f"it ended without {path}"
    rows = json.loads(path.read_text())["findings"]
    return "; ".join(f"{row['check']}: {row['found']}" for row in rows if row["status"] == "fail") or f"see {path}"


def steps(folder: Path, *, device: str, ranks: int, cluster: str, quick: bool) -> list[Step]:
    """The steps of a first hour in order."""
    shape, launch = SHAPES[device, quick], launched()
    conf = folder / "conf"
    cluster_keys = ("--config-dir", str(conf), "cluster=here")
    if device == "cuda" and launch and launch.ranks_here < ranks:
        cluster_keys += (f"cluster.gpus_per_node={launch.ranks_here}",)
    common = (*cluster_keys, *shape.keys, "logger=none", f"device={device}")
    methods = ",".join(name for name in REGISTRY if name != "reference")
    several = "method=ring" if ranks == 1 else f"method={methods}"
    exact = (f"seqlen={shape.exact_tokens * ranks}", "mask=causal,full", "iters=1", "warmup=0", "parts=false")
    headline = (f"seqlen={','.join(str(tokens * ranks) for tokens in shape.tokens)}", f"iters={shape.iters}")

    def sweep(name: str, *keys: str) -> Step:
        return Step(name=name, module="sp_bench", arguments=("-m", *common, *keys, f"results_dir={folder / name}"))

    calibration = [f"name=here out={conf}/cluster/here.yaml device={device}", f"quick={str(quick).lower()}"]
    calibration += [f"cluster={cluster}"] if cluster != "null" else []
    width = next(key for key in shape.keys if key.startswith("head_dim="))
    all_steps = [
        Step(name="doctor", module="sp_bench.doctor",
             arguments=(f"device={device}", f"ranks={ranks}", width, f"out={folder}/doctor.json")),
        Step(name="calibrate", module="sp_bench.calibrate", arguments=(*" ".join(calibration).split(), width)),
        sweep("exactness", several, f"gpus={ranks}", "mode=measure", *exact),
        sweep("headline", several, f"gpus={ranks}", "mode=measure", *headline),
        sweep("simulated", several, f"gpus={ranks}", "mode=simulate", "trace=0", *headline),
    ]  # fmt: skip
    if ranks == 1:
        of = ALONE_OF[device]
        keys = (f"gpus={of}", "mode=alone", f"seqlen={shape.tokens[0] * of}", f"iters={shape.iters}")
        all_steps.append(sweep("alone", f"method={methods}", *keys))
    return all_steps


def _run(step: Step, log: Path) -> int:
    """Run a step in this process, which drives the ranks of a launch; return its exit code."""
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file, _shown_and_kept(file):
        print("$", " ".join(step.command))
        try:
            return COMMANDS[step.module](list(step.arguments))
        except RequestError as error:
            say(f"{step.module}: {error}")
            return 2


@contextlib.contextmanager
def _shown_and_kept(file: io.TextIOBase) -> Iterator[None]:
    """Copy what is printed to a file."""
    with (
        contextlib.redirect_stdout(_Copied(sys.stdout, file)),  # pyright: ignore[reportArgumentType]
        contextlib.redirect_stderr(_Copied(sys.stderr, file)),  # pyright: ignore[reportArgumentType]
    ):
        yield


class _Copied(io.TextIOBase):
    """A text stream that is no terminal, so that no progress bar is drawn."""

    def __init__(self, *streams: Any) -> None:
        super().__init__()
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
            stream.flush()
        return len(text)


def _write_report(folder: Path, manifest: Manifest) -> None:
    records.write_whole(folder / "report.md", report(folder, manifest.steps()))
    manifest.list_files()


if __name__ == "__main__":
    sys.exit(main())
