"""A terminal of 80 columns, the README and the site, as pictures.

Needs mkdocs, selenium, Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import markdown
from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium.webdriver import Chrome

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.explorer import chromium
from sp_bench.resources import ROOT

COLUMNS, COLOURS, PATIENCE_S = 80, 32, 60
TERMINAL, WIDTHS, HEIGHT = (740, 710), (1280, 390), 900
"""The windows: of the terminal (width, height), and of pages."""
COMMAND = "method=mesh gpus=256"
PAGES = {"home": "index", "methods side by side": "results/side_by_side", "which method when": "how-to/choose"}
"""The pages of the site that are shown, with their files."""
STYLE = """<meta name=viewport content="width=device-width"><style>
body { max-width: 980px; margin: 1em auto; padding: 0 1em; font: 16px/1.5 sans-serif }
pre { overflow-x: auto; padding: 1em; background: #f6f8fa; line-height: 1.25 } img { max-width: 100% }
code { font: 85% monospace; background: #f6f8fa } pre code { background: none }</style>"""
"""The widths and fonts of a page on GitHub."""


def pictures(runs: Runs) -> str:
    """All pictures, with the command or page of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown = {"terminal": (_terminal(folder / "terminal.svg"), (TERMINAL[0],)), "README": (_readme(folder), WIDTHS)}
        shown |= {page: (file, WIDTHS) for page, file in _site(folder / "site").items()}
        driver = chromium.start(folder / "profile")
        try:
            parts = [f"## The terminal: `python -m sp_bench {COMMAND}`"]
            for what, (file, widths) in shown.items():
                parts += [f"## {what[0].upper()}{what[1:]}"] * (what != "terminal")
                parts += [_taken(driver, file, what, width, runs.pages) for width in widths]
            return "\n\n".join(parts)
        finally:
            driver.quit()


def _terminal(file: Path) -> Path:
    """The command's output in a terminal of 80 columns, as a drawing."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "sp_bench", *COMMAND.split()],
            cwd=folder, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(done.stdout))
    file.write_text(console.export_svg(title=f"python -m sp_bench {COMMAND}"))
    return file


def _readme(folder: Path) -> Path:
    text = (ROOT / "README.md").read_text().replace("(docs/", f"({(ROOT / 'docs').as_uri()}/")
    page = folder / "readme.html"
    page.write_text(STYLE + markdown.markdown(text, extensions=["fenced_code", "tables", "sane_lists"]))
    return page


def _site(folder: Path) -> dict[str, Path]:
    """The files of the site's pages that are shown."""
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--no-directory-urls", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    return {name: folder / f"{file}.html" for name, file in PAGES.items()}


def _taken(driver: Chrome, file: Path, what: str, width: int, folder: Path) -> str:
    """A page's first screen as a picture; the line that shows it. Raises RuntimeError if the window is too narrow."""
    chromium.open_page(driver, file.as_uri(), {}, width, dict([TERMINAL]).get(width, HEIGHT))
    chromium.wait_until(driver, "document.readyState === 'complete'", PATIENCE_S)
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    if wide > width:
        raise RuntimeError(f"{what}: {wide} pixels wide in a window of {width}")
    name = f"screens-{what.lower().replace(' ', '_')}-{width}.png"
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLOURS).save(folder / name, optimize=True)
    return f"![{what}, {width} pixels wide]({name})"
