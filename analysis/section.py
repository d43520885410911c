"""Sections of a study: texts, tables and figures. Notebooks show them one by one, the report all together."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sp_bench.analysis.figure import Figure
from sp_bench.analysis.number import Number, Source, about_number, sources_of
from sp_bench.analysis.table import Table

Part = Table | Figure


_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")


@dataclass(frozen=True)
class Text:
    """A paragraph with values in it.

    `template` names each value with its format: "{ratio:.2f} times". A Number becomes a link to its source. Other
    values are words, and what the study itself chose, such as a number of GPUs.
    """

    template: str
    values: Mapping[str, Number | str | float]

    def __str__(self) -> str:
        return _FIELD.sub(lambda match: _shown(self.values[match[1]], match[2]), self.template)

    @property
    def numbers(self) -> list[Number]:
        """The values that have a source."""
        return [value for value in self.values.values() if isinstance(value, Number)]

    def to_html(self) -> str:
        """A paragraph whose numbers are links to their sources."""

        def linked(match: re.Match[str]) -> str:
            value = self.values[match[1]]
            shown = html.escape(_shown(value, match[2]))
            if not isinstance(value, Number):
                return shown
            target, about = html.escape(value.sources[0].id), html.escape(about_number(value))
            return f'<a class="{value.kind}" href="#source-{target}" title="{about}">{shown}</a>'

        return f"<p>{_FIELD.sub(linked, html.escape(self.template))}</p>"

    _repr_html_ = to_html


def _shown(value: Number | str | float, format: str | None) -> str:
    return value.text(format or ".4g") if isinstance(value, Number) else f"{value:{format or ''}}"


def text(template: str, **values: Number | str | float) -> Text:
    """A text with its values. Raises KeyError for a field without value, ValueError for a value without field."""
    fields = {match[1] for match in _FIELD.finditer(template)}
    if missing := fields - set(values):
        raise KeyError(f"no value for {', '.join(sorted(missing))}")
    if unused := set(values) - fields:
        raise ValueError(f"not in the text: {', '.join(sorted(unused))}")
    return Text(template, values)


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
