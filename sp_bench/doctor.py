r"""python -m sp_bench.doctor [--json] [key=value ...]

Says in about a minute what this machine or allocation can run, and what is misconfigured, with the fix: a row for each
check, with a status. ok: nothing to do. warn: points run, and figures may be slower or noisier than they need be. fail:
points can't be measured, or would be wrong. Ranks look at their hosts, pass each kernel through the correctness gate,
exchange messages pair by pair and, on GPUs, compute while nvidia-smi is asked for clocks and power.

  python -m sp_bench.doctor
  srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none \
      --cpus-per-task=8 --distribution=block:block \
      python -m sp_bench.doctor

  --json            print the rows and the facts behind them as JSON, and nothing else
  out=null          a file for the same JSON
  device=auto       cpu or cuda; auto: cuda where there is a GPU and a torch for CUDA
  ranks=auto        auto: the launch's; else one a GPU or, on CPUs, as many as cores, from 2 to 8
  dtype=auto        auto: bfloat16, on CPUs float32 as well
  head_dim=128      of the blocks that go through the gate

Exit codes: 0 no row fails, 1 a row fails, 2 a request that can't be served.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sp_bench import records
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.cli.drive import drive
from sp_bench.diagnosing.examine import Examination, examine
from sp_bench.diagnosing.findings import as_json, as_text, counts
from sp_bench.errors import RequestError, unknown
from sp_bench.launch import launched
from sp_bench.machine import cores_here, gpus_here, torch_has_cuda
from sp_bench.point.mode import AskedDevice
from sp_bench.reading import Count, read
from sp_bench.terminal import fitted
from sp_bench.workload import TOLERANCE

COMMAND = ("doctor", "ranks=auto", "what this machine can run, what is wrong, and the fix")

DEFAULTS: dict[str, Any] = {"out": None, "device": "auto", "ranks": "auto", "dtype": "auto", "head_dim": 128}
MOST_CPU_RANKS = 8
DTYPES = {"cuda": ("bfloat16",), "cpu": ("float32", "bfloat16")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    return drive(lambda: run_command("sp_bench.doctor", __doc__ or "", doctor, argv, flags=("--json",)))


def doctor(arguments: Sequence[str]) -> int:
    """Examine, print and write; return the exit code. Raises RequestError for an invalid argument."""
    rest = [argument for argument in arguments if argument != "--json"]
    options: dict[str, Any] = {**DEFAULTS, **only_keys(rest, DEFAULTS)}
    examination = examined(options)
    text = json.dumps(report(examination, rest), indent=1)
    if options["out"]:
        try:
            records.write_whole(Path(options["out"]), text + "\n")
        except OSError as error:
            rule = f"can't be written ({error.strerror})"
            raise RequestError(f"out={options['out']}", rule, "out=doctor.json would work") from None
    print(text if len(rest) < len(arguments) else fitted(as_text(examination.findings)))
    return 1 if counts(examination.findings)["fail"] else 0


def examined(options: dict[str, Any]) -> Examination:
    """The examination that the options ask for. Raises RequestError for an invalid value."""
    device = device_of(options["device"])
    head_dim = read(Count, options["head_dim"], "head_dim")
    dtypes = DTYPES[device] if options["dtype"] == "auto" else (options["dtype"],)
    for dtype in dtypes:
        if dtype not in TOLERANCE:
            raise unknown("dtype", dtype, TOLERANCE)
    return examine(ranks_of(options["ranks"], device, MOST_CPU_RANKS), launched(), device, dtypes, head_dim)


def ranks_of(given: Any, device: str, most_cpu_ranks: int) -> int:
    """The number of ranks: as given or, for auto, the launch's, one a GPU, or as many as cores from 2 to a limit.

    Raises RequestError for an invalid number, or one that the launch or the GPUs can't serve.
    """
    launch, gpus = launched(), gpus_here()
    if given == "auto":
        return launch.n if launch else gpus if device == "cuda" else min(max(cores_here(), 2), most_cpu_ranks)
    ranks = read(Count, given, "ranks")
    if launch:
        launch.refuse(ranks)
    elif device == "cuda" and ranks > gpus:
        rule = f"this machine has {gpus} GPUs, and ranks have one each"
        raise RequestError(f"ranks={ranks}", rule, f"ranks={gpus} would work")
    return ranks


def report(found: Examination, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON form: when and by what, the findings, and the facts they follow from."""
    kept = [argument for argument in arguments if not argument.startswith("out=")]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    made = {
        "command": " ".join(["python -m sp_bench.doctor", *kept]),
        "when": when,
        "code_version": records.code_version(),
    }
    return {"made": made, **as_json(found.findings, **found.facts)}


def device_of(given: Any) -> str:
    """cpu or cuda; for auto, cuda where it can be used. Raises RequestError for cuda without a GPU."""
    device = read(AskedDevice, given, "device")
    if device == "auto":
        return "cuda" if gpus_here() and torch_has_cuda() else "cpu"
    if device == "cuda" and not gpus_here():
        raise RequestError("device=cuda", "this machine has no GPU", "device=cpu would work")
    return device


if __name__ == "__main__":
    sys.exit(main())
