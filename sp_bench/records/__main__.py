"""Tables of many records, checks of records that others wrote, and their JSON Schema.

collect writes records.parquet and records.csv, with a row for each record in the folders and below. A file that is not
a whole record is moved to FOLDER/set_aside. One that older or newer code wrote is named and stays. If a point has
several records, the newest is taken.
check says what is wrong with record files and folders of them. schema prints the JSON Schema of a record, fields its
quantities as a page.
Exit codes: 0 ok, 1 check found something wrong, 2 a request that can't be served.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from sp_bench import records
from sp_bench.errors import RequestError
from sp_bench.records.checking import problems_of
from sp_bench.records.gather import SET_ASIDE, Gathered, files_below, gather
from sp_bench.records.schema import fields_page, json_schema
from sp_bench.records.tables import write_tables
from sp_bench.terminal import say

COMMAND = (
    "records",
    "collect | check | schema | fields PATH ...",
    "tables of records, checks of others', their JSON Schema",
)

MODES_IN_WORDS = {"measure": "measured", "alone": "measured alone", "simulate": "simulated", "report": "reported"}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m sp_bench.records", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    collect_ = commands.add_parser("collect", description=__doc__, help="one table of the records in folders")
    collect_.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="searched with all below it")
    collect_.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where the tables go; the first folder if not given"
    )
    check_ = commands.add_parser("check", help="can others rely on these records?")
    check_.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="record files, or folders of them")
    commands.add_parser("schema", help="print the JSON Schema of a record")
    commands.add_parser("fields", help="print the quantities of a record as a Markdown page")
    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "check":
                return check(arguments.paths)
            case "schema":
                print(json.dumps(json_schema(), indent=1))
            case "fields":
                print(fields_page())
            case _:
                collect(arguments.folders, arguments.to or arguments.folders[0])
    except RequestError as error:
        say(f"sp_bench.records: {error}")
        return 2
    return 0


def check(paths: list[Path]) -> int:
    """Print what is wrong with the records in files and folders, and how many there are of each mode.

    Return 1 if one is wrong, else 0. Raises RequestError if a path doesn't exist.
    """
    for path in paths:
        if not path.exists():
            raise RequestError(str(path), "does not exist", "a record's file, or a folder of them, would work")
    folders = [path for path in paths if path.is_dir()]
    files = [*(path for path in paths if path.is_file()), *sorted(files_below(folders))]
    checked = {path: problems_of(path) for path in files}
    for path, problems in checked.items():
        for problem in problems:
            print(f"{path}: {problem}")
    modes = Counter(records.read(path).mode for path, problems in checked.items() if not problems)
    wrong = sum(map(bool, checked.values()))
    right = ", ".join(f"{count} {MODES_IN_WORDS[mode]}" for mode, count in sorted(modes.items()))
    print(f"{_count(len(files), 'file')}: {wrong} wrong" + (f", {right}" if right else ""))
    return int(wrong > 0)


def collect(folders: list[Path], to: Path) -> None:
    """Write the tables of all records in `folders`, set broken files aside, and print a summary.

    Raises RequestError if a folder doesn't exist or can't be written.
    """
    gathered = gather(folders)
    try:
        written = write_tables(gathered.records.values(), to)
    except OSError as error:
        raise RequestError(f"--to {to}", f"can't be written ({error.strerror})", "--to tables would work") from None
    moved = [path for path, (folder, why) in gathered.broken.items() if _set_aside(path, folder, why)]
    for why in (*gathered.unread.values(), *gathered.older.values()):
        say(f"left out: {why}")
    print(f"{_count(len(gathered.records), 'record')}: {', '.join(map(str, written))}")
    for line in _summary(gathered, moved):
        print(line)


def _summary(found: Gathered, moved: list[Path]) -> list[str]:
    """A line for each kind of file that is not in the tables."""
    stuck = [path for path in found.broken if path not in moved]
    kinds = {
        f"set aside, in {SET_ASIDE}/": moved,
        "broken, and could not be moved": stuck,
        "of another schema version, or unreadable; still there": found.unread,
        "differing from a newer record of the same point; still there": found.older,
    }
    lines = [
        f"{_count(len(paths), 'file')} {kind}: {', '.join(map(str, paths))}" for kind, paths in kinds.items() if paths
    ]
    return [*lines, *([f"{_count(found.copies, 'file')} saying the same as another"] if found.copies else [])]


def _set_aside(path: Path, folder: Path, why: str) -> bool:
    """Move a broken file to the folder's set_aside, never over another file; return whether that worked."""
    aside = folder / SET_ASIDE / path.relative_to(folder)
    target, number = aside, 1
    while target.exists():
        number += 1
        target = aside.with_name(f"{aside.name}.{number}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    except OSError as error:
        say(f"broken: {why}; it could not be moved: {error}")
        return False
    say(f"set aside: {why}")
    return True


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
