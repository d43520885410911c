"""Headless Chromium, for pictures of pages and for tests of them. Needs selenium, Chromium and its driver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DRAWN = "document.body.dataset.drawn > 0"
"""Whether the explorer has drawn its view."""


def start(profile: Path) -> webdriver.Chrome:
    """A Chromium without a window, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def open_page(driver: webdriver.Chrome, address: str, state: Mapping[str, Any], width: int, height: int) -> None:
    """Open a page in a window of that size, in pixels, with a state in its address."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get("about:blank")
    driver.get(f"{address}#{quote(json.dumps(state))}" if state else address)


def wait_until(driver: webdriver.Chrome, condition: str, patience_s: float) -> None:
    """Wait until a JavaScript expression is true. Raises TimeoutException if it isn't in time."""
    wait = WebDriverWait(driver, patience_s, 0.05)
    wait.until(lambda _: driver.execute_script(f"return {condition}"), f"waited for {condition}")
