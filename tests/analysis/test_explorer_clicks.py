"""The explorer in Chromium, by real clicks and keys."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.analysis import explore
from sp_bench.analysis.explorer import page
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.verdict import OF_AMOUNTS, Ratio
from sp_bench.records import Record
from tests.support.browser import Browser, started
from tests.support.made_records import made, spread, written
from tests.support.marks import exhaustive

METHODS = ("ring", "striped", "ulysses", "usp", "mesh")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from started(tmp_path_factory.mktemp("chromium"))


def measured(folder: Path, run_id: str, step_ms: float, half: float, **changes: object) -> None:
    """A measured record whose interval is `half` of its median to both sides."""
    ends = {"step_ms_ci95_low": step_ms * (1 - half), "step_ms_ci95_high": step_ms * (1 + half)}
    written(folder, run_id, spread(step_ms), variant=None, **{**ends, **changes})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of simulated points on 2 to 8 GPUs, and of measured ones with and without overlapping intervals."""
    folder = tmp_path_factory.mktemp("records")
    asked = [point(method=m, gpus=n, seqlen="16k", heads=8, trace=2) for m in ("ring", "mesh") for n in (2, 4, 8)]
    Runs(folder, workers=1).ask(asked)
    measured(folder, "apart-ring", 100.0, 0.01, method="ring")
    measured(folder, "apart-mesh", 80.0, 0.01, method="mesh")
    measured(folder, "close-ring", 100.0, 0.05, method="ring", seqlen=2**18)
    measured(folder, "close-mesh", 93.0, 0.05, method="mesh", seqlen=2**18)
    records.write(folder, made("refused", status="unsupported", error="no <i>such</i> tile", step_ms_median=None))
    assert explore.main([str(folder)]) == 0
    return (folder / "explorer.html").as_uri()


@pytest.mark.long
def test_filters_by_click_and_from_the_address(browser: Browser, address: str) -> None:
    browser.open(address)
    assert browser.text("#count") == "11 of 11 points"
    browser.click('[data-setting="method"] input[data-code="0"]')
    browser.click('[data-setting="mode"] input[data-code="0"]')
    assert browser.text("#count") == "2 of 11 points"
    ring = browser.text('[data-setting="mode"] label:nth-of-type(2) .n')
    assert ring == "3", "what one facet keeps out is counted as if it were open"
    browser.driver.refresh()
    browser.until("document.body.dataset.drawn > 0")
    assert browser.text("#count") == "2 of 11 points", "the address has the filters"
    browser.driver.back()
    browser.until("document.getElementById('count').textContent.startsWith('5 of')")
    browser.click("#clear")
    browser.driver.find_element("id", "words").send_keys("mesh simulated")
    browser.until("document.getElementById('count').textContent.startsWith('4 of')")
    assert browser.errors() == []


@pytest.mark.long
def test_an_address_of_another_page_shows_what_is_here(browser: Browser, address: str) -> None:
    browser.open(address, asked={"x": "nothing", "type": "pie", "y": "mfu"}, chosen={"none": [1]}, point="gone")
    assert browser.text("#count") == "11 of 11 points"
    shown = [browser.js(f"document.querySelector('[name={name}]').value") for name in ("x", "type", "y")]
    assert shown == ["gpus", "line", "mfu"]
    assert browser.errors() == []


@pytest.mark.parametrize("kind", ["lines", "bars", "heat map"])
def test_no_series_has_measured_and_simulated_points(browser: Browser, address: str, kind: str) -> None:
    browser.open(address)
    before = browser.js("document.body.dataset.drawn")
    if kind != "lines":  # what the page begins with
        browser.choose('[name="type"]', kind)
        browser.until(f"document.body.dataset.drawn > {before}")
    words = " ".join(browser.texts("#chart svg text"))
    if kind == "heat map":
        assert "simulated" in words and "measured" in words, "a map for each"
    else:
        for name in ("ring (measured)", "ring (simulated)", "mesh (measured)", "mesh (simulated)"):
            assert name in words
    heads = browser.texts("#values th.number")
    assert heads == ["ring (measured)", "ring (simulated)", "mesh (measured)", "mesh (simulated)"]
    assert "Without a value: 1 unsupported" in browser.text("#caption")
    assert browser.errors() == []


@pytest.mark.long
def test_lines_that_differ_in_more_say_so(browser: Browser, address: str) -> None:
    browser.open(address, asked={"split": "", "x": "gpus"}, chosen={"mode": ["measured"]})
    assert "Lines of one colour differ in sequence length" in browser.text("#differences")
    before = browser.js("document.body.dataset.drawn")
    browser.click("#differences button")
    browser.until(f"document.body.dataset.drawn > {before}")
    assert browser.text("#differences") == ""
    assert {"sequence length 256k", "sequence length 1M"} <= set(browser.texts("#chart svg text"))


@pytest.mark.long
def test_overlapping_intervals_are_not_ranked(browser: Browser, address: str) -> None:
    browser.open(address, chosen={"mode": ["measured"]})
    browser.click("#tab-compare")
    browser.until("document.querySelectorAll('#pairs tbody tr').length == 2")
    rows = [browser.texts(f"#pairs tbody tr:nth-child({k}) td") for k in (1, 2)]
    by_length = {next(word for word in row[0].split(" ") if word in ("1M", "256k")): row for row in rows}
    assert by_length["1M"][-2:] == ["0.8 [0.7842, 0.8162]", "FASTER"]
    assert by_length["256k"][-1] == "AMBIGUOUS"
    assert "1 FASTER, 1 AMBIGUOUS" in browser.text("#outcome")
    assert browser.js("document.querySelectorAll('#ratios svg.marks').length") == 1
    browser.choose('#pick [name="result"]', "forward time (ms)")
    browser.until("document.getElementById('outcome').textContent.includes('forward time')")
    assert "2 AMBIGUOUS" in browser.text("#outcome"), "a measured time without interval"
    assert browser.errors() == []


def test_simulated_steps_have_the_intervals_of_their_validation(browser: Browser, address: str) -> None:
    browser.open(address, chosen={"mode": ["simulated"]}, tab="compare")
    browser.until("document.querySelectorAll('#pairs tbody tr').length == 3")
    rows = [browser.texts(f"#pairs tbody tr:nth-child({k}) td") for k in (1, 2, 3)]
    assert all("[" in row[-2] for row in rows) and "AMBIGUOUS" in {row[-1] for row in rows}
    assert "two of three measurements" in browser.text("#ratios-caption")
    assert browser.errors() == []


def test_measured_and_simulated_are_not_compared(browser: Browser, address: str) -> None:
    browser.open(address, chosen={"mode": ["measured"]}, tab="compare")
    browser.click("#set-a")
    browser.click('[data-setting="mode"] input[data-code="0"]')
    browser.click('[data-setting="mode"] input[data-code="1"]')
    browser.click("#set-b")
    browser.until("document.getElementById('outcome').textContent.includes('never compared')")
    assert browser.text("#outcome").startswith("A is measured and B is simulated: they are never compared here.")
    assert browser.texts("#pairs tr") == []


def test_verdicts_are_those_of_compare(browser: Browser, address: str) -> None:
    """The page's rules and analysis.verdict agree on ratios around every limit."""
    browser.open(address)
    values = (0.5, 0.97, 0.979, 0.9805, 0.99, 1.0, 1.005, 1.0199, 1.021, 1.2)
    cases = [(low, ratio, high) for low in values for ratio in values for high in values if low <= ratio <= high]
    script = """
        const done = arguments[arguments.length - 1];
        import("explorer/compare").then(({ verdict }) => done(arguments[0].map(([low, ratio, high]) =>
            ["less", "more", ""].map((better) => verdict({ ratio, low, high }, 0.02, better)))));
    """
    found = browser.driver.execute_async_script(script, cases)
    mirrored = {"FASTER": "SLOWER", "SLOWER": "FASTER"}
    for (low, ratio, high), said in zip(cases, found, strict=True):
        own = Ratio(ratio, low, high).verdict(0.02)
        assert said == [own, mirrored.get(own, own), OF_AMOUNTS[own]], (low, ratio, high)


def test_a_point_opens_by_keyboard(browser: Browser, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(address, chosen={"mode": ["simulated"], "method": ["mesh"], "gpus": [4]})
    browser.driver.execute_script("document.querySelector('#values button.open').focus()")
    browser.keys(Keys.ENTER)
    browser.until("document.querySelectorAll('dialog .picture svg.marks').length >= 6")
    assert browser.js("document.activeElement.closest('dialog') !== null"), "the focus is in the dialog"
    assert browser.text("#point-title").startswith("mesh 2x2, 4 GPUs of h100_ndr400, 16k tokens")
    assert browser.text("#command") == "python -m sp_bench gpus=4 seqlen=16k heads=8"
    names = {
        browser.js(f"document.querySelectorAll('dialog .picture')[{k}].getAttribute('aria-label')") for k in range(7)
    }
    assert {"Timeline of the step", "Assignment matrix, forward, by rank", "Bytes by class of links"} <= names
    assert "git commit" in browser.text("dialog")
    browser.keys(Keys.ESCAPE)
    browser.until("!document.getElementById('point').open")
    assert browser.js("document.activeElement.className") == "open", "the focus is back where it was"
    assert browser.errors() == []


def test_a_failed_point_says_why(browser: Browser, address: str) -> None:
    browser.open(address, tab="table", chosen={"status": ["unsupported"]})
    browser.click("#points button.open")
    browser.until("document.querySelector('dialog [role=alert]')")
    assert browser.text("dialog [role=alert]") == "unsupported: no <i>such</i> tile"


def test_tabs_and_sorting_by_keyboard(browser: Browser, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(address)
    browser.click("#tab-chart")
    browser.keys(Keys.ARROW_RIGHT)
    browser.until("!document.getElementById('panel-table').hidden")
    assert browser.js("document.activeElement.id") == "tab-table"
    head = next(k for k, text in enumerate(browser.texts("#points th"), 1) if text.startswith("step time"))
    browser.driver.execute_script(f"document.querySelector('#points th:nth-child({head}) button').focus()")
    browser.keys(Keys.SPACE)
    steps = [float(text.split(" ")[0].replace(",", "")) for text in browser.texts(f"#points td:nth-child({head})")[:-1]]
    assert steps == sorted(steps)
    assert browser.js(f"document.querySelector('#points th:nth-child({head})').ariaSort") == "ascending"


@pytest.mark.long
def test_everything_has_a_name(browser: Browser, address: str) -> None:
    """For screen readers, as Chromium computes it."""
    browser.open(address)
    for tab in ("chart", "table", "compare"):
        browser.click(f"#tab-{tab}")
        tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        roles = (
            "button",
            "combobox",
            "checkbox",
            "searchbox",
            "tab",
            "tabpanel",
            "region",
            "table",
            "figure",
            "dialog",
        )
        shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
        nameless = [
            n["role"]["value"] for n in shown if not n.get("name", {}).get("value") and n["role"]["value"] != "figure"
        ]
        assert not nameless, tab
        assert len(shown) > 20


OTHER_WINDOWS = ((1280, False), (1280, True), (390, False))


@pytest.mark.parametrize(("width", "dark"), [(390, True), *(exhaustive(*case) for case in OTHER_WINDOWS)])
def test_no_page_is_wider_than_its_window(browser: Browser, address: str, width: int, dark: bool) -> None:
    for tab in ("chart", "table", "compare"):
        browser.open(address, width, dark=dark, tab=tab)
        assert browser.js("document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("SP_BENCH_SCREENSHOTS"):
            name = f"explorer-{tab}-{width}-{'dark' if dark else 'light'}.png"
            browser.driver.save_screenshot(str(Path(folder) / name))
    ground = browser.js("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")


def many(folder: Path, count: int) -> dict[Path, Record]:
    """Records that differ in six settings; their files are empty."""
    choice = random.Random(0)
    found = {}
    for i in range(count):
        where = {"method": choice.choice(METHODS), "cluster": choice.choice(("h100_ndr400", "a100_hdr200", "b200"))}
        what = {"gpus": 2 ** choice.randrange(3, 11), "seqlen": 2 ** choice.randrange(14, 23)}
        rest = {"kv_heads": choice.choice((1, 4, 8, 32)), "phase": choice.choice(("forward", "forward_backward"))}
        path = folder / f"{i:016x}.json"
        path.touch()
        found[path] = made(path.stem, **where, **what, **rest, step_ms_median=choice.lognormvariate(3, 1), variant=None)
    return found


@pytest.mark.long
def test_thousands_of_records(browser: Browser, tmp_path: Path) -> None:
    """How long the page took to filter is printed, not judged."""
    (tmp_path / "page.html").write_text(page.explorer(many(tmp_path, 5000), "5,000 records", drawings=0))
    browser.open((tmp_path / "page.html").as_uri(), tab="table")
    assert browser.text("#count") == "5,000 of 5,000 points"
    times = []
    for name in ("method", "cluster", "gpus", "seqlen"):
        browser.click(f'[data-setting="{name}"] input[data-code="0"]')
        data = browser.js("{...document.getElementById('count').dataset}")
        times.append(f"{name}: {data['filterMs']} ms to filter, {data['updateMs']} ms with the facets' counts")
    assert int(browser.text("#count").split(" ")[0]) < 100
    assert len(browser.texts("#points tbody tr")) == int(browser.text("#count").split(" ")[0])
    print("5,000 records; " + "; ".join(times))
    assert browser.errors() == []
