"""Parts of the sections that studies make."""

from __future__ import annotations

from collections.abc import Iterable

from sp_bench.analysis import notebooks
from sp_bench.analysis.number import Number
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text
from sp_bench.analysis.studies import study_named
from sp_bench.analysis.table import Cell, Table
from tests.support.typed import of_kind


def tables_of(section: Section) -> dict[str, Table]:
    """The tables of a section by name."""
    return {part.name: part for part in section.parts if isinstance(part, Table)}


def table_of(section: Section) -> Table:
    """The first table of a section."""
    return next(iter(tables_of(section).values()))


def numbers(cells: Iterable[Cell]) -> list[Number]:
    """Cells that are numbers with their sources."""
    return [of_kind(Number, cell) for cell in cells]


def values(cells: Iterable[Cell]) -> list[float]:
    """The values of such cells, each of which has one."""
    return [number.known for number in numbers(cells)]


def words_of(section: Section) -> str:
    """All texts of a section."""
    return " ".join(str(part) for part in section.parts if isinstance(part, Text))


def sections_of(name: str, runs: Runs) -> list[Section]:
    """The sections of a study."""
    return study_named(name).sections(runs)


def code_of(name: str) -> list[str]:
    """The code cells of a study's notebook."""
    return [cell.source for cell in notebooks.notebook(study_named(name)).cells if cell.cell_type == "code"]
