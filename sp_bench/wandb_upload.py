"""python -m sp_bench.wandb_upload FOLDER [FOLDER ...] [key=value ...]

Writes a W&B run for each record in the folders and below, as a benchmark with logger=wandb does. Records that W&B has
already (by <run_id>.wandb.json) are skipped. A record that has changed since is written again, with the same id.

  mode=offline       offline: for `wandb sync` later; online. $WANDB_MODE is its default, and disabled does nothing
  project=sp_bench
  entity=null        null: the account's default
  group=null         null: the sweep that the record was made in
  dir=FOLDER         offline runs are written to dir/wandb; the first folder if not given
  timeout_s=60       seconds for each run

Exit codes: 0 ok, 2 a request that can't be served, 1 anything else.
"""

from __future__ import annotations

import contextlib
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
from sp_bench.loggers import wandb_is_disabled
from sp_bench.loggers.wandb_client import WandbLogger, WandbSettings, WriterError
from sp_bench.loggers.written import is_written
from sp_bench.reading import read
from sp_bench.records.gather import gather
from sp_bench.terminal import say

COMMAND = ("wandb-upload", "FOLDER ... project=sp_bench", "W&B runs of records that are there already")

TIMEOUT_S = 60.0
"""The default of timeout_s: longer than a benchmark would wait."""
GIVE_UP_AFTER = 3
"""Consecutive failures after which the rest is not tried: it would fail too."""


@dataclass
class Uploaded:
    """The result of an upload."""

    written: int = 0
    failed: dict[Path, str] = field(default_factory=dict)
    """The error of each record that was not written."""
    stopped: str | None = None
    """The reason for ending early; None if all records were tried."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("sp_bench.wandb_upload", __doc__ or "", _upload, argv)


def _upload(arguments: list[str]) -> int:
    if wandb_is_disabled():
        print("nothing was written or sent: WANDB_MODE=disabled")
        return 0
    try:
        folders, settings = _asked_for(arguments)
        todo, before = _to_do(folders, settings)
        done = upload(todo, settings) if todo else Uploaded()
    except KeyboardInterrupt:
        say("sp_bench.wandb_upload: interrupted; started again, it goes on from here")
        return 1
    runs, offline = Path(settings.dir) / "wandb", settings.mode == "offline"
    print(f"written: {done.written} of {len(todo)} runs, {settings.mode}, project {settings.project}")
    if before:
        print(f"skipped: {before}, {'written offline before' if offline else 'which W&B has'}")
    if offline:
        print(f"nothing was sent: `wandb sync {runs}/offline-run-*` sends them, or mode=online")
    if done.stopped:
        say(f"sp_bench.wandb_upload: {done.stopped}")
    return 1 if done.stopped or done.failed else 0


def upload(paths: Sequence[Path], settings: WandbSettings) -> Uploaded:
    """Write the runs of records in turn. Failures are named on stderr; after a few in a row the rest is not tried."""
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
                say(f"not written: {path}: {problem}")
            done.written += not problem
            in_a_row = in_a_row + 1 if problem else 0
            if in_a_row == GIVE_UP_AFTER:
                done.stopped = f"given up after {in_a_row} failures in a row; started again, it goes on from there"
                break
        logger.close()  # what failed has been named
    return done


def _asked_for(arguments: Sequence[str]) -> tuple[list[Path], WandbSettings]:
    """The folders and the settings of a command line. Raises RequestError for an invalid argument, or no folder."""
    given, names = keys_and_paths(arguments, WandbSettings.__struct_fields__)
    folders = [Path(name) for name in names]
    if not folders:
        raise RequestError(
            "no folder", "there is nothing to upload", "python -m sp_bench.wandb_upload results would work"
        )
    values: dict[str, Any] = {"dir": str(folders[0]), "timeout_s": TIMEOUT_S}
    values |= {"mode": mode} if (mode := os.environ.get("WANDB_MODE")) in ("offline", "online") else {}
    values |= {key: None if value in ("null", "none") else value for key, value in given.items()}
    with contextlib.suppress(TypeError, ValueError):  # `read` refuses what is no number
        values["timeout_s"] = float(values["timeout_s"])
    return folders, read(WandbSettings, values, "logger")


def _to_do(folders: Sequence[Path], settings: WandbSettings) -> tuple[list[Path], int]:
    """The records to write, and the number of those W&B has. Files that are no records are named on stderr.

    Raises RequestError if a folder doesn't exist, or can't be written, as <run_id>.wandb.json must be.
    """
    gathered = gather(folders)
    for why in (*(why for _, why in gathered.broken.values()), *gathered.unread.values(), *gathered.older.values()):
        say(f"left out: {why}")
    todo = [path for path in gathered.records if not is_written(path, settings)]
    for folder in {path.parent for path in todo}:
        if not os.access(folder, os.W_OK):
            rule = "can't be written, so that what W&B has can't be remembered"
            raise RequestError(str(folder), rule, "a copy of it would work")
    return todo, len(gathered.records) - len(todo)


if __name__ == "__main__":
    sys.exit(main())
