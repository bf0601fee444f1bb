"""A real headless Chromium for the tests of the web page. Each module starts a browser, whose requests are recorded.

Without Chromium and its driver, the tests are skipped, or fail in CI. ``make tools`` installs both.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,900", "--lang=en",
    # The browser's own requests (time, start page) go to a port where no server listens.
    "--proxy-server=http://127.0.0.1:9",
)  # fmt: skip


class Browser:
    """A running browser. ``requests``: the addresses that its pages have requested so far."""

    def __init__(self, folder: Path) -> None:
        options = ChromeOptions()
        options.binary_location = next(found for name in _BROWSERS if (found := shutil.which(name)))
        for flag in (*_FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.requests: list[str] = []

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def note_requests(self) -> list[str]:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return self.requests

    def complaints(self) -> list[str]:
        """Return the console's errors since the last call: script errors and requests blocked by the content security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self.driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not any(map(shutil.which, _BROWSERS)) or not shutil.which("chromedriver"):
        why = "Chromium or its driver is missing on this machine: run make tools (it uses Debian's archive), or install them yourself"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    made = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield made
    finally:
        made.close()
