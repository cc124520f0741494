"""The service's page in Chromium; skipped where there is none."""

from __future__ import annotations

import json

import pytest

from tests.inspect.html_page.conftest import browser  # noqa: F401  (a fixture)
from tests.server.conftest import Asked, as_scheduled, job_file, listen
from tlora_fx.scheduler.executor import Failed
from tlora_fx.scheduler.store import Ledger


@pytest.fixture
def opened(browser, asked):  # noqa: F811
    """A service with jobs a and b in a group and c that waits, and its page, which never errs."""
    it: Asked = asked()
    it.submit(job_file("a", "b", "c"))
    as_scheduled(it.folder, [("a", "b")])
    server, address, thread = listen(it.service)
    page = browser.new_page(viewport={"width": 1200, "height": 700})
    page.set_default_timeout(20_000)
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield it, page, address
    page.close()
    server.should_exit = True
    thread.join()
    assert errors == []
    assert [url for url in requests if not url.startswith((address, "data:"))] == []


def row(page, name):
    return page.locator(f"tbody tr[data-job='{name}']")


def test_the_page_shows_jobs_groups_and_why_and_hears_of_what_happens(opened):
    """Without being loaded again, and from nowhere but the service."""
    it, page, address = opened
    page.goto(address)
    row(page, "a").locator(".loss").wait_for()

    assert row(page, "a").inner_text().split("\t")[:3] == ["a", "running", "5/10"]
    assert row(page, "c").inner_text().split("\t")[:2] == ["c", "received"]
    assert page.locator("#timeline rect").count() == 1
    row(page, "a").click()
    page.get_by_text("group 1 on 0 with b").wait_for()
    with (it.folder / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 0.125, "tokens": 60, "seconds": 0.1}) + "\n")
    page.locator("#job-facts").get_by_text("0.1250").wait_for()
    ledger = Ledger(it.folder / "ledger.sqlite")
    ledger.record(Failed(9.0, 1, "b", "loss nan"))
    ledger.close()
    it.service.store.tell(9.0, "failed", ["b"], "failed: loss nan")
    page.locator("#events").get_by_text("failed: loss nan").wait_for()
    row(page, "b").locator(".failed").wait_for()


@pytest.mark.slow
def test_the_page_works_by_keyboard_and_changes_jobs(opened):
    """Filter, arrows, Enter, and a button; what the service refuses is told."""
    it, page, address = opened
    page.goto(address)
    row(page, "c").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("received")
    row(page, "a").wait_for(state="detached")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.press("Escape")
    row(page, "a").focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.locator("#job-name").get_by_text("c", exact=True).wait_for()
    page.locator("button[data-verb=pause]").focus()
    page.keyboard.press("Enter")
    page.locator("button[data-verb=resume]").wait_for()

    [_, _, c] = it.service.store.jobs()
    assert c.wanted == "pause"
    it.ask("POST", "/api/v1/jobs/c/cancel")
    page.locator("button[data-verb=cancel]").wait_for(state="hidden")


@pytest.mark.slow
def test_the_page_asks_for_a_token_where_one_is_needed(opened):
    """And shows that user's jobs alone."""
    it, page, address = opened
    it.add("alice")
    it.submit(job_file("mine"), user="alice")
    page.goto(address)
    page.locator("#token").fill(it.tokens["alice"])
    page.keyboard.press("Enter")
    row(page, "alice.mine").wait_for()

    assert page.locator("tbody tr[data-job]").count() == 1
    assert page.locator("#timeline rect.other").count() == 1
