"""The explorer in headless Chromium: docs/results/explorer.md, how it looks and how fast it filters 5,000 records.

python -m benchmarks.explorer

Needs selenium, Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import io
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver import Chrome

from benchmarks import chromium
from benchmarks.reports import RESULTS
from sp_bench import markdown
from sp_bench.analysis import explore
from sp_bench.analysis.explorer import page
from sp_bench.analysis.runs import Runs, point
from sp_bench.machine import cores_here
from sp_bench.records import Record

RECORDS, FACETS, TIMES = 5000, ("method", "cluster", "gpus", "seqlen"), 5
SHOWN = 50
"""Points that the table shows before it is asked for more (PAGE of analysis/explorer/tables.js)."""
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
ABOUT = """# The explorer

Made by `python -m benchmarks.explorer` on {cores} cores in headless Chromium {version}. The pictures show {shown}
simulated points. `python -m analysis.explore` makes such a page of any folder of records
([Analyse and compare records](../how-to/analyse.md#explore-records-in-a-browser))."""
SPEED = """## How fast {records:,} records are filtered

The records differ in method, cluster, GPUs, length, key heads and phase, and their times are drawn at random. One value
of a setting is chosen by a click, {times} times each; the median and the longest, in milliseconds, by the page's own
clock. *Filtered*: it is known which points are left. *Counted*: the numbers beside all values of all settings are
counted again and shown. *Drawn*: the view shows the points that are left; the table shows the first {shown} of them."""


def simulated(folder: Path) -> Mapping[Path, Record]:
    """A few simulated points, by file."""
    asked = [point(method=method, gpus=n, seqlen="256k", trace=2) for method in METHODS for n in GPUS]
    Runs(folder, workers=1).ask(asked)
    return explore.found_in([folder])


def many(like: Record, folder: Path) -> dict[Path, Record]:
    """Records that differ in six settings and in their time; their files are empty."""
    choice, found = random.Random(0), {}
    for i in range(RECORDS):
        path = folder / f"{i:016x}.json"
        path.touch()
        changes: dict[str, Any] = {
            "run_id": path.stem, "method": choice.choice(METHODS), "gpus": 2 ** choice.randrange(3, 11),
            "cluster": choice.choice(("h100_ndr400", "a100_hdr200", "b200")), "seqlen": 2 ** choice.randrange(14, 23),
            "kv_heads": choice.choice((1, 4, 8, 32)), "phase": choice.choice(("forward", "forward_backward")),
            "step_ms_median": choice.lognormvariate(3, 1),
        }  # fmt: skip
        found[path] = replace(like, **changes)
    return found


def opened(driver: Chrome, file: Path, width: int, state: Mapping[str, Any]) -> None:
    """Open a page in a window of that width, and wait until it is drawn."""
    chromium.open_page(driver, file.as_uri(), state, width, HEIGHT)
    chromium.wait_until(driver, chromium.DRAWN, PATIENCE_S)


def times_ms(driver: Chrome, name: str) -> list[list[float]]:
    """(filtered, counted, drawn) of each click on one value of a setting; clicks that undo it don't count."""
    box = driver.find_element("css selector", f'[data-setting="{name}"] input[data-code="0"]')
    return [driver.execute_async_script(CLICK, box) for _ in range(2 * TIMES)][::2]


def main() -> int:
    """Write the page and its pictures."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = simulated(folder / "records")
        (folder / "few.html").write_text(page.explorer(found, "Four methods, simulated", drawings=len(found)))
        larger = many(next(iter(found.values())), folder)
        (folder / "many.html").write_text(page.explorer(larger, f"{RECORDS:,} records", drawings=0))
        driver = chromium.start(folder / "profile")
        try:
            parts = [
                ABOUT.format(cores=cores_here(), version=driver.capabilities["browserVersion"], shown=len(found)),
                *_pictures(driver, folder / "few.html", views(found)),
                SPEED.format(records=RECORDS, times=TIMES, shown=SHOWN),
                _speeds(driver, folder / "many.html"),
            ]
        finally:
            driver.quit()
    (RESULTS / "explorer.md").write_text("\n\n".join(parts) + "\n")
    return 0


def views(found: Mapping[Path, Record]) -> dict[str, dict[str, Any]]:
    """What is shown, by its name."""
    opened_point = next(r for r in found.values() if (r.method, r.gpus) == ("mesh", 16))
    return {"Chart": {"tab": "chart"}, "Compare": {"tab": "compare"}, "Point": {"point": opened_point.run_id}}


def _pictures(driver: Chrome, file: Path, shown: dict[str, dict[str, Any]]) -> list[str]:
    parts = []
    for width in WIDTHS:
        parts.append(f"## {width} pixels wide")
        for name, state in shown.items():
            picture = f"explorer-{name.lower()}-{width}.png"
            opened(driver, file, width, state)
            taken = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            taken.quantize(COLOURS).save(RESULTS / picture, optimize=True)
            parts.append(f"![{name}, {width} pixels wide]({picture})")
    return parts


def _speeds(driver: Chrome, file: Path) -> str:
    rows = []
    for tab, view in (("chart", "chart"), ("table", "points")):
        opened(driver, file, WIDTHS[0], {"tab": tab})
        for name in FACETS:
            steps = zip(*times_ms(driver, name), strict=True)
            rows.append(
                [view, name, *(f"{value:.1f}" for each in steps for value in (statistics.median(each), max(each)))]
            )
    heads = (f"{what}, {which}" for what in ("filtered", "counted", "drawn") for which in ("median", "longest"))
    return markdown.table(["view", "setting", *heads], rows)


if __name__ == "__main__":
    sys.exit(main())
