"""What a study is made of: sections of text, tables and figures, which notebooks show and the report joins."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sp_bench.analysis.figure import Figure
from sp_bench.analysis.number import Number, Source, about_number, sources_of
from sp_bench.analysis.table import Table

Part = Table | Figure


@dataclass(frozen=True)
class Text:
    """A sentence or more with numbers in it.

    `template` has a field for each number by name, with its format: "{ratio:.2f} times". Only so do numbers get into a
    text, so that each can be looked up.
    """

    template: str
    numbers: dict[str, Number]

    def __str__(self) -> str:
        return _FIELD.sub(lambda match: self.numbers[match[1]].text(match[2] or ".4g"), self.template)

    def to_html(self) -> str:
        """A paragraph whose numbers are links to their sources."""

        def linked(match: re.Match[str]) -> str:
            number = self.numbers[match[1]]
            source, text = number.sources[0], number.text(match[2] or ".4g")
            about = html.escape(about_number(number))
            return f'<a class="{number.kind}" href="#source-{html.escape(source.id)}" title="{about}">{text}</a>'

        return f"<p>{_FIELD.sub(linked, html.escape(self.template))}</p>"

    _repr_html_ = to_html


_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")


def text(template: str, **numbers: Number) -> Text:
    """A text with its numbers. Raises KeyError for a field without number, ValueError for a number without field."""
    fields = {match[1] for match in _FIELD.finditer(template)}
    if missing := fields - set(numbers):
        raise KeyError(f"no number for {', '.join(sorted(missing))}")
    if unused := set(numbers) - fields:
        raise ValueError(f"not in the text: {', '.join(sorted(unused))}")
    return Text(template, numbers)


@dataclass(frozen=True)
class Section:
    """A heading, and what belongs under it."""

    title: str
    parts: Sequence[Text | Part]

    @property
    def sources(self) -> list[Source]:
        """Of all its numbers."""
        found: dict[Source, None] = {}
        for part in self.parts:
            if isinstance(part, Figure):
                found |= dict.fromkeys(part.sources)
            else:
                numbers = part.numbers.values() if isinstance(part, Text) else part.numbers
                found |= dict.fromkeys(sources_of(numbers))
        return list(found)

    def to_html(self) -> str:
        """A section of a page."""
        return f"<section><h2>{html.escape(self.title)}</h2>{''.join(part.to_html() for part in self.parts)}</section>"

    _repr_html_ = to_html

    def saved(self) -> Iterator[Part]:
        """What has files of its own."""
        return (part for part in self.parts if not isinstance(part, Text))
