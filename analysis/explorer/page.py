"""Self-contained HTML pages: the frame that the report and the explorer share, and the explorer's page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.analysis.explorer.columns import columns
from sp_bench.analysis.explorer.details import as_text, drawn, of_point
from sp_bench.analysis.explorer.fields import KIND_WORDS, RESULTS, SETTINGS
from sp_bench.analysis.figure import colours
from sp_bench.analysis.frames import methods_in_order
from sp_bench.records import Record
from sp_bench.records.rows import Result, Setting

HERE = Path(__file__).parent
LIBRARIES = ("vega", "vega-lite", "vega-embed")
MODULES = (
    *("data", "dom", "filters", "groups", "charts", "compare"),
    *("tables", "point", "chart_view", "compare_view", "main"),
)
"""The page's JavaScript modules, each imported by its name from those after it."""


def page(title: str, body: str, *, style: str, head: str = "") -> str:
    """A whole HTML page in the project's style, light and dark. `style` is CSS beside that of all pages."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_text('page.css')}{style}</style>{head}</head>"
        f"<body>{body}</body></html>\n"
    )


def explorer(
    found: Mapping[Path, Record],
    title: str,
    *,
    drawings: int,
    own: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> str:
    """The explorer's page of these records. The newest `drawings` have their timelines and matrices in it.

    `own` is the folder of --config-dir (details.of_point).
    """
    newest = set(sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:drawings])
    details, parts = {}, {}
    for path, record in found.items():
        progress(record.run_id)
        content = of_point(record, path, private=False, own=own)
        if path in newest:
            content |= _shared(drawn(record, path), parts)
        details[record.run_id] = packed(content)
    return _explorer(found, title, {"details": details, "parts": parts})


def served(found: Mapping[Path, Record], title: str) -> str:
    """The explorer's page of these records, which asks its server for what it shows of an opened point."""
    return _explorer(found, title, {"server": True})


def packed(content: Any) -> str:
    """JSON, deflated and in base64, which the page inflates when it is needed."""
    return base64.b64encode(zlib.compress(as_text(content).encode(), 9)).decode()


def _shared(content: dict[str, Any], parts: dict[str, str]) -> dict[str, Any]:
    """The content with its matrices replaced by their keys in `parts`: many points have the same."""
    keys = []
    for one in content["matrices"]:
        text = as_text(one)
        keys.append(key := hashlib.sha256(text.encode()).hexdigest()[:16])
        parts.setdefault(key, packed(one))
    return {**content, "matrices": keys}


def _explorer(found: Mapping[Path, Record], title: str, more: Mapping[str, Any]) -> str:
    names = methods_in_order({record.method for record in found.values()})
    content = {
        "title": title,
        **columns(found),
        "fields": {"settings": _named(SETTINGS), "results": _named(RESULTS)},
        "kinds": KIND_WORDS,
        "colours": {name: _hex(colour) for name, colour in colours(names).items()},
        **more,
    }
    data = f'<script type="application/json" id="records">{_json(content)}</script>'
    imports = {f"explorer/{name}": f"data:text/javascript;base64,{_module(name)}" for name in MODULES}
    # Modules that import each other by name work from file:// too, where files can't.
    modules = f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
    body = _text("explorer.html").replace("{{title}}", html.escape(title)) + data + _libraries()
    start = '<script type="module">import { start } from "explorer/main"; start();</script>'
    return page(title, body + start, style=_text("explorer.css"), head=modules)


def _named(marks: Mapping[str, Setting] | Mapping[str, Result]) -> list[dict[str, Any]]:
    return [{"name": name, **asdict(mark)} for name, mark in marks.items()]


def _libraries() -> str:
    """The chart libraries, with their licences beside them."""
    return "".join(
        f"<script>/*! {name}\n{_text(f'vendor/{name}.LICENSE')}*/\n{_text(f'vendor/{name}.min.js')}</script>"
        for name in LIBRARIES
    )


def _json(content: Any) -> str:
    """JSON that can stand in a <script>: no text of a record ends it."""
    return json.dumps(content).replace("<", "\\u003c")


@cache
def _text(name: str) -> str:
    return (HERE / name).read_text()


def _module(name: str) -> str:
    return base64.b64encode(_text(f"{name}.js").encode()).decode()


def _hex(colour: Any) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)
