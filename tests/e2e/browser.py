"""A real browser for tests: headless Chromium, driven by Selenium.

Needs Chromium with its driver (Debian: `apt-get install chromium chromium-driver`). `PENSTOCK_SCREENSHOTS=FOLDER` keeps
the pictures that tests take.
"""

import base64
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_WAIT_S = 60.0


class Browser:
    """Headless Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> str:
        self.driver.get(url)
        return self.text

    @property
    def text(self) -> str:
        return self.driver.execute_script("return document.body.innerText")

    def find(self, selector: str) -> Any:
        return self.driver.execute_script("return document.querySelector(arguments[0])", selector)

    def wait(self, what: Callable[[], Any], seconds: float = _WAIT_S) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return found

    def show(self, width: int, theme: str) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, name: str) -> None:
        """Keep a picture, if pictures are wanted."""
        if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
            shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": False})
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def pictures(self, name: str) -> None:
        """Keep pictures of the open page in both widths and colors."""
        for width, theme in ((390, "dark"), (390, "light"), (1440, "dark"), (1440, "light")):
            self.show(width, theme)
            self.picture(f"{name}-{theme}-{width}")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser; skips the test where there is none."""
    chromium, chromedriver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not chromium or not chromedriver:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=service.Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
