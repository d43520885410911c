"""python -m analysis.stale: the pages of studies whose code has changed since they were made."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench.analysis.studies import Study, studies
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.errors import RequestError
from sp_bench.records.identity import MEASURED_CODE
from sp_bench.records.provenance import git, git_state
from sp_bench.resources import ROOT, place

USAGE = """\
python -m analysis.stale [pages=docs/results]

Lists the pages of studies whose code has changed since the commit that they were made at, with how many commits changed
it and where. A page's code is its study's folder, and all that measured points run. Such a page is made anew by
`python -m analysis.reproduce study=NAME`. Needs a git checkout with its history.

  pages=docs/results    the folder of the pages
"""
STAMP = re.compile(r"^Made at commit `(\w+)`", re.MULTILINE)
SHOWN = 3
"""A line names so many of the folders that changed."""


@dataclass(frozen=True)
class Page:
    """A page of a study, and what has happened to its code since."""

    name: str
    commit: str | None
    """The commit that it was made at; None if the page doesn't say, or the repository doesn't have it."""
    commits: int
    """How many commits have changed its code since."""
    changed: tuple[str, ...]
    """The folders and files of its code that they changed, relative to the repository."""

    def __str__(self) -> str:
        if self.commit is None:
            return f"{self.name}: made at an unknown commit"
        if not self.commits:
            return f"{self.name}: its code is that of {self.commit}"
        more = f" and {len(self.changed) - SHOWN} more" if len(self.changed) > SHOWN else ""
        where = f"{', '.join(self.changed[:SHOWN])}{more}"
        return f"{self.name}: made at {self.commit}; since then {self.commits} commits changed {where}"

    @property
    def is_of_todays_code(self) -> bool:
        """Whether nothing has changed since."""
        return self.commit is not None and not self.commits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.stale", USAGE, _list, argv)


def _list(arguments: Sequence[str]) -> int:
    if git_state(ROOT)["git_commit"] is None:
        raise RequestError("analysis.stale", "needs the git checkout of this project", "a clone of it would work")
    folder = Path(only_keys(arguments, {"pages": ""}).get("pages", ROOT / "docs" / "results"))
    all_pages = pages(folder, studies().values())
    old = [page for page in all_pages if not page.is_of_todays_code]
    print(*old, f"{len(all_pages) - len(old)} of {len(all_pages)} pages are of today's code", sep="\n")
    return 0


def pages(folder: Path, of: Iterable[Study], root: Path = ROOT) -> list[Page]:
    """The pages of these studies in a folder; those whose code has changed most often come first."""
    made = ((study, path) for study in of if (path := folder / f"{study.name}.md").is_file())
    read = [_page(path, [study.folder, *map(place, MEASURED_CODE)], root) for study, path in made]
    return sorted(read, key=lambda page: (-page.commits, page.name))


def _page(path: Path, code: Iterable[Path], root: Path) -> Page:
    stamp = STAMP.search(path.read_text())
    where = [each.relative_to(root).as_posix() for each in code]
    log = git(root, "log", "--format=%x00", "--name-only", f"{stamp[1]}..HEAD", "--", *where) if stamp else None
    if stamp is None or log is None:
        return Page(path.stem, None, 0, ())
    files = {line for line in log.replace("\0", "").splitlines() if line}
    changed = (one for one in where if any(name == one or name.startswith(f"{one}/") for name in files))
    return Page(path.stem, stamp[1], log.count("\0"), tuple(changed))


if __name__ == "__main__":
    sys.exit(main())
