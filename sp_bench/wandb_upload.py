"""python -m sp_bench.wandb_upload FOLDER ...: W&B runs of records that are there already."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.errors import RequestError
from sp_bench.loggers.wandb_client import WandbLogger, WandbSettings, WriterError
from sp_bench.loggers.written import is_written
from sp_bench.reading import read
from sp_bench.records.gather import gather

TIMEOUT_S = 60.0
"""Of each run; nothing waits for this but the user."""
GIVE_UP_AFTER = 3
"""Failures in a row, after which the others would fail too."""
USAGE = f"""\
python -m sp_bench.wandb_upload FOLDER [FOLDER ...] [key=value ...]

Writes a W&B run for each record in the folders and below, the same as a benchmark with logger=wandb does. What W&B has
already (<run_id>.wandb.json says so) is passed over; a record that has changed since is written again, with its id.

  mode=offline       offline: for `wandb sync` later; online
  project=sp_bench
  entity=null        null: the account's default
  group=null         null: the sweep that a record was made in
  dir=FOLDER         offline runs are written to dir/wandb; the first folder if not given
  timeout_s={TIMEOUT_S:g}       of each run

Exit codes: 0 ok, 2 a request that can't be served, 1 anything else."""


@dataclass
class Uploaded:
    """What an upload came to."""

    written: int = 0
    failed: dict[Path, str] = field(default_factory=dict)
    stopped: str | None = None
    """Why it has ended early."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("sp_bench.wandb_upload", USAGE, _upload, argv)


def _upload(arguments: list[str]) -> int:
    try:
        folders, settings = _asked_for(arguments)
        todo, before = _to_do(folders, settings)
        done = upload(todo, settings) if todo else Uploaded()
    except KeyboardInterrupt:
        print("sp_bench.wandb_upload: interrupted; started again, it goes on from here", file=sys.stderr)
        return 1
    where = f", in {Path(settings.dir) / 'wandb'}" if settings.mode == "offline" else ""
    print(f"written: {done.written} of {len(todo)} runs, {settings.mode}, project {settings.project}{where}")
    if before:
        print(f"passed over: {before}, which W&B has")
    if done.stopped:
        print(f"sp_bench.wandb_upload: {done.stopped}", file=sys.stderr)
    return 1 if done.stopped or done.failed else 0


def upload(paths: Sequence[Path], settings: WandbSettings) -> Uploaded:
    """Write the runs of records in turn. What fails is named on stderr; the rest is written, unless all would fail."""
    done, in_a_row, console = Uploaded(), 0, Console(stderr=True)
    with (
        WandbLogger(settings) as logger,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        for path in progress.track(paths, description="runs"):
            try:
                problem = logger.write(path)
            except WriterError as error:
                done.stopped = str(error)
                return done
            if problem:
                done.failed[path] = problem
                print(f"not written: {path}: {problem}", file=sys.stderr)
            done.written += not problem
            in_a_row = in_a_row + 1 if problem else 0
            if in_a_row == GIVE_UP_AFTER:
                done.stopped = f"given up after {in_a_row} failures in a row; started again, it goes on from there"
                break
        logger.close()  # what failed has been named
    return done


def _asked_for(arguments: Sequence[str]) -> tuple[list[Path], WandbSettings]:
    """The folders and the settings. Raises RequestError."""
    given, names = keys_and_paths(arguments, WandbSettings.__struct_fields__)
    folders = [Path(name) for name in names]
    if not folders:
        raise RequestError(
            "no folder", "there is nothing to upload", "python -m sp_bench.wandb_upload results would work"
        )
    values: dict[str, Any] = {"dir": str(folders[0]), "timeout_s": TIMEOUT_S}
    for key, value in given.items():
        values[key] = None if value == "null" else _seconds(value) if key == "timeout_s" else value
    return folders, read(WandbSettings, values, "logger")


def _seconds(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # which `read` refuses


def _to_do(folders: Sequence[Path], settings: WandbSettings) -> tuple[list[Path], int]:
    """The records to write, and how many W&B has. Names what is no record.

    Raises RequestError for a folder that there is not, or in which what is written could not be remembered.
    """
    found = gather(folders)
    for why in (*(why for _, why in found.broken.values()), *found.left.values(), *found.older.values()):
        print(f"left out: {why}", file=sys.stderr)
    todo = [path for path in found.records if not is_written(path, settings)]
    for folder in {path.parent for path in todo}:
        if not os.access(folder, os.W_OK):
            rule = "can't be written, so that what W&B has can't be remembered"
            raise RequestError(str(folder), rule, "a copy of it would work")
    return todo, len(found.records) - len(todo)


if __name__ == "__main__":
    sys.exit(main())
