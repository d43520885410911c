"""The explorer in headless Chromium: how it looks, and how fast it filters 5,000 records.

Needs selenium, Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import io
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver import Chrome

from sp_bench.analysis import explore
from sp_bench.analysis.explorer import page
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.studies.explorer import chromium
from sp_bench.records import Record

RECORDS, FACETS, TIMES = 5000, ("method", "cluster", "gpus", "seqlen"), 5
WIDTHS, HEIGHT, PATIENCE_S = (1280, 390), 900, 60
METHODS = ("ring", "striped", "usp", "mesh")
GPUS = (8, 16, 32, 64)
COLOURS = 256
"""Colours of a picture, which is a file of this repository and should be small."""
CLICK = """
    const [box, done] = arguments, before = document.body.dataset.drawn, begun = performance.now();
    const answer = () => {
        if (document.body.dataset.drawn === before) return setTimeout(answer, 1);
        const { filterMs, updateMs } = document.getElementById("count").dataset;
        done([Number(filterMs), Number(updateMs), performance.now() - begun]);
    };
    box.click();
    answer();
"""
"""Click on a box; how long it took until the points were filtered, their numbers counted, and the view drawn."""


def simulated(folder: Path) -> Mapping[Path, Record]:
    """A few simulated points, by file."""
    asked = [point(method=method, gpus=n, seqlen="256k", trace=2) for method in METHODS for n in GPUS]
    Runs(folder, workers=1).ask(asked)
    return explore.found_in([folder])


def many(like: Record, folder: Path) -> dict[Path, Record]:
    """Records that differ in six settings and in their time; their files are empty."""
    choice, records = random.Random(0), {}
    for i in range(RECORDS):
        path = folder / f"{i:016x}.json"
        path.touch()
        changes: dict[str, Any] = {
            "run_id": path.stem, "method": choice.choice(METHODS), "gpus": 2 ** choice.randrange(3, 11),
            "cluster": choice.choice(("h100_ndr400", "a100_hdr200", "b200")), "seqlen": 2 ** choice.randrange(14, 23),
            "kv_heads": choice.choice((1, 4, 8, 32)), "phase": choice.choice(("forward", "forward_backward")),
            "step_ms_median": choice.lognormvariate(3, 1),
        }  # fmt: skip
        records[path] = replace(like, **changes)
    return records


def opened(driver: Chrome, file: Path, width: int, state: Mapping[str, Any]) -> None:
    """Open a page in a window of that width, and wait until it is drawn."""
    chromium.open_page(driver, file.as_uri(), state, width, HEIGHT)
    chromium.wait_until(driver, chromium.DRAWN, PATIENCE_S)


def times_ms(driver: Chrome, name: str) -> list[list[float]]:
    """(filtered, counted, drawn) of each click on one value of a setting; clicks that undo it don't count."""
    box = driver.find_element("css selector", f'[data-setting="{name}"] input[data-code="0"]')
    return [driver.execute_async_script(CLICK, box) for _ in range(2 * TIMES)][::2]


@cache
def _seen(runs: Runs) -> tuple[str, int, list[str], list[dict[str, str]]]:
    """Chromium's version, the number of points shown, the pictures, and the rows of the speeds."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        few = simulated(folder / "records")
        (folder / "few.html").write_text(page.explorer(few, "Four methods, simulated", drawings=len(few)))
        larger = many(next(iter(few.values())), folder)
        (folder / "many.html").write_text(page.explorer(larger, f"{RECORDS:,} records", drawings=0))
        driver = chromium.start(folder / "profile")
        try:
            pictures = _pictures(driver, folder / "few.html", views(few), runs.pages)
            rows = _speeds(driver, folder / "many.html")
            return driver.capabilities["browserVersion"], len(few), pictures, rows
        finally:
            driver.quit()


def version(runs: Runs) -> str:
    """The version of Chromium."""
    return _seen(runs)[0]


def shown(runs: Runs) -> str:
    """The number of points in the pictures."""
    return str(_seen(runs)[1])


def pictures(runs: Runs) -> str:
    """All pictures, by width."""
    return "\n\n".join(_seen(runs)[2])


def speeds(runs: Runs) -> list[dict[str, str]]:
    """A row for each setting and view."""
    return _seen(runs)[3]


def views(found: Mapping[Path, Record]) -> dict[str, dict[str, Any]]:
    """The views of the pictures, by their names."""
    opened_point = next(r for r in found.values() if (r.method, r.gpus) == ("mesh", 16))
    return {"Chart": {"tab": "chart"}, "Compare": {"tab": "compare"}, "Point": {"point": opened_point.run_id}}


def _pictures(driver: Chrome, file: Path, shown: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    parts = []
    for width in WIDTHS:
        parts.append(f"## {width} pixels wide")
        for name, state in shown.items():
            picture = f"explorer-{name.lower()}-{width}.png"
            opened(driver, file, width, state)
            taken = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            taken.quantize(COLOURS).save(folder / picture, optimize=True)
            parts.append(f"![{name}, {width} pixels wide]({picture})")
    return parts


def _speeds(driver: Chrome, file: Path) -> list[dict[str, str]]:
    rows = []
    for tab, view in (("chart", "chart"), ("table", "points")):
        opened(driver, file, WIDTHS[0], {"tab": tab})
        for name in FACETS:
            steps = zip(*times_ms(driver, name), strict=True)
            rows.append(
                [view, name, *(f"{value:.1f}" for each in steps for value in (statistics.median(each), max(each)))]
            )
    times = (f"{what}, {which}" for what in ("filtered", "counted", "drawn") for which in ("median", "longest"))
    heads = ["view", "setting", *times]
    return [dict(zip(heads, row, strict=True)) for row in rows]
