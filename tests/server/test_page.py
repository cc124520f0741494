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
    page.set_default_timeout(300_000)
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
    row(page, "a").locator("path.loss").wait_for()

    assert row(page, "a").inner_text().split("\t")[:5] == ["a", "running", "4", "2e-4", "5/10"]
    assert row(page, "c").inner_text().split("\t")[:2] == ["c", "received"]
    # Groups are asked for beside the jobs.
    page.locator("#timeline rect").first.wait_for(state="attached")
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


@pytest.mark.parametrize("width", [700, 1200, 1300])
def test_steps_of_long_jobs_are_shown_whole(opened, width):
    """However wide the window is."""
    it, page, address = opened
    page.set_viewport_size({"width": width, "height": 700})
    it.service.store.rows("UPDATE jobs SET request = json_set(request, '$.steps', 20000)")
    with (it.folder / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12345, "loss": 0.125, "tokens": 60, "seconds": 0.1}) + "\n")
    page.goto(address)
    row(page, "a").locator("td.step").get_by_text("12345/20000").wait_for()

    cell = row(page, "a").locator("td.step")
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")


def test_a_sweep_is_sorted_by_click_and_by_keyboard(opened):
    """By evaluation loss up, down, and by state again; jobs without one stand last."""
    it, page, address = opened
    for name, loss in (("a", 1.5), ("b", 1.25)):
        with (it.folder / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "eval_loss": loss}) + "\n")
    page.goto(address)
    row(page, "b").get_by_text("1.2500").wait_for()
    title = page.locator("th.eval")
    order = "rows => rows.map(row => row.dataset.job)"
    rows = page.locator("tbody tr[data-job]")

    title.locator("button").click()
    assert rows.evaluate_all(order) == ["b", "a", "c"]
    assert title.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert rows.evaluate_all(order) == ["a", "b", "c"]
    assert title.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Space")
    assert rows.evaluate_all(order) == ["a", "b", "c"]
    assert title.get_attribute("aria-sort") is None


def test_a_jobs_detail_has_its_hyperparameters_and_an_axis_that_fits(opened):
    """Losses from 2 to 0.4, with round ticks around them; nothing is wider than a phone."""
    _, page, address = opened
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(address)
    row(page, "a").wait_for()
    row(page, "a").click()
    page.locator("#hyperparameters").get_by_text("learning_rate").wait_for()
    page.locator("#curve path").wait_for()

    told = page.locator("#hyperparameters").inner_text().split("\n")
    assert told[: told.index("lr_scheduler_type")] == ["lora.r", "4", "learning_rate", "0.0002"]
    ticks = page.locator("#curve text[text-anchor=end]").all_text_contents()
    assert ticks[:-1] == ["0.0", "0.5", "1.0", "1.5", "2.0"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


AXES = """async ([address, rows]) => {
  const { axisOf } = await import(`${address}/axis.js`);
  const told = ({ low, high, ticks }) => [low, high, ticks.map((tick) => tick.text)];
  return rows.map((values) => told(axisOf(values)));
}"""


def test_axes_fit_any_values(opened):
    """The ends hold all values, and ticks are few and read differently."""
    _, page, address = opened
    page.goto(address)
    rows = [[5.38, 5.28], [2.5], [0, 0], [-0.5, 0.5], [5.3812, 5.3804], [1e-9, 3e-9], [1e9, 1], []]
    for values, (low, high, texts) in zip(rows, page.evaluate(AXES, [address, rows]), strict=True):
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)
        assert low < high
        assert len(set(texts)) == len(texts) <= 7
    [(_, _, texts)] = page.evaluate(AXES, [address, rows[:1]])
    assert texts == ["5.28", "5.30", "5.32", "5.34", "5.36", "5.38"]


SORTED = """async ([address, jobs, id, descending]) => {
  const { byColumn } = await import(`${address}/columns.js`);
  const filled = jobs.map((job) => ({ priority: 0, submitted: 0, gpus: [], ...job }));
  return filled.sort(byColumn(id, descending)).map((job) => job.name);
}"""


@pytest.mark.parametrize(
    ("column", "descending", "names"),
    [
        ("job", False, ["r2", "r8", "r32"]),
        ("state", False, ["r8", "r2", "r32"]),
        ("rank", True, ["r32", "r8", "r2"]),
        ("rate", False, ["r32", "r2", "r8"]),
        ("eval", False, ["r2", "r32", "r8"]),
        ("eval", True, ["r32", "r2", "r8"]),
    ],
)
def test_columns_sort_by_their_values(opened, column, descending, names):
    """Names by the numbers in them, states by what runs, and what is missing last."""
    _, page, address = opened
    page.goto(address)
    jobs = [
        {"name": "r32", "state": "done", "rank": 32, "learning_rate": 3e-5, "eval_loss": 1.5},
        {"name": "r8", "state": "running", "rank": 8, "learning_rate": 1e-3, "eval_loss": None},
        {"name": "r2", "state": "queued", "rank": 2, "learning_rate": 1e-4, "eval_loss": 0},
    ]

    assert page.evaluate(SORTED, [address, jobs, column, descending]) == names


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
