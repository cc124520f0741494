"""`tlora-fx watch` and `report` show what the folders of a run hold; no training is needed."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree

import pytest

from tests.inspect.html_page import conftest as pages
from tlora_fx.cli import main
from tlora_fx.cli.terminal import Console
from tlora_fx.cli.watch import CURVE, curve, table
from tlora_fx.runtime.reports.run_view import read_run, thinned

browser = pages.browser
HOSTILE = "<script>document.title = 'run'</script>"


def write_job(folder, name, steps, *, last=40, status="running", evaluated=True):
    """A job's folder as training leaves it after some steps."""
    (folder / name).mkdir(parents=True)
    state = {"status": status, "step": 0, "steps": last}
    (folder / name / "status.json").write_text(json.dumps(state))
    data = {"samples": 30, "lengths": {"8": 10, "16": 20}}
    (folder / name / "data.json").write_text(json.dumps(data))
    append(folder / name, range(1, steps + 1))
    if evaluated:
        rows = [{"step": steps, "eval_loss": 1.25}]
        rows += [{"step": steps, "samples": [{"prompt": HOSTILE, "completion": "é"}]}]
        with (folder / name / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def append(folder, steps):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps(
                {"step": n, "loss": 4 - n / 20, "grad_norm": None, "learning_rate": 1e-3 / n,
                 "tokens": 100 * n, "seconds": 0.5}
            ) + "\n"
            for n in steps
        )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    write_job(tmp_path / "run", "a", 20)
    write_job(tmp_path / "run", "b.2", 10, last=10, status="done", evaluated=False)
    (tmp_path / "run" / "checkpoints").mkdir()
    return tmp_path / "run"


def output(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert not end.value.code
    return capsys.readouterr().out


def test_watching_tells_where_each_job_is_and_what_is_left(run, capsys):
    """Step, last loss, evaluation, tokens a second, and time left by the last steps' pace."""
    titles, first, second = output(["watch", run], capsys).splitlines()

    assert titles.split()[:4] == ["job", "status", "step", "losses"]
    assert [*first.split()[:3], *first.split()[4:]] == [
        "a", "running", "20/40", "3.0000", "1.2500", "200", "0:00:10",
    ]  # fmt: skip
    assert [*second.split()[:3], *second.split()[4:]] == ["b.2", "done", "10/10", "3.5000", "200"]


def test_the_first_step_of_a_start_says_nothing_of_the_pace(run, capsys):
    """It compiles; with no other step there is nothing to tell yet."""
    first = {"step": 1, "loss": 4.0, "tokens": 100, "seconds": 90.0, "phases": {"data": 80.0}}
    (run / "a" / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    [job, _] = read_run(run)
    assert (job.pace(), job.mean_rate(), job.replayed()) == (None, None, None)

    append(run / "a", [2, 3, 4])
    job.refresh()
    assert (job.pace(), job.mean_rate()) == ((0.5, 200.0), 200.0)


def test_rows_that_ran_as_graphs_are_told_as_a_share(run):
    """Of all rows of steady rounds."""
    with (run / "a" / "metrics.jsonl").open("w") as file:
        for step, replayed, more in ((1, 0, {"phases": {}}), (2, 1, {}), (3, 2, {})):
            row = {"step": step, "loss": 1.0, "tokens": step, "seconds": 1.0, "rows": 2}
            file.write(json.dumps(row | {"rows_replayed": replayed} | more) + "\n")

    [job, _] = read_run(run)
    assert job.replayed() == 0.75


def test_the_page_has_no_column_that_is_empty_for_all_jobs(run, capsys):
    """On a CPU no row is replayed."""
    output(["report", run, "-o", run / "page.html"], capsys)
    page = (run / "page.html").read_text("utf-8")

    assert "rows replayed" not in page
    assert page.count('data-title="last loss"') == 2


def test_the_page_says_what_the_newest_start_took(run, capsys):
    """Phase by phase, where the folder tells."""
    start = {"seconds": 14.25, "phases": {"imports": 2.1, "own": 3.0}, "other": 0.5}
    (run / "start.json").write_text(json.dumps(start))
    output(["report", run, "-o", run / "page.html"], capsys)

    page = (run / "page.html").read_text("utf-8")
    assert '<th scope="row">importing libraries</th><td class="number">2.1</td>' in page
    assert '<th scope="row">until the first step was done</th><td class="number">14.2</td>' in page


def test_on_a_narrow_terminal_no_curve_is_cut(run):
    """It is drawn in fewer blocks."""
    console = Console(width=80, file=io.StringIO())
    console.print(table(read_run(run), console.width))

    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert "…" not in console.file.getvalue()
    assert lines[1].split()[3].endswith("▁")


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (20, ["job", "step", "loss"]),
        (40, ["job", "status", "step", "loss", "eval", "loss"]),
        (60, ["job", "status", "step", "losses", "loss", "eval", "loss", "left"]),
    ],
)
def test_a_terminal_that_is_too_narrow_shows_fewer_columns(run, width, columns):
    """Each of them whole, the step and the loss to the last."""
    console = Console(width=width, file=io.StringIO())
    console.print(table(read_run(run), console.width))

    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].split() == columns
    assert "…" not in console.file.getvalue()


def test_a_curve_falls_as_its_values_do():
    """Each block is a mean of equally many; the highest is the full one."""
    assert curve([3.0, 2.0, 1.0]) == "█▅▁"
    assert curve([]) == ""
    assert len(curve(range(1000))) <= CURVE
    assert thinned([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]


def test_lines_that_come_are_read_once(run):
    """A torn one waits for its end, and a run that went back is read anew."""
    [job, _] = read_run(run)
    append(run / "a", [21])
    with (run / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22, "lo')
    job.refresh()
    assert job.step == 21

    (run / "a" / "metrics.jsonl").write_text("")
    append(run / "a", [1])
    job.refresh()
    assert (job.step, len(job.evaluations)) == (1, 0)


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_folder_without_a_run_is_told(tmp_path, capsys, command):
    """With what to do."""
    with pytest.raises(SystemExit) as end:
        main([command, str(tmp_path / "nothing")])

    assert end.value.code == 1
    assert "name the -o folder of train or run" in capsys.readouterr().err


def test_the_page_stands_alone_in_a_browser(run, capsys, browser):
    """Every curve has a line a job; nothing is fetched, run or shown of what a prompt says."""
    path = output(["report", run], capsys).strip()
    opened = browser.new_page(viewport={"width": 390, "height": 800})
    requests, said = [], []
    opened.on("request", lambda request: requests.append(request.url))
    opened.on("console", lambda message: said.append(message.text))
    opened.goto(f"file://{path}")

    assert [url for url in requests if not url.startswith("file:")] == []
    assert said == []
    assert opened.title() == "Run run"
    drawn = opened.locator("figure").evaluate_all(
        "all => all.map(one => [one.id, one.querySelectorAll('polyline, .bar').length])"
    )
    # Bars and blocks, and the legend's; blocks have their names beside them.
    assert dict(drawn) == {
        "losses": 4, "evaluations": 2, "rates": 4, "seconds": 4, "lengths": 6, "groups": 2,
    }  # fmt: skip
    assert HOSTILE in opened.inner_text("#samples")
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert opened.evaluate(wide)
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    assert opened.locator(".scroll").evaluate_all(cut) == 0
    opened.close()


def test_the_page_compares_the_jobs_of_a_sweep(run, capsys):
    """Rank and rate of each job that has an adapter, close losses apart, one label for each row."""
    spec = {"name": "a", "lora": {"r": 16}, "learning_rate": 3e-5}
    (run / "a" / "job.json").write_text(json.dumps(spec))
    (run / "b.2" / "job.json").write_text("no JSON")
    output(["report", run], capsys)
    page = (run / "report.html").read_text("utf-8")

    assert '<td class="number" data-title="rank">16</td>' in page
    assert '<td class="number" data-title="learning rate">3e-05</td>' in page
    assert "<dt>learning_rate</dt><dd>3e-05</dd>" in page
    hyperparameters = page.split('<section id="hyperparameters">')[1].split("</section>")[0]
    assert hyperparameters.count("<summary>") == 1
    losses, groups = (
        ElementTree.fromstring(
            page.split(f'<figure id="{name}">')[1].split("</figcaption>")[1].split("</figure>")[0]
        )
        for name in ("losses", "groups")
    )
    texts = [text.text for text in losses.iter("text") if text.get("class") == "end"]
    assert texts == ["3", "3.2", "3.4", "3.6", "3.8", "4"]
    assert [t.text for t in groups.iter("text") if t.get("class") == "end"] == ["a", "b.2"]


def test_the_page_says_why_a_job_failed_below_its_row(run, capsys):
    """A long reason has the width of the table."""
    reason = "step 2: loss nan, gradient norm nan; the adapter is kept as step 1 left it"
    (run / "a" / "status.json").write_text(json.dumps({"status": "failed", "reason": reason}))
    output(["report", run], capsys)
    page = (run / "report.html").read_text("utf-8")

    assert '<td data-title="status" class="failed">failed</td>' in page
    assert f'class="reason" colspan="{page.count("</th>", 0, page.index("</thead>"))}"' in page
    assert page.count(reason) == 1


def test_the_page_of_many_jobs_draws_how_long_their_samples_are_as_lines(run, capsys):
    """Bars of nine jobs cannot be told apart; lines end at all samples."""
    for number in range(9):
        write_job(run, f"job-{number}", 1, evaluated=False)
    output(["report", run], capsys)
    page = (run / "report.html").read_text("utf-8")
    figure = page.split('<figure id="lengths">')[1].split("</figure>")[0]

    assert figure.count("<polyline") == 11
    assert "at most so many tokens" in figure


def test_the_page_of_a_scheduled_run_shows_its_groups(run, capsys):
    """From the ledger: who trained together, on which GPUs, from when to when."""
    from tlora_fx.runtime.run_folder import LEDGER
    from tlora_fx.scheduler.store import Ledger

    ledger = Ledger(run / LEDGER)
    ledger._base.execute(
        "INSERT INTO epochs VALUES "
        "(1, '[\"a\", \"b.2\"]', '[0, 1]', '', 1.0, 0.0, 2.0, 9.0, '', 7.0)"
    )
    ledger.close()
    output(["report", run, "-o", run / "page.html"], capsys)

    assert (run / "page.html").read_text("utf-8").count("<title>group 1: a, b.2</title>") == 2
