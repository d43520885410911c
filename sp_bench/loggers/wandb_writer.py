"""The process that writes W&B runs: `python -m sp_bench.loggers.wandb_writer '<WandbSettings as JSON>'`.

Reads the paths of records' files as JSON lines, writes one W&B run for each, and ends where its input does. For each it
answers with a JSON line: empty, or what went wrong. That is a line on stderr too, and exit code 1; the records after it
are still written. What is written is remembered beside the record.

A run's id is the record's run_id. Offline, the same point written twice makes two folders with that id; which of them
W&B keeps is decided where they are uploaded.
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
"""What the first run of wandb 0.31 imports, half a second in all. Without them a run is late, not wrong."""


def main() -> int:
    """The exit code: 0 if all records were written."""
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
        with contextlib.suppress(OSError):  # nobody may be there to hear it
            print(json.dumps(problem), file=answers, flush=True)
    wandb.teardown()
    return code


def _own_stdout() -> TextIO:
    """Standard output for the answers alone: what anything else prints there goes nowhere."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def _read(lines: queue.SimpleQueue[str | None], timeout_s: float) -> None:
    """Passes the input on, and bounds the time after its end: a benchmark that was killed can't end this process."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)
    threading.Timer(timeout_s + 1.0, os._exit, args=(1,)).start()


def _load(settings: WandbSettings) -> ModuleType:
    """Imports wandb and all that its first run would, and starts its service."""
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name == "wandb":
            raise ImportError('it is not installed: pip install "sp-bench[wandb]", or logger=none') from None
        raise
    Path(settings.dir).mkdir(parents=True, exist_ok=True)
    if not os.access(settings.dir, os.W_OK):
        # wandb would write to the temporary folder, and not say so.
        raise PermissionError(f"{settings.dir} is not writable")
    wandb.Table.MAX_ROWS = wandb.Table.MAX_ARTIFACT_ROWS = sys.maxsize
    wandb.Table(columns=list(fields.SAMPLE_COLUMNS), data=[])
    wandb.setup(_run_settings(wandb, settings))
    for module in LOADED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # Finished runs are in cycles. Among all of wandb's own objects they would be looked for too rarely.
    gc.collect()
    gc.freeze()
    return wandb


def _run_settings(wandb: ModuleType, settings: WandbSettings) -> Any:
    """Quiet, and private: no environment, host, git state, code or system metrics."""
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
        # So that its own error comes before the benchmark gives up on it.
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
    """Says so on stderr, in one line."""
    line = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
    print(line, file=sys.stderr, flush=True)
    return line


if __name__ == "__main__":
    # The benchmark waits for this process, and taking the modules down one by one is most of that wait.
    os._exit(main())
