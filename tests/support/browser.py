"""Headless Chromium, driven by real clicks and keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LONG_S

HEIGHT = 1000


class Browser:
    """A page in Chromium. Elements are named by CSS selectors."""

    def __init__(self, profile: Path) -> None:
        from sp_bench.analysis.studies.explorer import chromium

        self._chromium, self.driver = chromium, chromium.start(profile)
        self.driver.set_script_timeout(LONG_S)

    def open(self, address: str, width: int = 1280, *, dark: bool = False, **state: Any) -> None:
        """Open a page in a window of that width, with a state in its address, and wait for its chart."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self._chromium.open_page(self.driver, address, state, width, HEIGHT)
        self.until(self._chromium.DRAWN)

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {expression}")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        self._chromium.wait_until(self.driver, condition, LONG_S)

    def click(self, selector: str) -> None:
        """Click on an element as a user does, and wait until the page is drawn again if it is."""
        self.driver.find_element("css selector", selector).click()

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def choose(self, selector: str, text: str) -> None:
        """Choose an option of a select by its text."""
        from selenium.webdriver.support.select import Select

        Select(self.driver.find_element("css selector", selector)).select_by_visible_text(text)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return self.driver.find_element("css selector", selector).text

    def texts(self, selector: str) -> list[str]:
        """The visible texts of all such elements."""
        return [element.text for element in self.driver.find_elements("css selector", selector)]

    def errors(self) -> list[str]:
        """The page's complaints since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def started(profile: Path) -> Iterator[Browser]:
    """A browser, closed at the end; the test is skipped where there is none."""
    pytest.importorskip("selenium", reason="needs selenium")
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    browser = Browser(profile)
    yield browser
    browser.driver.quit()
