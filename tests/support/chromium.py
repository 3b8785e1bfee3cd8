"""Pages in headless Chromium: for the tests of the report, and for its picture in the docs."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "needs Chromium and chromedriver: apt-get install chromium chromium-driver"


def programs() -> tuple[str, str] | None:
    """The browser and its driver, where this machine has both."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def chromium(downloads: Path) -> Iterator[Any]:
    """A selenium driver that leaves what a page saves in ``downloads``."""
    from selenium import webdriver

    if (found := programs()) is None:
        raise RuntimeError(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: Any, page: Path, width: int = 1280, scheme: str = "light") -> Any:
    """Open a report and wait until all figures are drawn."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    colours = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": colours})
    driver.get_log("browser")
    driver.get(page.absolute().as_uri())
    wait(lambda: driver.execute_script("return document.documentElement.dataset.drawn"))
    return driver


def wait(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found
