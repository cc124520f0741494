"""The HTML page in a real browser: Chromium, driven by Playwright.

Skipped where there is no Chromium; on Debian `apt install chromium` brings one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.pages import stages
from tests.models import SHALLOW, base_of, job
from tlora_fx.compiler import compile
from tlora_fx.inspect.html import write_html
from tlora_fx.inspect.program import Recorder
from tlora_fx.inspect.schema import PassStage

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
LARGE = {"width": 1400, "height": 900}


@dataclass
class Opened:
    """A page, and what it should never do."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def labels(self) -> list[str]:
        """What the rows of the tree are called, from the top."""
        rows = self.page.locator("[role=treeitem]")
        told = rows.evaluate_all(
            "rows => rows.map(row => [Number(row.style.getPropertyValue('--place')),"
            " row.querySelector('.label').textContent])"
        )
        return [label for _, label in sorted(told)]

    def row(self, name: str) -> Any:
        """The row of the tree whose name this is."""
        label = self.page.locator(".label").get_by_text(name, exact=True)
        return self.page.locator("[role=treeitem]", has=label).first

    def active(self) -> Any:
        """The row that screen readers follow."""
        return self.page.locator(f"#{self.page.get_attribute('#tree', 'aria-activedescendant')}")

    def open_all(self) -> None:
        """Unfold the tree, folder by folder."""
        closed = self.page.locator("[role=treeitem][aria-expanded=false] .twisty")
        while closed.count():
            closed.first.click()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a file."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=300_000
        )
        yield started
        started.close()


def listening(page: Any, opened: list[Opened]) -> Any:
    """A page whose errors and requests go to what was opened last."""
    page.set_default_timeout(300_000)
    page.on("console", lambda message: opened[-1].console.append(message.text))
    page.on("pageerror", lambda error: opened[-1].console.append(str(error)))
    page.on("request", lambda request: opened[-1].requests.append(request.url))
    return page


@pytest.fixture(scope="module")
def tab(browser) -> Iterator[tuple[Any, list[Opened]]]:
    """One tab for all pages of a file that ask for nothing of their own; a tab is a process."""
    context = browser.new_context(viewport=LARGE)
    opened: list[Opened] = []
    yield listening(context.new_page(), opened), opened
    context.close()


@pytest.fixture
def opened(browser, tab, tmp_path) -> Iterator[Callable[..., Opened]]:
    """Write stages as a page and open it."""
    contexts = []

    def open_page(
        given: list[PassStage] | None = None, size: Any = LARGE, **options: Any
    ) -> Opened:
        path = Path(tmp_path, "page.html")
        write_html(given or stages(), path, title="a page")
        if size is LARGE and not options:
            page, known = tab
            page.mouse.move(0, 0)
        else:
            contexts.append(browser.new_context(viewport=size, **options))
            known = []
            page = listening(contexts[-1].new_page(), known)
        found = Opened(page)
        known.append(found)
        found.page.goto(path.as_uri())
        found.page.wait_for_selector("body.ready")
        return found

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> list[PassStage]:
    """Every pass over two real jobs, one of which has branches that no pattern lowers."""
    folder = tmp_path_factory.mktemp("base")
    base = base_of(folder, "llama", dtype="float32", **SHALLOW["llama"])
    recorder = Recorder()
    compile(
        [
            job("few", base, r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
            job("dora", base, r=2, use_dora=True, lora_dropout=0.1, target_modules=["q_proj"]),
        ],
        instruments=[recorder],
    )
    return recorder.stages
