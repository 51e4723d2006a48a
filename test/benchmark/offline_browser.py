"""A headless Chromium without a network, for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def find_chromium() -> str:
    """Path of the system's Chromium; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    return path


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page with what it complained of and what it asked the network for.

    Attributes
    ----------
    page : playwright.sync_api.Page
    errors : list of str
        Messages of the console at the level of errors, exceptions, and requests that failed.
    requests : list of str
        Addresses that are neither files nor data.
    """

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fail if there was anything."""
        assert not self.errors
        assert not self.requests


@contextlib.contextmanager
def offline_tab(browser: Any, width: int = 1200, scheme: str = "light") -> Iterator[Tab]:
    """A tab of a context that is offline."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_offline(True)
    tab = Tab(context.new_page())

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            tab.requests.append(request.url)

    tab.page.on("console", lambda m: tab.errors.append(m.text) if m.type == "error" else None)
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("requestfailed", lambda request: tab.errors.append(f"failed: {request.url}"))
    tab.page.on("request", on_request)
    try:
        yield tab
    finally:
        context.close()
