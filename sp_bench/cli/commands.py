"""The commands: `sp-bench NAME ...`, or python -m MODULE. Imports little: each module when its command is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from sp_bench.errors import RequestError
from sp_bench.terminal import say


@dataclass(frozen=True)
class Command:
    """A command of `sp-bench`."""

    module: str
    """The module that `python -m` runs."""
    usage: str
    """Its arguments, with the keys that are its own."""
    does: str
    """In at most 62 characters."""
    main_in: str = ""
    """The module below it that has main(arguments), if not itself."""

    def run(self, arguments: Sequence[str]) -> int:
        """Run it; return the exit code."""
        try:
            module = import_module(self.module + self.main_in)
        except RequestError as error:  # an extra that isn't installed
            say(f"{self.module}: {error}")
            return 2
        return module.main(list(arguments))


IN_MAIN = ".__main__"
COMMANDS = {
    "run": Command(
        "sp_bench", "[-m] key=value ...", "a point beside a baseline; with -m each combination of values", IN_MAIN
    ),
    "advise": Command(
        "sp_bench.advise",
        "gpus=64 seqlen=1M cluster=... memory=60GB plots=FILE changes=false | batch_tokens=4M",
        "ranks all methods for a cluster, and says how sure that is",
        IN_MAIN,
    ),
    "describe": Command(
        "sp_bench.describe", "key=value ...", "draws a method: assignment matrix, steps, a rank's program"
    ),
    "doctor": Command("sp_bench.doctor", "ranks=auto", "what this machine can run, what is wrong, and the fix"),
    "calibrate": Command(
        "sp_bench.calibrate", "name=calibrated quick=false", "measures this machine and writes a cluster file"
    ),
    "first-hour": Command(
        "sp_bench.first_hour", "out=DIR quick=false", "doctor, calibration, exactness, points: all in one folder"
    ),
    "conform": Command(
        "sp_bench.conform",
        "my_module:fn sizes=1,2,4 checks=out,dq profile=short",
        "checks your attention against fp64, as training calls it",
        IN_MAIN,
    ),
    "sweep": Command(
        "sp_bench.slurm.sweep",
        "sweep=NAME | status | resume | cancel DIR",
        "points as SLURM job arrays; status, resume, cancel",
    ),
    "traces": Command(
        "sp_bench.traces",
        "run out=DIR key=value ... | DIR rows=20",
        "profiler traces beside the simulator, step by step",
    ),
    "compare": Command(
        "sp_bench.analysis.compare", "A B same=0.02", "SAME, FASTER, SLOWER or AMBIGUOUS, point by point"
    ),
    "explore": Command(
        "sp_bench.analysis.explore", "FOLDER ... drawings=500", "one page to filter, draw and compare records"
    ),
    "pictures": Command("sp_bench.analysis.pictures", "RECORD ...", "a record's timeline, assignment matrix and bound"),
    "records": Command(
        "sp_bench.records",
        "collect | check | schema | fields PATH ...",
        "tables of records, checks of others', their JSON Schema",
        IN_MAIN,
    ),
    "wandb-upload": Command(
        "sp_bench.wandb_upload", "FOLDER ... project=sp_bench", "W&B runs of records that are there already"
    ),
    "reproduce": Command(
        "sp_bench.analysis.reproduce", "paper=all | study=NAME", "the papers' tables and figures beside ours"
    ),
    "notebooks": Command("sp_bench.analysis.notebooks", "STUDY ...", "a study's page as an executed notebook"),
    "validate": Command(
        "sp_bench.validate",
        "key=value ... | published | documents | steps",
        "how far simulated points are from measured ones",
        IN_MAIN,
    ),
}
"""All commands, by name: those that answer first, then those that measure, then those that read records."""


def commands_with(key: str) -> list[str]:
    """The commands, as they are typed, that have a key which points don't have."""
    return [
        f"sp-bench {name}" for name, command in COMMANDS.items() if re.search(rf"\b{re.escape(key)}=", command.usage)
    ]
