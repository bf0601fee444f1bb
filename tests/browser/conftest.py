"""A real Chromium, headless, for the tests of the web page. It starts once, and what it asks for is recorded.

Where there is no Chromium with its driver, the tests are skipped and say so, but not in CI. ``make tools`` installs both.
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
    # What the browser itself asks for, whatever its pages are (the time, a start page), goes to a port where nobody listens.
    "--proxy-server=http://127.0.0.1:9",
)  # fmt: skip


class Browser:
    """``requests``: the addresses that pages have asked for so far."""

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
        """Send a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def note_requests(self) -> list[str]:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return self.requests

    def complaints(self) -> list[str]:
        """What the console has to say since the last time: errors of scripts, what the content security policy has blocked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self.driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not any(map(shutil.which, _BROWSERS)) or not shutil.which("chromedriver"):
        why = "no Chromium with its driver on this machine: make tools installs both from Debian's archive, or install them yourself"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    made = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield made
    finally:
        made.close()
