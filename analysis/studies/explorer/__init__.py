"""The explorer in headless Chromium: how it looks.

Needs selenium, Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
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

WIDTHS, HEIGHT, PATIENCE_S = (1280, 390), 900, 60
METHODS = ("ring", "striped", "usp", "mesh")
GPUS = (8, 16, 32, 64)
COLOURS = 256
"""Colours of a picture, which is a file of this repository and should be small."""


def simulated(folder: Path) -> Mapping[Path, Record]:
    """A few simulated points, by file."""
    asked = [point(method=method, gpus=n, seqlen="256k", trace=2) for method in METHODS for n in GPUS]
    Runs(folder, workers=1).ask(asked)
    return explore.found_in([folder])


def opened(driver: Chrome, file: Path, width: int, state: Mapping[str, Any]) -> None:
    """Open a page in a window of that width, and wait until it is drawn."""
    chromium.open_page(driver, file.as_uri(), state, width, HEIGHT)
    chromium.wait_until(driver, chromium.DRAWN, PATIENCE_S)


@cache
def _seen(runs: Runs) -> tuple[str, int, list[str]]:
    """Chromium's version, the number of points shown, and the pictures."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        few = simulated(folder / "records")
        (folder / "few.html").write_text(page.explorer(few, "Four methods, simulated", drawings=len(few)))
        driver = chromium.start(folder / "profile")
        try:
            pictures = _pictures(driver, folder / "few.html", views(few), runs.pages)
            return driver.capabilities["browserVersion"], len(few), pictures
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


def views(few: Mapping[Path, Record]) -> dict[str, dict[str, Any]]:
    """The views of the pictures, by their names."""
    opened_point = next(r for r in few.values() if (r.method, r.gpus) == ("mesh", 16))
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
