"""The interface of loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Self


class Logger:
    """A logger that discards everything (logger=none), and the interface of all others. Use it as a context manager."""

    def log(self, path: Path) -> None:
        """Take the file of a record, with the files beside it. Returns at once and never raises."""

    def close(self) -> str | None:
        """Wait for writes under way, at most timeout_s; return one line on what failed, or None.

        It never raises. Further calls return the same.
        """
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
