"""A real browser, and a real page to open in it. Without one these tests are skipped, and say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptq.cli import invoke

playwright = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TESTED THE REPORT: pip install playwright")

# No sandbox: it needs rights that containers don't have. No calls home either: the tests count requests.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[playwright.Browser]:
    program = os.environ.get("PTQ_BROWSER") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        pytest.skip("NO BROWSER TESTED THE REPORT: run scripts/install-browser, or set PTQ_BROWSER to a chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded task taken down the main road, and reported."""
    folder = tmp_path_factory.mktemp("run") / "reports" / "digits"
    for command in (
        "calibrate --observer percentile --batches 4",
        "smooth --alpha 0.5 --explicit never",
        "quantize --bits W4A4",
        "evaluate --images 60 --error-batches 1",
        "sweep --alphas 0.2,0.5,0.8 --bits W4A4 --images 30 --no-auto",
        "report",
    ):
        assert invoke([*command.split(), "--run", str(folder), "--quiet"]) == 0, command
    return folder


class Opened:
    """A page, and what went wrong or over the network since it was opened."""

    def __init__(self, page: playwright.Page, path: Path) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", lambda message: self.problems.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self._requested(request.url))
        page.goto(path.as_uri())
        self.loaded = path.as_uri()

    def _requested(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.problems.append(f"request: {url}")


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: playwright.Browser, folder: Path) -> Iterator[Open]:
    """Open a report in a context of its own: ``open_page(color_scheme="dark")``."""
    contexts = []

    def open_(path: Path | None = None, **settings: object) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.set_default_timeout(30_000)  # a busy machine is slow
        contexts.append(context)
        return Opened(context.new_page(), path or folder / "report.html")

    yield open_
    for context in contexts:
        context.close()
