"""Where benchmark records go besides their files: to Weights & Biases, or nowhere.

A logger that is missing, slow or broken never fails or slows a benchmark: what went wrong is one line at the end.
This package imports no wandb; a process of its own does (`wandb_writer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sp_bench.errors import unknown
from sp_bench.loggers.wandb_client import WandbLogger, WandbSettings
from sp_bench.reading import read

__all__ = ["Logger", "NoLogger", "open_logger"]


class Logger(Protocol):
    """What a benchmark needs of a logger; as a context manager it closes itself."""

    def log(self, path: Path) -> None:
        """Takes the file of a record, with what stands beside it; returns at once and never raises."""
        ...

    def close(self) -> str | None:
        """Waits for what is still being written, at most the logger's timeout_s; one line on what failed, or None.

        It never raises, and called again it answers the same.
        """
        ...

    def __enter__(self) -> Logger: ...

    def __exit__(self, *exception: object) -> None: ...


class NoLogger:
    """logger=none."""

    def log(self, path: Path) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to wait for, nothing that can fail."""

    def __enter__(self) -> NoLogger:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _open_wandb(settings: Mapping[str, Any]) -> Logger:
    return WandbLogger(read(WandbSettings, settings, "logger"))


LOGGERS: dict[str, Callable[[Mapping[str, Any]], Logger]] = {
    "none": lambda settings: NoLogger(),
    "wandb": _open_wandb,
}


def open_logger(settings: Mapping[str, Any]) -> Logger:
    """The logger that `settings` (conf/logger/*.yaml) describe: its `name`, and the fields of `WandbSettings`.

    Open it before the benchmark computes: wandb takes its second to load meanwhile.

    Raises:
        RequestError: for a logger, a key or a value that isn't one.
    """
    name = settings.get("name")
    if not isinstance(name, str) or name not in LOGGERS:
        raise unknown("logger", str(name), LOGGERS)
    return LOGGERS[name]({key: value for key, value in settings.items() if key != "name"})
