"""The report: one HTML page with all sections, their pictures, and the sources that the numbers link to."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sp_bench.analysis.explorer.fields import KIND_WORDS
from sp_bench.analysis.explorer.page import page as whole_page
from sp_bench.analysis.number import Source
from sp_bench.analysis.section import Section
from sp_bench.records import write_whole

STYLE = (Path(__file__).parent / "report.css").read_text()
KINDS = {
    "record": "Records, with the command that makes each again",
    "formula": "Formulas",
    "paper": "Tables of papers, as printed",
}


def page(title: str, studies: Mapping[str, Sequence[Section]], about: str) -> str:
    """A self-contained HTML page with the sections of all studies, by heading, and all sources.

    Raises ValueError if two sources have the same id, or two tables or two figures the same name.
    """
    contents, body = [], []
    ids = (f"section-{k}" for k in itertools.count(1))
    sources: dict[str, Source] = {}
    for name, sections in studies.items():
        anchor = "-".join(re.findall(r"\w+", name.lower()))
        links = [(id, section) for id, section in zip(ids, sections, strict=False)]
        below = "".join(f"<li>{_link(id, section.title)}</li>" for id, section in links)
        contents.append(f"<li>{_link(anchor, name)}<ol>{below}</ol></li>")
        body.append(f'<h1 id="{anchor}">{html.escape(name)}</h1>{"".join(s.to_html(id) for id, s in links)}')
        for source in (source for section in sections for source in section.sources):
            if sources.setdefault(source.id, source) != source:
                raise ValueError(f"two sources are called {source.id}: {source.text}; {sources[source.id].text}")
    names = Counter(
        (type(part).__name__.lower(), part.name)
        for sections in studies.values()
        for section in sections
        for part in section.saved()
    )
    if twice := [f"{kind} {name}" for (kind, name), count in names.items() if count > 1]:
        raise ValueError(f"names that are used twice: {', '.join(twice)}")
    kinds = "".join(f'<li class="{name.split()[0]}">{html.escape(words)}</li>' for name, words in KIND_WORDS.items())
    frame = (
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>{html.escape(title)}</h1><p>{html.escape(about)}</p><ul class='kinds'>{kinds}</ul></header>"
        f'<div class="report"><nav aria-label="Contents"><ol>{"".join(contents)}'
        "<li><a href='#sources'>Sources</a></li></ol></nav>"
        f'<main id="main" tabindex="-1">{"".join(body)}{_sources(list(sources.values()))}</main></div>'
    )
    return whole_page(title, frame, style=STYLE)


def _link(id: str, words: str) -> str:
    return f'<a href="#{id}">{html.escape(words)}</a>'


def write(path: Path, title: str, studies: Mapping[str, Sequence[Section]], about: str) -> None:
    """Write the page to `path`, and each table and figure to tables/ and figures/ beside it."""
    for sections in studies.values():
        for section in sections:
            for part in section.saved():
                part.save(path.parent / ("figures" if hasattr(part, "canvas") else "tables"))
    write_whole(path, page(title, studies, about))


def _sources(sources: Sequence[Source]) -> str:
    parts = []
    for kind, heading in KINDS.items():
        of_kind = sorted((s for s in sources if s.kind == kind), key=lambda source: source.text)
        rows = "".join(
            f'<tr id="source-{html.escape(s.id)}"><td><code>{html.escape(s.id)}</code></td>'
            f"<td>{html.escape(s.text)}</td></tr>"
            for s in of_kind
        )
        parts.append(f"<h2>{heading}</h2><table class='sources'>{rows}</table>" if rows else "")
    return f'<section><h1 id="sources">Sources</h1>{"".join(parts)}</section>'
