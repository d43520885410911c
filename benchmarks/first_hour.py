"""The first hour without a GPU: `python -m benchmarks.first_hour` writes docs/results/first_hour.md.

What the doctor prints, then the steps of the first hour and its report. Both run on this machine's CPU ranks, and as a
step of two nodes in a SLURM on this machine (slurm/testcluster), whose GPUs are pretend ones. Shapes are those of
`quick=true`. What each step prints is left out here, as dots, and so is this machine's name. Needs root, and the Debian
packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.reports import RESULTS, about
from sp_bench.launch import host_name
from sp_bench.machine import cores_here
from sp_bench.resources import ROOT
from sp_bench.slurm.testcluster import SlurmBox

REPORT = RESULTS / "first_hour.md"
DOCTOR = ("sp_bench.doctor", "dtype=float32")
HOUR = ("sp_bench.first_hour", "out=first_hour", "quick=true")
HERE = ("ranks=2",)
STEP = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--kill-on-bad-exit=1")
TIMEOUT_S = 400


def printed(command: Sequence[str], folder: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> str:
    """What a command prints in `folder`. Raises RuntimeError if it fails."""
    launched = [*before, *([f"--chdir={folder}"] if before else []), sys.executable, "-m", *command]
    done = subprocess.run(launched, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(launched)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def transcript(command: Sequence[str], output: str, before: Sequence[str] = ()) -> str:
    """A command as it is typed, with its output."""
    return f"```text\n$ {' '.join([*before, 'python', '-m', *command])}\n{_of_any_machine(output)}\n```"


def of_steps(output: str) -> str:
    """The first hour's own lines: a step's command, and the last one; dots for what the steps print."""
    *lines, last = output.strip().splitlines()
    return "\n...\n".join([*(line for line in lines if re.match(r"\w+: python -m ", line)), last])


def section(title: str, folder: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> str:
    """The doctor, then the first hour with its report."""
    folder.mkdir()
    keys = () if before else HERE
    doctor, hour = ([*command, *keys] for command in (DOCTOR, HOUR))
    parts = [f"## {title}", transcript(doctor, printed(doctor, folder, environment, before), before)]
    parts.append(transcript(hour, of_steps(printed(hour, folder, environment, before)), before))
    report = _of_any_machine((folder / "first_hour" / "report.md").read_text())
    parts += ["Its `report.md`:", re.sub(r"^#", "###", report, flags=re.MULTILINE)]
    return "\n\n".join(parts)


def _of_any_machine(text: str) -> str:
    """The text without the name of this machine; columns stay in their places."""
    name, shown = re.escape(host_name()), "host"
    wider = len(host_name()) - len(shown)
    in_columns = rf"\b{name}\b((?:[^ \n]| (?! ))*)( {{2,}})"
    text = re.sub(in_columns, lambda found: shown + found[1] + " " * max(1, len(found[2]) + wider), text)
    return re.sub(rf"\b{name}\b", shown, text).strip()


def main() -> None:
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [section("On this machine's CPU ranks", folder / "here", os.environ | paths)]
        box = SlurmBox(folder / "slurm")
        box.up()
        try:
            parts.append(section("A step of two nodes in SLURM", folder / "step", box.environment() | paths, STEP))
        finally:
            box.down()
    text = f"""# The first hour without a GPU

Made by `python -m benchmarks.first_hour` on {cores_here()} cores. [Points on GPUs](../explanation/gpu.md) says what the
rows and steps are; on GPUs there are more of them.

{about(__doc__)}

"""
    REPORT.write_text(text + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
