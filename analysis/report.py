"""The report: one HTML page with all sections, their pictures, and the sources that the numbers link to."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    sources: dict[str, Source] = {}
    for name, sections in studies.items():
        anchor = "-".join(re.findall(r"\w+", name.lower()))
        contents.append(f'<li><a href="#{anchor}">{html.escape(name)}</a></li>')
        body.append(f'<h1 id="{anchor}">{html.escape(name)}</h1>{"".join(s.to_html() for s in sections)}')
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
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><header><h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>"
        f'<p class="kinds"><span class="paper">as printed in the paper</span> <span class="computed">computed: counted'
        f' from plans, or by formula</span> <span class="simulated">simulated</span> <span class="measured">measured'
        f"</span></p><nav><ol>{''.join(contents)}<li><a href='#sources'>Sources</a></li></ol></nav></header>"
        f"<main>{''.join(body)}</main>{_sources(list(sources.values()))}</body></html>\n"
    )


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
