"""python -m slurm.sweep sweep=NAME [slurm=NAME] [folder=DIR] [key=value,... ...]
                      [--config-dir DIR] [--dry-run] [--wait | --watch]
python -m slurm.sweep status | resume | cancel DIR [slurm.KEY=value ...]
                      [--wait | --watch]

Submits the points of conf/sweep/NAME.yaml as job arrays, one for each number of GPUs. key=value or key=value,value
changes what that file fixes or sweeps. Every point is resolved first; a point that can't be served gets its record at
once. slurm=NAME is a file of conf/slurm/, and slurm.time=00:10:00 changes one of its keys.

  --config-dir DIR  a folder with your own sweep/, slurm/, cluster/ ..., in addition to conf/
  --dry-run         print the scripts, and on stderr points, nodes, the most GPU hours, account; submit nothing
  --wait            follow the jobs until none is left: a line whenever a point changes its state
  --watch           the same as a view in the terminal: finished, running, pending and failed points, and the time left
  status DIR        print how many points are done, running, pending, failed; and for tasks that don't run SLURM's state
                    and reason, exit code, log and the next command
  resume DIR        submit the missing points; slurm.time=04:00:00 or other slurm.KEY=value for these and later ones
  cancel DIR        cancel the jobs; finished points are kept

Nothing is asked of the machine that submits, which may have no GPU and no torch.

Exit codes: 0 ok, with --wait or --watch all points done; 2 a request that can't be served; 1 anything else.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from sp_bench import records
from sp_bench.cli.arguments import config_dir, run_command
from sp_bench.errors import RequestError, unknown
from sp_bench.slurm import queue, scripts, watching
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.points import Refused, by_gpus, planned
from sp_bench.slurm.progress import progress
from sp_bench.slurm.settings import load
from sp_bench.terminal import say

COMMAND = ("sweep", "sweep=NAME | status | resume | cancel DIR", "points as SLURM job arrays; status, resume, cancel")

FLAGS = ("--dry-run", "--wait", "--watch")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    return run_command("slurm.sweep", __doc__ or "", _sweep, arguments, (*FLAGS, "--config-dir"))


def _sweep(arguments: list[str]) -> int:
    own, arguments = config_dir(arguments)
    words = [argument for argument in arguments if argument not in FLAGS]
    if not words:
        raise RequestError(" ".join(arguments), "needs a sweep", "sweep=cpu_methods would work")
    try:
        flags = {"dry": "--dry-run", "wait": "--wait", "live": "--watch"}
        return _answer(words, own, **{name: flag in arguments for name, flag in flags.items()})
    except KeyboardInterrupt:
        say("slurm.sweep: interrupted; the jobs go on")
        return 1


def _answer(words: list[str], own: Path | None, *, dry: bool, wait: bool, live: bool) -> int:
    if "=" in words[0]:
        sweep, refused = asked_for(words, own)
        errors = Counter(record.error for _, record in refused)
        if not sweep.tasks:
            raise RequestError(
                f"none of {len(refused)} points", "; ".join(map(str, errors)), "other values of these keys would work"
            )
        for error, count in errors.items():
            say(f"slurm.sweep: unsupported, {count} points: {error}")
        if dry:
            print("\n".join(scripts.scripts(sweep).values()), end="")
            say(f"slurm.sweep: {scripts.summary(sweep)}")
            return 0
        queue.refuse_without_slurm(sweep.settings)
        sweep.write(refused)
        scripts.write(sweep)
        submit_missing(sweep)
    else:
        command, folder, changes = words[0], Path(words[1] if len(words) > 1 else ""), words[2:]
        if command not in ("status", "resume", "cancel"):
            raise unknown("command", command, ["status", "resume", "cancel"])
        for word in changes:
            if command != "resume" or not word.startswith("slurm.") or "=" not in word:
                raise RequestError(word, f"is none of {command}'s", "resume DIR slurm.time=04:00:00 would work")
        sweep = Sweep.read(folder)
        if command == "resume":
            _refuse_other_code(sweep)
            if changes:
                sweep = sweep.with_settings([word.removeprefix("slurm.") for word in changes])
                scripts.write(sweep)
            submit_missing(sweep)
        elif command == "cancel":
            queue.cancel(sweep.settings, list(sweep.jobs))
    if live:
        return watching.watch(sweep)
    if wait:
        return watching.follow(sweep)
    watching.print_all(sweep, progress(sweep))
    return 0


def asked_for(words: list[str], folder: Path | None = None) -> tuple[Sweep, list[Refused]]:
    """The sweep that a command line asks for, not yet written, and its refused points. Raises RequestError.

    `folder` is that of --config-dir.
    """
    own = {"slurm": "testcluster"}
    slurm_changes, changes = [], []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RequestError(word, "is not of the form key=value", "sweep=mesh_table3 would work")
        if key in ("sweep", "slurm", "folder"):
            own[key] = value
        elif key.startswith("slurm."):
            slurm_changes.append(word.removeprefix("slurm."))
        else:
            changes.append(word)
    if "sweep" not in own:
        raise RequestError("sweep", "is not given", "sweep=mesh_table3 would work")
    name = own["sweep"]
    settings = load(own["slurm"], slurm_changes, folder)
    tasks, refused = planned(name, changes, folder)
    sweep = Sweep(
        folder=Path(own.get("folder") or f"results/sweeps/{name}").resolve(),
        name=name,
        settings=settings,
        tasks=tasks,
        refused=[point for point, _ in refused],
        code_version=records.code_version(),
    )
    return sweep, refused


def submit_missing(sweep: Sweep) -> None:
    """Submit all tasks with missing points that are not in the queue. Raises RequestError."""
    in_slurm = queue.tasks(sweep.settings, list(sweep.jobs))
    queued = {number for number, said in in_slurm.items() if said.waits or said.runs}
    todo = [task for task in sweep.tasks if sweep.missing(task) and task.number not in queued]
    for gpus, tasks in by_gpus(todo).items():
        array = scripts.array(sweep.settings, tasks)
        sweep.add_job(queue.submit(sweep.settings, scripts.path_of(sweep, gpus), array), tasks)


def _refuse_other_code(sweep: Sweep) -> None:
    if sweep.code_version != records.code_version():
        rule = "was made with another version of the code, and a sweep has one"
        raise RequestError(str(sweep.folder), rule, "a new folder=, or that version, would work")


if __name__ == "__main__":
    sys.exit(main())
