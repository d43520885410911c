"""The output of the doctor and of the first hour without a GPU, here and in SLURM. Needs root, slurm-wlm and munge."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.launch import host_name
from sp_bench.resources import ROOT
from sp_bench.slurm.testcluster import SlurmBox

DOCTOR = ("sp_bench.doctor", "dtype=float32")
HOUR = ("sp_bench.first_hour", "out=first_hour", "quick=true")
HERE = ("ranks=2",)
STEP = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--kill-on-bad-exit=1")
TIMEOUT_S = 400


def printed(command: Sequence[str], folder: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> str:
    """The output of a command in `folder`. Raises RuntimeError if it fails."""
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


def section(folder: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> str:
    """The doctor, then the first hour with its report."""
    folder.mkdir()
    keys = () if before else HERE
    doctor, hour = ([*command, *keys] for command in (DOCTOR, HOUR))
    parts = [transcript(doctor, printed(doctor, folder, environment, before), before)]
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


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def here(_: Runs) -> str:
    """On this machine's CPU ranks."""
    with tempfile.TemporaryDirectory() as name:
        return section(Path(name) / "here", os.environ | ENVIRONMENT)


def step(_: Runs) -> str:
    """A step of two nodes in a SLURM of this machine."""
    with tempfile.TemporaryDirectory() as name:
        box = SlurmBox(Path(name) / "slurm")
        box.up()
        try:
            return section(Path(name) / "step", box.environment() | ENVIRONMENT, STEP)
        finally:
            box.down()
