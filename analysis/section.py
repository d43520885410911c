"""Sections of a study: texts, tables and figures. Notebooks show them one by one, the report all together.

The words of a section stand in the study's words.md, which `section` fills with values:

    # fusion: What fused blocks change

    Blocks that are ready together become one kernel call. On {gpus} H100 a step is {high:.2f} times as fast.

    {picture}

    Table honest-fusion: Steps with and without fused blocks
    KV heads; method; step | ms; step when fused | ms; times as fast || .3f
    {rows:12}
    A note on the table.

A Number in a text links to its source. A slot alone is a figure, a table or a list of parts; below a table's columns
(table.columns) it is its rows, here with 12 that a page shows.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.analysis.figure import Figure
from sp_bench.analysis.number import Number, Source, about_number, formula, sources_of
from sp_bench.analysis.table import Table, columns

STUDIES = Path(__file__).parent / "studies"
Part = Table | Figure
_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_ROWS = re.compile(r"^\{(\w+)(?::(\d+))?\}$", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """A paragraph with values in it.

    `template` names each value with its format: "{ratio:.2f} times". A Number becomes a link to its source. Other
    values are words, other texts, and what the study itself chose, such as a number of GPUs.
    """

    template: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return _FIELD.sub(lambda match: _shown(self.values[match[1]], match[2]), self.template)

    @property
    def numbers(self) -> list[Number]:
        """The values that have a source."""
        of_values = ([v] if isinstance(v, Number) else getattr(v, "numbers", []) for v in self.values.values())
        return sum(of_values, [])

    def to_html(self) -> str:
        """A paragraph whose numbers are links to their sources."""
        return f"<p>{self._linked()}</p>"

    _repr_html_ = to_html

    def _linked(self) -> str:
        def linked(match: re.Match[str]) -> str:
            value = self.values[match[1]]
            if isinstance(value, Text):
                return value._linked()
            shown = html.escape(_shown(value, match[2]))
            if not isinstance(value, Number):
                return shown
            target, about = html.escape(value.sources[0].id), html.escape(about_number(value))
            return f'<a class="{value.kind}" href="#source-{target}" title="{about}">{shown}</a>'

        return _FIELD.sub(linked, html.escape(self.template))


def _shown(value: Any, format: str | None) -> str:
    return value.text(format or ".4g") if isinstance(value, Number) else f"{value:{format or ''}}"


def text(template: str, **values: Any) -> Text:
    """A text with its values. Raises KeyError for a field without value, ValueError for a value without field."""
    _check(template, values)
    return Text(template, values)


def _check(template: str, values: Mapping[str, Any]) -> None:
    fields = {match[1] for match in _FIELD.finditer(template)}
    if missing := fields - set(values):
        raise KeyError(f"no value for {', '.join(sorted(missing))}")
    if unused := set(values) - fields:
        raise ValueError(f"not in the text: {', '.join(sorted(unused))}")


def listed(values: Mapping[str, Any], each: str) -> Text:
    """The values by name, one after the other: {"ring": a, "mesh": b} with each="{name} {value:.0f}"."""
    parts = [each.replace("{name}", name).replace("{value", f"{{{name}") for name in values]
    return Text(", ".join(parts), values)


class Section:
    """A heading, and the texts, tables and figures below it."""

    def __init__(self, title: str, *parts: Text | Part) -> None:
        self.title, self.parts = title, parts

    @property
    def sources(self) -> list[Source]:
        """The sources of all numbers in the section, each once."""
        of_parts = (p.sources if isinstance(p, Figure) else sources_of(p.numbers) for p in self.parts)
        return list(dict.fromkeys(source for sources in of_parts for source in sources))

    def to_markdown(self, *, figures: bool = False) -> str:
        """The heading, texts and tables; figures are links to their SVG, or left out."""
        kept = (part for part in self.parts if figures or not isinstance(part, Figure))
        parts = (str(part) if isinstance(part, Text) else part.to_markdown() for part in kept)
        return "\n\n".join([f"## {self.title}", *map(str.strip, parts)])

    def to_html(self, id: str = "") -> str:
        """A section of the report's page, with the id that links to it."""
        parts = "".join(part.to_html() for part in self.parts)
        named = f' id="{id}"' if id else ""
        return f"<section{named}><h2>{html.escape(self.title)}</h2>{parts}</section>"

    _repr_html_ = to_html

    def saved(self) -> Iterator[Part]:
        """The tables and figures, which have files of their own."""
        return (part for part in self.parts if not isinstance(part, Text))


def section(place: str, **values: Any) -> Section:
    """The section of `place`, "study.name" in words.md, with its values. Raises like `text`."""
    title, paragraphs = _words(place)
    _check("\n".join([title, *paragraphs]), values)
    parts: list[Any] = []
    for one in paragraphs:
        alone = re.fullmatch(r"\{(\w+)\}", one)
        if one.startswith("Table "):
            parts.append(_table(one, values))
        elif alone and not isinstance(values[alone[1]], str | Number):
            value = values[alone[1]]
            parts += value if isinstance(value, list) else [value]
        else:
            parts.append(Text(one.replace("\n", " "), _of(one, values)))
    return Section(str(Text(title, values)), *parts)


def words(place: str, **values: Any) -> Text:
    """The paragraph of `place`, "study.name" in words.md, with its values. Raises like `text`."""
    return text(_words(place)[1][0].replace("\n", " "), **values)


def source(place: str) -> Source:
    """The formula of `place`: study.name for "# formula name: its reference" in words.md. Its id is study-name."""
    reference, paragraphs = _words(place.replace(".", ".formula "))
    return formula(place.replace(".", "-"), paragraphs[0].replace("\n", " "), reference)


@cache
def _words(place: str) -> tuple[str, list[str]]:
    """The title and the paragraphs of a place. Raises LookupError if there is none."""
    study, _, name = place.partition(".")
    for part in re.split(r"^# ", (STUDIES / study / "words.md").read_text(), flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        if head.partition(":")[0].strip() == name:
            return head.partition(":")[2].strip(), re.split(r"\n\n+", body.strip())
    raise LookupError(f"{study}/words.md has no section {name}")


def _of(template: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {match[1]: values[match[1]] for match in _FIELD.finditer(template)}


def _table(block: str, values: Mapping[str, Any]) -> Table:
    """The table of a block: its name and title, its columns, the slot of its rows, and a note."""
    slot = _ROWS.search(block)
    assert slot, f"no rows: {block}"
    (first, _, heads), note = block[: slot.start()].partition("\n"), block[slot.end() :]
    name, title, heads, note = (
        str(Text(part.strip().replace("\n", " "), values)) for part in (*first[6:].split(":", 1), heads, note)
    )
    return Table(name, title, columns(heads), values[slot[1]], note, shown_rows=int(slot[2]) if slot[2] else None)
