"""The benchmark's side of W&B logging: start the writer process, send it records, and wait a limited time for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Literal

from msgspec import structs

from sp_bench.loggers.logger import Logger
from sp_bench.machine import signal_name
from sp_bench.reading import Seconds, Section
from sp_bench.resources import ROOT

_REAP_S = 1.0
"""Seconds a killed writer has to end."""


class WandbSettings(Section, frozen=True, kw_only=True):
    """The values of conf/logger/wandb.yaml."""

    mode: Literal["offline", "online"] = "offline"
    """offline writes folders for a later `wandb sync`, and needs neither account nor network."""
    project: str = "sp_bench"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team; None: the account's default."""
    group: str | None = None
    """The W&B group of the runs, such as their sweep."""
    dir: str = "."
    """Runs are written to `<dir>/wandb`."""
    timeout_s: Seconds = 10.0
    """Seconds that closing waits for W&B before it gives up."""


class WriterError(Exception):
    """The writer process can write no more runs."""


class WandbLogger(Logger):
    """Has a separate process write each record to W&B as a run.

    The process gets paths and reads the files itself, so the queue stays small.
    """

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._logged, self._written, self._closed = 0, 0, False
        self._folder = Path()
        self._problem: str | None = None
        self._process: subprocess.Popen[str] | None = None
        try:
            self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _last_line
            self._process = _start_writer(settings, self._stderr)
        except OSError as error:
            self._problem = f"the writer process did not start: {error}"
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._feeder = threading.Thread(target=_feed, args=(self._process.stdin, self._lines), daemon=True)
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._feeder.start()
        self._listener.start()

    def log(self, path: Path) -> None:
        if self._closed:
            return
        self._logged += 1
        self._folder = path.parent
        if self._process is not None and self._feeder.is_alive():
            self._lines.put(json.dumps(str(path.absolute())))

    def write(self, path: Path) -> str | None:
        """Log a record and wait until its run is written; return its error, or None.

        Raises WriterError if later records would fail too. Don't mix it with `log`.
        """
        self.log(path)
        try:
            # Longer than the limits of a run itself. Before the first run, wandb is imported.
            answer = self._answers.get(timeout=3 * self._settings.timeout_s) if self._process else None
        except queue.Empty:
            answer = None
        if answer is None:
            raise WriterError(self._end_once() or "the writer process ended")
        return answer or None

    def close(self) -> str | None:
        problem, missing = self._end_once(), self._logged - self._written
        if problem and missing:
            problem += f"; {missing} of {self._logged} runs are not written, "
            problem += f"{_upload_command(self._settings, self._folder)} writes them"
        return f"logger=wandb: {problem}" if problem else None

    def _end_once(self) -> str | None:
        """End the writer, once; return its error, or None."""
        if not self._closed:
            self._closed = True
            if self._process is not None:
                self._problem = self._end(self._process)
        return self._problem

    def __exit__(self, *exception: object) -> None:
        if not self._closed and (warning := self.close()):
            logging.getLogger(__name__).warning(warning)

    def _listen(self, stdout: IO[str]) -> None:
        """Collect the writer's answers: for each record an error as JSON text, empty if its run is written."""
        with contextlib.suppress(OSError, ValueError), stdout:  # the last line of a killed writer is cut off
            for line in stdout:
                answer = json.loads(line)
                self._written += not answer
                self._answers.put(answer)
        self._answers.put(None)

    def _end(self, process: subprocess.Popen[str]) -> str | None:
        """End the writer, by force if necessary; return its error, or None."""
        timeout_s = self._settings.timeout_s
        if not self._logged and process.poll() is None:
            _kill(process)
        self._lines.put(None)
        try:
            code = process.wait(timeout_s if self._logged else _REAP_S)
            why = _why(code) if self._logged or code > 0 else None
        except subprocess.TimeoutExpired:
            why = f"not done after {timeout_s:g} s, given up"
        finally:
            _kill(process)
            self._feeder.join(_REAP_S)
            self._listener.join(_REAP_S)
        last_line = self._last_line()
        return f"{why}: {last_line}" if why and last_line else why

    def _last_line(self) -> str:
        with self._stderr:
            self._stderr.seek(0)
            text = self._stderr.read().decode(errors="replace").strip()
        return text.splitlines()[-1].strip() if text else ""


def _upload_command(settings: WandbSettings, folder: Path) -> str:
    """The command that writes the runs which this logger did not."""
    default = WandbSettings()
    keys = ("mode", "project", "entity")
    own = (f"{key}={value}" for key in keys if (value := getattr(settings, key)) != getattr(default, key))
    return shlex.join(["python", "-m", "sp_bench.wandb_upload", str(folder), *own])


def _start_writer(settings: WandbSettings, stderr: IO[bytes]) -> subprocess.Popen[str]:
    folder = Path(settings.dir).absolute()
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # wandb would stage tables in the home folder, and send crash reports.
    wandb = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_ERROR_REPORTING": "false"}
    fields = structs.asdict(settings) | {"dir": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "sp_bench.loggers.wandb_writer", json.dumps(fields)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **wandb, "PYTHONPATH": search},
        # Ctrl-C must reach the benchmark only, which then closes its logger.
        start_new_session=True,
    )


def _feed(stdin: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Send lines to the writer until None. It runs in a thread: a full pipe must not block the benchmark."""
    with contextlib.suppress(OSError), stdin:
        for line in iter(lines.get, None):
            stdin.write(line + "\n")
            stdin.flush()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)


def _why(code: int) -> str | None:
    if code < 0:
        return f"the writer process was ended by {signal_name(-code)}"
    return "the writer process failed" if code else None
