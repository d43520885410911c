"""Questions of a new user, the commands that answer, their output in 80 columns, and the seconds until they print it.

The output is kept in the folder of records; without it the commands are run again, one after the other.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sp_bench.analysis.runs import Runs
from sp_bench.resources import ROOT

COLUMNS, SHOWN = 80, 40


class Question(NamedTuple):
    """A question in words, and at most three commands of `sp-bench` that answer it, in one folder."""

    words: str
    commands: Sequence[str]


QUESTIONS = (
    Question("Which method should I use?", ["advise gpus=8 seqlen=32k model=llama3_8b cluster=a100_hdr200"]),
    Question("How fast would Mesh-Attention be on 256 GPUs?", ["method=mesh gpus=256"]),
    Question("Three methods on two clusters?", ["-m method=ring,usp,mesh gpus=16 seqlen=64k cluster=h100_ndr400,b200"]),
    Question("Does it run here, and is it right?", ["doctor", "method=mesh gpus=2 cluster=local dtype=float32"]),
    Question("What does a whole training step take?", ["model=llama3_8b gpus=64 seqlen=256k"]),
    Question("What does a method do, step by step?", ["describe method=mesh gpus=4 method.tile=[2,2]"]),
    Question("What is this key, and which values has it?", ["help method.tile", "help cluster"]),
    Question("What went wrong here?", ["method=ring method.tile=[4,4]", "layout=zigzag", "advise memory=60"]),
    Question(
        "Did my change make it slower?",
        [
            "-m method=ring,zigzag gpus=2 cluster=local dtype=float32 results_dir=before",
            "-m method=ring,zigzag gpus=2 cluster=local dtype=float32 results_dir=after",
            "compare before after",
        ],
    ),
    Question("How do I submit a sweep?", ["sweep sweep=cpu_methods --dry-run"]),
)


def ran(command: str, folder: Path) -> dict[str, Any]:
    """Run a command; its lines, errors too, and the seconds until its first and its last one."""
    arguments = [sys.executable, "-m", "sp_bench", *shlex.split(command)]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    begun, first_s, lines = time.monotonic(), None, []
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            first_s = time.monotonic() - begun if first_s is None else first_s
            lines.append(line.rstrip().replace(str(folder), ".").replace(str(ROOT), "CHECKOUT"))
        code = process.wait()
    return {"command": command, "lines": lines, "first_s": first_s, "last_s": time.monotonic() - begun, "code": code}


def found(runs: Runs) -> list[list[dict[str, Any]]]:
    """The output of each question's commands."""

    def make() -> list[list[dict[str, Any]]]:
        answered = []
        for question in QUESTIONS:
            with tempfile.TemporaryDirectory() as folder:
                answered.append([ran(command, Path(folder)) for command in question.commands])
        return answered

    return runs.kept("answers", make)


def answers(runs: Runs) -> str:
    """Each question with its commands and what they print."""
    parts = []
    for number, (question, printed) in enumerate(zip(QUESTIONS, found(runs), strict=True), start=1):
        parts.append(f"## {number}. {question.words}")
        for one in printed:
            shown = one["lines"][:SHOWN]
            more = len(one["lines"]) - len(shown)
            rest = [f"... and {more} lines"] if more else []
            parts.append("\n".join(["```text", f"$ sp-bench {one['command']}", *shown, *rest, "```"]))
    return "\n\n".join(parts)


def seconds(runs: Runs) -> list[dict[str, object]]:
    """The seconds of each command."""
    return [
        {
            "command": f"`sp-bench {one['command']}`",
            "first line, s": f"{one['first_s']:.2f}",
            "last line, s": f"{one['last_s']:.2f}",
            "widest line": max(map(len, one["lines"]), default=0),
            "exit code": one["code"],
        }
        for printed in found(runs)
        for one in printed
    ]
