"""Tables of numbers with their sources, written as Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sp_bench import markdown
from sp_bench.analysis.explorer.fields import head
from sp_bench.analysis.number import KINDS, Number, about_number

Cell = Number | str | int


@dataclass(frozen=True)
class Column:
    """A column: its name, the unit of its numbers, and their format."""

    name: str
    unit: str = ""
    format: str = ".4g"

    @property
    def head(self) -> str:
        """The name with the unit."""
        return head(self.name, self.unit)


def columns(heads: str) -> list[Column]:
    """Columns from text, for example "method; time | ms | .2f; ratio || .2f": name, unit and format of each."""
    return [Column(*map(str.strip, head.split("|"))) for head in heads.split(";")]


@dataclass(frozen=True)
class Table:
    """A table. Every number in it has a source."""

    name: str
    """The name of its files, such as mesh-table3."""
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    """A remark that a reader needs to read it, in a sentence or two."""
    shown_rows: int | None = field(default=None, kw_only=True)
    """The number of rows that a page shows; the others unfold. None: all."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: a row of {len(row)} cells for {len(self.columns)} columns: {row}")

    @property
    def numbers(self) -> list[Number]:
        """All numbers of the table."""
        return [cell for row in self.rows for cell in row if isinstance(cell, Number)]

    @property
    def legend(self) -> str:
        """The kind of the numbers in each column."""
        kinds: dict[str, list[str]] = {}
        for i, column in enumerate(self.columns):
            of_column = {row[i].kind for row in self.rows if isinstance(row[i], Number)}  # type: ignore[union-attr]
            if of_column:
                kinds.setdefault(" or ".join(sorted(of_column, key=KINDS.index)), []).append(column.name)
        return "; ".join(f"{', '.join(names)}: {kind.replace('paper', 'as printed')}" for kind, names in kinds.items())

    def to_markdown(self) -> str:
        """Title, table, legend and note."""
        grid = markdown.table([column.head for column in self.columns], self._texts())
        return "\n\n".join(filter(None, (f"**{self.title}**", grid, _sentence(self.legend), self.note))) + "\n"

    def to_latex(self) -> str:
        """A booktabs table."""
        align = "".join("l" if isinstance(cell, str) else "r" for cell in (self.rows[0] if self.rows else self.columns))
        lines = [" & ".join(_latex(column.head) for column in self.columns)]
        lines += [" & ".join(map(_latex, row)) for row in self._texts()]
        head, *body = [line + r" \\" for line in lines]
        caption = _latex(" ".join(map(_sentence, filter(None, (self.title, self.legend)))))
        start = [r"\begin{table}", rf"\caption{{{caption}}}", rf"\label{{tab:{self.name}}}"]
        start += [rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule"]
        return "\n".join([*start, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def to_html(self) -> str:
        """A table whose numbers are links to their sources; a report lists the sources under these ids."""
        head = "".join(f'<th scope="col">{html.escape(column.head)}</th>' for column in self.columns)
        rows = [
            f"<tr>{''.join(_html(cell, c) for cell, c in zip(row, self.columns, strict=True))}</tr>"
            for row in self.rows
        ]
        shown = len(rows) if self.shown_rows is None else self.shown_rows
        caption = f"<caption>{html.escape(self.title)}</caption>"
        body = f'<table id="table-{self.name}">{caption}{_grid(head, rows[:shown])}'
        if rest := rows[shown:]:
            body += f"<details><summary>{len(rest)} more rows</summary><table>{_grid(head, rest)}</details>"
        notes = " ".join(part for part in (_sentence(self.legend), self.note) if part)
        region = f'class="scroll" tabindex="0" role="region" aria-label="{html.escape(self.title)}"'
        return f'<div {region}>{body}</div><p class="note">{html.escape(notes)}</p>'

    _repr_html_ = to_html

    def to_csv(self) -> str:
        """Values in full, and after each column of numbers the ids of their sources."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        sourced = [any(isinstance(row[i], Number) for row in self.rows) for i in range(len(self.columns))]
        heads = zip(self.columns, sourced, strict=True)
        writer.writerow(sum(([c.head, f"{c.name}: source"] if has else [c.head] for c, has in heads), []))
        for row in self.rows:
            cells: list[object] = []
            for cell, has in zip(row, sourced, strict=True):
                number = isinstance(cell, Number)
                ids = " ".join(source.id for source in cell.sources) if number else ""
                cells += [cell.value if number else cell, *([ids] if has else [])]
            writer.writerow(cells)
        return out.getvalue()

    def _texts(self) -> list[list[str]]:
        return [[_text(cell, c) for cell, c in zip(row, self.columns, strict=True)] for row in self.rows]

    def save(self, folder: Path) -> None:
        """Write <name>.md, .tex, .html and .csv to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        writers = {"md": self.to_markdown, "tex": self.to_latex, "html": self.to_html, "csv": self.to_csv}
        for ending, written in writers.items():
            (folder / f"{self.name}.{ending}").write_text(written())


def _grid(head: str, rows: Sequence[str]) -> str:
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _sentence(text: str) -> str:
    return f"{text}." if text else ""


def _text(cell: Cell, column: Column) -> str:
    return cell.text(column.format) if isinstance(cell, Number) else str(cell)


def _html(cell: Cell, column: Column) -> str:
    if not isinstance(cell, Number):
        kind = "name" if isinstance(cell, str) else "integer"
        return f'<td class="{kind}">{html.escape(str(cell))}</td>'
    about = html.escape(about_number(cell))
    link = f'<a href="#source-{html.escape(cell.sources[0].id)}" title="{about}">'
    return f'<td class="{cell.kind}">{link}{html.escape(_text(cell, column))}</a></td>'


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
