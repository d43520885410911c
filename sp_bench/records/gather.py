"""Find all records below some folders, each point once, and the files there that are not records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.records.files import OtherVersionError, is_beside, read
from sp_bench.records.record import Record

SET_ASIDE = "set_aside"
"""The folder that files which are no records are moved to."""
NOT_SEARCHED = (SET_ASIDE, "wandb")


@dataclass
class Gathered:
    """The files that `gather` finds, by path."""

    records: dict[Path, Record] = field(default_factory=dict)
    """One record for each run_id, in the order of run_ids."""
    broken: dict[Path, tuple[Path, str]] = field(default_factory=dict)
    """Files that are no records: the searched folder they are in, and what is wrong with them."""
    unread: dict[Path, str] = field(default_factory=dict)
    """Records of another schema version and unreadable files, with the reason."""
    older: dict[Path, str] = field(default_factory=dict)
    """Records that differ from a newer one of the same point, with the reason."""
    copies: int = 0
    """The number of files with the same content as one in `records`."""


def gather(folders: Sequence[Path]) -> Gathered:
    """The records in `folders` and below. Raises RequestError if a folder doesn't exist.

    The newest file wins if a point has several records. In a SLURM sweep's folder only its records are read. W&B's
    folders are skipped.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RequestError(str(folder), "is not a folder", "one with records, such as results, would work")
    gathered, seen = Gathered(), set()
    by_id: dict[str, list[tuple[Path, Record]]] = {}
    for folder in folders:
        for path in _files(folder):
            if (resolved := path.resolve()) in seen:
                continue
            seen.add(resolved)
            try:
                record = read(path)
            except (OtherVersionError, OSError) as error:
                gathered.unread[path] = str(error)
            except ValueError as error:
                gathered.broken[path] = (folder, str(error))
            else:
                by_id.setdefault(record.run_id, []).append((path, record))
    for _, same in sorted(by_id.items()):
        _take_newest(gathered, same)
    return gathered


def _take_newest(found: Gathered, same: Sequence[tuple[Path, Record]]) -> None:
    taken, record = max(same, key=lambda one: (one[0].stat().st_mtime_ns, str(one[0])))
    found.records[taken] = record
    for path, other in same:
        if other != record:
            found.older[path] = f"{path}: differs from {taken}, which is newer"
        elif path != taken:
            found.copies += 1


def files_below(folders: Iterable[Path]) -> Iterator[Path]:
    """The files in and below some folders that should be records, by their names."""
    for folder in folders:
        yield from _files(folder)


def _files(folder: Path) -> Iterator[Path]:
    """The files in and below a folder that should be records, by their names."""
    if folder.resolve().name != "records" and _is_sweep(folder.resolve().parent):
        return
    for at, folders, names in os.walk(folder):
        if _is_sweep(Path(at)):
            folders[:] = ["records"]
            continue
        folders[:] = sorted(name for name in folders if name not in NOT_SEARCHED and not name.startswith("."))
        paths = (Path(at, name) for name in sorted(names) if name.endswith(".json"))
        yield from (path for path in paths if not is_beside(path))


def _is_sweep(folder: Path) -> bool:
    """Whether this is a SLURM sweep's folder, in which only the JSON files in records/ are records."""
    return all((folder / name).is_dir() for name in ("points", "records", "scripts"))
