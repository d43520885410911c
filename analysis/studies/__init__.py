"""Studies: points, figures, page.

A study is a folder here. Nothing else lists it:

    NAME/__init__.py   figures: functions of `runs`
    NAME/page.md       the page: facts, words, and {FIGURE} where a figure stands, or {OTHER.FIGURE} of another study
    NAME/words.md      the words of figures that are Sections (sp_bench.analysis.section)
    NAME/*.csv         what a paper prints (sp_bench.analysis.paper_tables)

A figure asks `runs` for the records of its points (sp_bench.analysis.runs), which keeps them: a point is run once. It
returns a Section, a Figure, rows of a table, or Markdown; a slot may also name a constant. One page makes all that is
shown:

    python -m analysis.reproduce study=NAME    writes the page with its figures to docs/results
    python -m analysis.reproduce paper=NAME    puts its Sections into the report, and its notebook beside it

Facts stand above the title, a line each, and are not part of what is written:

    report: 3          its place in the report, which `paper=all` makes; without it, the study is a page alone
    records: FOLDER    where its records are kept; without it, results/report/records or results/NAME

A figure may read `runs.options`, the study's own keys of the command line; OPTIONS of its module has their defaults. It
adds what went wrong to `runs.failed`, which makes the exit code 1. Any page may have the VALUES below.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from sp_bench import markdown
from sp_bench.analysis.figure import Figure
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.errors import unknown
from sp_bench.machine import cores_here
from sp_bench.records.provenance import git, git_state
from sp_bench.resources import ROOT

SLOT = re.compile(r"```python\n.*?```|\{([\w.]+)\}", re.DOTALL)
"""Code, which stands as it is, or the name of what to fill in."""
VALUES: Mapping[str, Callable[[], object]] = {
    "cores": cores_here,
    "machine": platform.machine,
    "python": platform.python_version,
    "torch": lambda: version("torch"),
}
"""Values that any page may show: of this machine, and of its software."""


@dataclass(frozen=True)
class Study:
    """A study, by the folder of its page."""

    folder: Path

    @property
    def name(self) -> str:
        """The name on the command line, and of the page."""
        return self.folder.name

    @cached_property
    def _parts(self) -> tuple[dict[str, str], str]:
        above, title, rest = (self.folder / "page.md").read_text().partition("# ")
        facts = (line.partition(":") for line in above.splitlines() if line)
        return {key: value.strip() for key, _, value in facts}, title + rest

    @property
    def facts(self) -> Mapping[str, str]:
        """The facts above the title, as text."""
        return self._parts[0]

    @property
    def page(self) -> str:
        """The page in Markdown, with its slots."""
        return self._parts[1].replace("{command}", f"python -m analysis.reproduce study={self.name}")

    @property
    def title(self) -> str:
        """The page's title."""
        return self.page.partition("\n")[0].removeprefix("# ")

    @cached_property
    def module(self) -> ModuleType:
        """The module with the figures."""
        return import_module(f"{__name__}.{self.name}")

    @property
    def records(self) -> Path:
        """The folder of its records."""
        own = "results/report/records" if "report" in self.facts else f"results/{self.name}"
        return Path(self.facts.get("records", own))

    @property
    def options(self) -> Mapping[str, str]:
        """The study's own keys of the command line, with their defaults."""
        return getattr(self.module, "OPTIONS", {})

    @property
    def slots(self) -> list[str]:
        """The names of its figures, in the page's order."""
        return [name for name in dict.fromkeys(SLOT.findall(self.page)) if name and name not in VALUES]

    def figures(self, runs: Runs) -> dict[str, Any]:
        """Its own figures by name: Sections, rows of tables, or Markdown."""
        own = {name: getattr(self.module, name) for name in self.slots if "." not in name}
        return {name: one(runs) if callable(one) else str(one) for name, one in own.items()}

    def sections(self, runs: Runs) -> list[Section]:
        """The figures that are Sections."""
        return [made for made in self.figures(runs).values() if isinstance(made, Section)]

    def write(self, runs: Runs, folder: Path) -> Path:
        """Write the page and its pictures (SVG) to `folder`; return the page's path.

        Its last line says at which commit it was made, if that is known (sp_bench.analysis.stale).
        """
        runs.pages = folder
        path = folder / f"{self.name}.md"
        path.write_text("\n\n".join([self.filled(self.page, runs, folder).rstrip(), *_stamp()]) + "\n")
        return path

    def filled(self, text: str, runs: Runs, pictures: Path | None = None) -> str:
        """A text of the page with its slots filled. Pictures are written to a folder; without one they are left out."""
        slots = (name for name in dict.fromkeys(SLOT.findall(text)) if name)
        shown = {name: self._filled(name, runs, pictures) for name in slots}
        return SLOT.sub(lambda slot: shown[slot[1]] if slot[1] else slot[0], text)

    def _filled(self, slot: str, runs: Runs, pictures: Path | None) -> str:
        if slot in VALUES:
            return str(VALUES[slot]())
        other, _, name = slot.rpartition(".")
        value = getattr(study_named(other).module if other else self.module, name)
        made: Any = value(runs) if callable(value) else str(value)
        return _shown(made, None if other else pictures)


def _stamp() -> list[str]:
    code = git_state(ROOT)
    commit = git(ROOT, "log", "-1", "--format=%h` of %cs") if code["git_commit"] else None
    return [f"Made at commit `{commit}{', with changes' if code['git_dirty'] else ''}."] if commit else []


def _shown(made: Section | Figure | Sequence[Mapping[str, object]] | str, pictures: Path | None = None) -> str:
    """A figure in Markdown. Pictures are written to a folder; without one, those of a Section are left out."""
    if isinstance(made, str):
        return made.strip()
    if not isinstance(made, Section | Figure):
        return markdown.of_rows(made)
    parts = made.parts if isinstance(made, Section) else [made]
    if pictures:
        for part in (part for part in parts if isinstance(part, Figure)):
            part.save(pictures, formats=("svg",))
    if isinstance(made, Figure):
        return made.to_markdown().strip()
    return markdown.filled(made.to_markdown(figures=bool(pictures))).strip()


def studies() -> dict[str, Study]:
    """All studies by name: each folder with a page."""
    folders = [page.parent for root in __path__ for page in Path(root).glob("*/page.md")]
    return {folder.name: Study(folder) for folder in sorted(folders)}


def papers() -> dict[str, Study]:
    """The studies of the report, in its order."""
    reported = [study for study in studies().values() if "report" in study.facts]
    return {study.name: study for study in sorted(reported, key=lambda study: int(study.facts["report"]))}


def study_named(name: str) -> Study:
    """A study by its name. Raises RequestError if there is none."""
    if name not in (known := studies()):
        raise unknown("study", name, known)
    return known[name]
