"""python -m analysis.explore results/: one page to filter, draw, compare and open the points of some records."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from sp_bench.analysis.explorer import page, serving
from sp_bench.cli.arguments import config_dir, keys_and_paths, run_command
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.records import Record, write_whole
from sp_bench.records.gather import gather
from sp_bench.terminal import say

COMMAND = ("explore", "FOLDER ... drawings=500", "one page to filter, draw and compare records")

USAGE = """\
python -m analysis.explore FOLDER ... [out=FILE] [drawings=500] [--config-dir DIR]
python -m analysis.explore FOLDER ... --serve [port=8765] [--config-dir DIR]

Writes one self-contained HTML page of all records in the folders and below. It needs no network. In it points are
filtered, drawn as lines, bars or heat maps, compared with their intervals, and opened: timeline, assignment matrix,
bytes by link, provenance, and the command that makes the point again.

  out=explorer.html   the file, by default explorer.html in the first folder
  drawings=500        the newest points whose timelines and assignment matrices are in the file
  --serve             serve the page on this machine instead; records are read again whenever it is loaded
  port=8765           the port of --serve; 0 for any free one
  --config-dir DIR    a folder with your own cluster/ ..., which commands then name; records have all that is drawn

A file leaves out host names, arguments, environment variables and folders. A served page shows them.
Exit codes: 0 ok, 2 a request that can't be served.
"""
KEYS = ("out", "drawings", "port")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.explore", USAGE, _explore, argv, ("--serve", "--config-dir"))


def _explore(arguments: list[str]) -> int:
    own, arguments = config_dir(arguments)
    Composer(own).close()  # refuses a folder that isn't there
    serve = "--serve" in arguments
    given, names = keys_and_paths([word for word in arguments if word != "--serve"], KEYS)
    if not names:
        raise RequestError("no folder", "there is nothing to explore", "python -m analysis.explore results would work")
    for key in ("out", "drawings") if serve else ("port",):
        if key in given:
            works = "python -m analysis.explore results --serve port=8765, or out=FILE without --serve, would work"
            raise RequestError(f"{key}={given[key]}", "goes with a file" if serve else "goes with --serve", works)
    folders = [Path(name) for name in names]
    numbers = {"drawings": "500", "port": str(serving.PORT), **given}
    for key, most in (("drawings", 10**9), ("port", 65535)):
        if not numbers[key].isdecimal() or int(numbers[key]) > most:
            raise RequestError(f"{key}={numbers[key]}", f"must be from 0 to {most}", f"{key}=500 would work")
    if serve:
        return serving.serve(lambda: found_in(folders), title_of(folders), int(numbers["port"]), own)
    out = Path(given.get("out") or folders[0] / "explorer.html")
    return write(found_in(folders), title_of(folders), out, int(numbers["drawings"]), own)


def found_in(folders: Sequence[Path]) -> Mapping[Path, Record]:
    """The records in some folders and below. Raises RequestError if there are none."""
    gathered = gather(folders)
    left_out = [*gathered.unread.values(), *(why for _, why in gathered.broken.values())]
    if left_out:
        say(f"left out, {len(left_out)} files that are no records of this code: {left_out[0]}")
    if not gathered.records:
        names = ", ".join(map(str, folders))
        raise RequestError(names, "has no records", "the results_dir of a run of python -m sp_bench would work")
    return gathered.records


def title_of(folders: Sequence[Path]) -> str:
    """The page's title: the folders' own names."""
    return f"Records in {', '.join(folder.resolve().name for folder in folders)}"


def write(found: Mapping[Path, Record], title: str, out: Path, drawings: int, own: Path | None = None) -> int:
    """Write the page; `own` is the folder of --config-dir. Raises RequestError if the file can't be written."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("points", total=len(found))
        text = page.explorer(found, title, drawings=drawings, own=own, progress=lambda _: progress.advance(task))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as error:
        rule = f"can't be written ({error.strerror})"
        raise RequestError(f"out={out}", rule, "out=explorer.html would work") from None
    print(f"{out}: {len(found)} points, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
