"""Folders that are full, small, or can be read only, also for root."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")


@contextmanager
def small_disk(folder: Path, kb: int) -> Iterator[Path]:
    """`folder` as a file system of its own with so much room."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={kb}k", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(folder: Path, kb: int) -> None:
    """Give a small disk another size."""
    _mount("-o", f"remount,size={kb}k", str(folder))


def fill(folder: Path) -> None:
    """Leave no room on a small disk."""
    full = pytest.raises(OSError, match="No space left on device")
    with (folder / "ballast").open("wb", buffering=0) as ballast, full:
        ballast.writelines(itertools.repeat(bytes(4096)))


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """`folder`, which can't be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,ro,bind", str(folder))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
