"""The first hour of a stranger, as an earlier commit printed it and as this code prints it.

before.json is `json.dumps(printed(CHECKOUT, "before"))` on a checkout of COMMIT.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sp_bench.analysis.runs import Runs
from sp_bench.resources import ROOT
from sp_bench.slurm.testcluster import SlurmBox

COMMIT = "7eab2cb"
COLUMNS, SHOWN, CUT, TIMEOUT_S = 80, 12, 110, 300
WITHOUT_WANDB = "import sys\nsys.modules['wandb'] = None\n"
HELD = (
    "sweep=cpu_methods method=ring gpus=2 seqlen=512 heads=4 slurm.sbatch=[--hold] slurm.variables.SLURM_CONF=BOX "
    "folder=held"
)
KERNELS = (
    ("flash_fwd_kernel", 0, 7), ("ncclDevKernel_SendRecv", 50, 20), ("flash_fwd_kernel", 200, 7),
    ("ncclDevKernel_AllGather_RING_LL", 250, 20),
)  # fmt: skip
"""(name, start, stream) of the kernels of somebody's profiler trace, each of 100 microseconds."""
TRACE = [
    {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": 100,
        "pid": 0,
        "tid": stream,
        "args": {"stream": stream},
    }
    for name, ts, stream in KERNELS
]


class Item(NamedTuple):
    """A complaint in a line, and commands that show it. `before` are those of the earlier commit, if they differ."""

    words: str
    now: Sequence[str]
    before: Sequence[str] = ()
    last: bool = False
    """Whether the last lines are the ones to see."""


ITEMS = (
    Item(
        "The first command of a core install fails, since it has no wandb",
        ["python -m sp_bench method=mesh gpus=16"],
        last=True,
    ),
    Item(
        "A point's table is wider than the terminal, and long",
        ["python -m sp_bench method=mesh gpus=16 seqlen=64k logger=none"],
    ),
    Item("The README's first command doesn't answer its first question", ["head -n 20 CHECKOUT/README.md"]),
    Item(
        "A training step on this machine takes minutes, and nothing says so",
        ["python -m sp_bench workload=train model=tiny method=mesh gpus=4 cluster=local logger=none"],
    ),
    Item(
        "A sweep takes no option of one method, and unknown keys get no help",
        [
            "python -m sp_bench -m method=mesh,usp,ring mesh.ulysses=auto usp.ulysses=8 gpus=16 seqlen=64k logger=none",
            "python -m sp_bench layout=zigzag logger=none",
            "python -m sp_bench data.lengths=[1k,3k] logger=none",
        ],
        [
            "python -m sp_bench -m method=mesh,usp,ring method.ulysses=auto gpus=16 seqlen=64k logger=none",
            "python -m sp_bench layout=zigzag logger=none",
            "python -m sp_bench data.lengths=[1k,3k] logger=none",
        ],
    ),
    Item(
        "A file with one bad number is printed whole",
        ["python -m sp_bench mask=document data=file data.path=lengths.txt seqlen=2M logger=none"],
    ),
    Item(
        "A sweep doesn't say why its tasks don't run",
        [f"python -m slurm.sweep {HELD}", "python -m slurm.sweep status held"],
    ),
    Item(
        "An upload names a W&B that was never asked",
        [
            "python -m sp_bench method=ring gpus=2 seqlen=8k baseline=null mode=simulate logger=none results_dir=one",
            "python -m sp_bench.wandb_upload one mode=offline",
            "python -m sp_bench.wandb_upload one mode=offline",
        ],
        last=True,
    ),
    Item("Somebody's trace has no overlap and no exposed time", ["python -m sp_bench.traces rank0.json"]),
    Item(
        "Plausible wrong commands get poor answers",
        [
            f"python -m sp_bench {words}"
            for words in (
                "method=ring method.tile=[4,4]",
                "memory=60GB",
                "baseline=none gpus=2 seqlen=8k mode=simulate",
                "--method ring",
                "seqlen=1e6",
            )
        ],
    ),
    Item(
        "make is silent, and a dry run has no summary",
        [
            "make -n --always-make -C CHECKOUT bench",
            "python -m slurm.sweep sweep=cpu_methods --dry-run",
        ],
        last=True,
    ),
    Item(
        "There is no report of one's own records to paste",
        [
            "python -m sp_bench -m method=ring,mesh gpus=2 seqlen=8k mode=simulate logger=none results_dir=A",
            "python -m analysis.compare A A --markdown",
        ],
        last=True,
    ),
    Item(
        "Only some tools have a console script, and no page lists them all",
        ["python -m sp_bench --help"],
        ["grep -A 8 project.scripts CHECKOUT/pyproject.toml"],
    ),
)


def ran(
    command: str, places: Mapping[str, str], folder: Path, environment: Mapping[str, str], *, last: bool
) -> dict[str, Any]:
    """A command's exit code, its first or `last` lines, their number and widest. It is run in `folder`.

    `places` are names that stand for paths in commands and outputs.
    """
    words = shlex.split(command)
    for name, path in places.items():
        words = [word.replace(name, path) for word in words]
    words[0] = sys.executable if words[0] == "python" else words[0]
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
        text, code = done.stdout.decode(), done.returncode
    except subprocess.TimeoutExpired as late:
        text, code = (late.stdout or b"").decode() + f"(stopped after {TIMEOUT_S} s)", -1
    for place, path in ((".", str(folder)), ("PYTHON", sys.prefix), *places.items()):
        text = text.replace(path, place)
    lines = text.splitlines()
    shown = lines[-SHOWN:] if last else lines[:SHOWN]
    cut = [f"{line[:CUT]}..." if len(line) > CUT else line.rstrip() for line in shown]
    widest = max(map(len, lines), default=0)
    return {"command": command, "lines": cut, "count": len(lines), "widest": widest, "code": code}


def printed(checkout: Path, when: str) -> list[list[dict[str, Any]]]:
    """The output of each item's commands; `when` is before or now."""
    outputs = []
    with tempfile.TemporaryDirectory() as name:
        hidden = Path(name) / "hidden"
        hidden.mkdir()
        (hidden / "sitecustomize.py").write_text(WITHOUT_WANDB)
        box = SlurmBox(Path(name) / "slurm")
        box.up()
        try:
            for number, item in enumerate(ITEMS, start=1):
                folder = Path(name) / str(number)
                folder.mkdir()
                (folder / "rank0.json").write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": TRACE}))
                (folder / "lengths.txt").write_text("1000\n" * 1000 + "l92\n" + "1000\n" * 1000)
                paths = [str(hidden)] * (number == 1) + [str(checkout)]
                environment = box.environment() | {
                    "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1",
                }  # fmt: skip
                places = {"CHECKOUT": str(checkout), "BOX": str(box.conf)}
                commands = (item.before if when == "before" else ()) or item.now
                outputs.append([ran(one, places, folder, environment, last=item.last) for one in commands])
        finally:
            box.down()
    return outputs


def items(runs: Runs) -> str:
    """Each item with what its commands printed, before and now."""
    before = json.loads(Path(__file__).with_name("before.json").read_text())
    now = runs.kept("now", lambda: printed(ROOT, "now"))
    parts = []
    for number, (item, *both) in enumerate(zip(ITEMS, before, now, strict=True), start=1):
        parts.append(f"## {number}. {item.words}")
        for name, outputs in zip(("Before", "Now"), both, strict=True):
            blocks = "\n\n".join(_block(output, last=item.last) for output in outputs)
            parts.append(f"{name}:\n\n````text\n{blocks}\n````")
    return "\n\n".join(parts)


def _block(output: Mapping[str, Any], *, last: bool) -> str:
    """A command and its output; what is left out is counted."""
    shown, more = output["lines"], output["count"] - len(output["lines"])
    counted = f"{more} more lines; " if more else ""
    left_out = [f"[{counted}the widest has {output['widest']} characters]"] if more or output["widest"] > CUT else []
    code = [f"[exit code {output['code']}]"] if output["code"] else []
    parts = [*left_out, *shown] if last else [*shown, *left_out]
    return "\n".join([f"$ {output['command']}", *parts, *code])


def commit(_: Runs) -> str:
    """The commit of the texts before."""
    return COMMIT


def shown(_: Runs) -> str:
    """The most lines of an output that are shown."""
    return str(SHOWN)


def cut(_: Runs) -> str:
    """The most characters of a line that are shown."""
    return str(CUT)
