"""python -m sp_bench.slurm.task FOLDER NUMBER: measure the missing points of a sweep's task. srun runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from sp_bench.cli.drive import drive


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    folder, number = sys.argv[1:] if argv is None else argv
    return drive(lambda: _measure(Path(folder), int(number)))


def _measure(folder: Path, number: int) -> int:
    """Measure the task. Its imports are here because only the process of rank 0 needs them."""
    from sp_bench.slurm.folder import Sweep
    from sp_bench.slurm.measuring import measure

    sweep = Sweep.read(folder)
    return measure(sweep, sweep.tasks[number])


if __name__ == "__main__":
    sys.exit(main())
