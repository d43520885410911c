"""The process that writes W&B runs: `python -m sp_bench.loggers.wandb_writer '<WandbSettings as JSON>'`.

It reads the paths of records as JSON lines until its input ends, writes a W&B run for each, and answers each with a
JSON line: an error, or an empty text. An error is also a line on stderr and makes the exit code 1; the records after it
are still written. A file beside the record remembers what is written.

A run's id is the record's run_id. Offline, the same point written twice makes two folders with that id; the upload
decides which of them W&B keeps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from sp_bench.loggers import wandb_fields as fields
from sp_bench.loggers.wandb_client import WandbSettings
from sp_bench.loggers.written import content_hash, remember
from sp_bench.records import beside, read

LOADED_LATE = ("requests", "wandb.sdk.launch.inputs.internal", "wandb.sdk.artifacts._internal_artifact")
"""Modules that the first run of wandb 0.31 imports, which takes half a second. They are loaded early to save it."""


def main() -> int:
    """Write runs until the input ends; return the exit code, 0 if all were written."""
    settings = WandbSettings(**json.loads(sys.argv[1]))
    answers = _own_stdout()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, settings.timeout_s), daemon=True).start()
    try:
        wandb = _load(settings)
    except Exception as error:
        _fail("wandb can't be used", error)
        return 1
    code = 0
    for line in iter(lines.get, None):
        problem, path = "", Path(json.loads(line))
        try:
            content = content_hash(path)
            _write(wandb, settings, path)
            remember(path, settings, content)
        except Exception as error:
            problem, code = _fail(f"run {path.stem}", error), 1
        with contextlib.suppress(OSError):  # the benchmark may have ended
            print(json.dumps(problem), file=answers, flush=True)
    wandb.teardown()
    return code


def _own_stdout() -> TextIO:
    """The standard output, from now on for answers only: other output to it is discarded."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def _read(lines: queue.SimpleQueue[str | None], timeout_s: float) -> None:
    """Pass the input on. End this process some time after the input ends: a killed benchmark can't."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)
    threading.Timer(timeout_s + 1.0, os._exit, args=(1,)).start()


def _load(settings: WandbSettings) -> ModuleType:
    """Import wandb and the modules that its first run would import, and start its service."""
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name == "wandb":
            raise ImportError('it is not installed: pip install "sp-bench[wandb]", or logger=none') from None
        raise
    Path(settings.dir).mkdir(parents=True, exist_ok=True)
    if not os.access(settings.dir, os.W_OK):
        # wandb would silently write to the temporary folder.
        raise PermissionError(f"{settings.dir} is not writable")
    wandb.Table.MAX_ROWS = wandb.Table.MAX_ARTIFACT_ROWS = sys.maxsize
    wandb.Table(columns=list(fields.SAMPLE_COLUMNS), data=[])
    wandb.setup(_run_settings(wandb, settings))
    for module in LOADED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # Finished runs are in reference cycles. With all of wandb's own objects the collector would look too rarely.
    gc.collect()
    gc.freeze()
    return wandb


def _run_settings(wandb: ModuleType, settings: WandbSettings) -> Any:
    """Settings without output, and without the environment, host, git state, code or system metrics."""
    return wandb.Settings(
        silent=True,
        console="off",
        symlink=False,
        host="",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_save_requirements=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        # wandb must give up before the benchmark gives up on it.
        init_timeout=settings.timeout_s / 2,
        finish_timeout=settings.timeout_s / 2,
        finish_timeout_raises=True,
    )


def _write(wandb: ModuleType, settings: WandbSettings, path: Path) -> None:
    record, others = read(path).to_dict(), beside(path)
    rows = fields.sample_rows(json.loads(others["samples"].read_bytes())) if "samples" in others else []
    with wandb.init(
        mode=settings.mode,
        project=settings.project,
        entity=settings.entity,
        group=settings.group or fields.group(record),
        dir=settings.dir,
        id=record["run_id"],
        name=fields.name(record),
        job_type=record["method"],
        tags=fields.tags(record),
        notes=fields.notes(record),
        config=fields.config(record),
        reinit="create_new",
        settings=_run_settings(wandb, settings),
    ) as run:
        run.summary.update(fields.summary(record))
        if rows:
            run.log({"samples": wandb.Table(columns=list(fields.SAMPLE_COLUMNS), data=rows)})
        if "trace" in others:
            artifact = wandb.Artifact(f"timeline-{record['run_id']}", type="timeline")
            for name in fields.TIMELINE:
                if name in others:
                    artifact.add_file(str(others[name]))
            run.log_artifact(artifact)


def _fail(what: str, error: Exception) -> str:
    """Print an error to stderr in one line; return the line."""
    line = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
    print(line, file=sys.stderr, flush=True)
    return line


if __name__ == "__main__":
    # The benchmark waits for this process, and unloading modules would be most of that wait.
    os._exit(main())
