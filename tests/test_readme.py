"""What the README shows runs as it stands."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import fresh
from tlora_fx.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.md"))


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_trains_the_quickstart(tmp_path):
    """The block runs in a fresh process and ends with three jobs done, here of three steps."""
    (code,) = blocks("python")
    jobs = shutil.copytree(ROOT / "examples/quickstart", tmp_path / "examples/quickstart")
    content = yaml.safe_load((jobs / "jobs.yaml").read_text())
    for job in content["jobs"]:
        job["max_steps"] = 3
    (jobs / "jobs.yaml").write_text(yaml.safe_dump(content))

    told = fresh.run("-c", code, cwd=tmp_path)

    assert told.returncode == 0, told.stderr
    assert told.stdout.count(" done ") == 3
    assert (tmp_path / "runs" / "readme" / "records" / "adapter_model.safetensors").is_file()


def test_the_job_file_example_is_a_job_file(tmp_path):
    """Every key of the YAML block is one that job files have."""
    from tlora_fx.config.job_file import load_job_file

    (text,) = blocks("yaml")
    path = tmp_path / "jobs.yaml"
    path.write_text(text)

    assert [job.name for job in load_job_file(path).jobs] == ["math-r16", "chat-r4"]
    assert set(yaml.safe_load(text)) == {"base", "jobs"}


def test_the_pages_that_the_readme_links_to_exist():
    """No link leads nowhere."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)

    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_linked_from_the_index():
    """Nobody has to look into the folder to find one."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}

    assert "docs/index.md" in README
    assert sorted(name for name in pages if f"({name}" not in index) == []


def test_the_chart_shows_the_result_that_the_readme_names():
    """docs/assets/site.svg is what benchmarks/site_chart.py draws of that result."""
    from benchmarks.site_chart import chart

    result = json.loads((ROOT / "benchmarks/results/site-2026-11-22.json").read_text())

    assert "benchmarks/results/site-2026-11-22.json" in README
    assert (ROOT / "docs/assets/site.svg").read_text(encoding="utf-8") == chart(result)


def test_the_plan_that_the_readme_shows_needs_no_gpu(tmp_path, monkeypatch, capsys):
    """The command runs on the quickstart, with no profile but those that are shipped."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    (line,) = re.findall(r"^tlora-fx (plan .*?)  +#", README, flags=re.MULTILINE)
    words = line.replace("jobs.yaml", str(ROOT / "examples/quickstart/jobs.yaml")).split()

    with pytest.raises(SystemExit) as end:
        main(words)

    told = capsys.readouterr()
    assert not end.value.code, told.err
    assert "ESTIMATED" in told.out


def test_the_floors_stand_on_one_page():
    """CONTRIBUTING links the table, which names each room of the contract."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    floors, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    rooms = [name for line in floors["layers"][1:] for name in re.findall(r"(?<![(\w])\w+", line)]

    assert "docs/architecture.md#rooms" in contributing
    assert "| floor |" not in contributing
    assert [name for name in rooms if f"`{name}/`" not in page and f"`{name}.py`" not in page] == []


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda path: path.name)
def test_tables_of_the_benchmarks_are_whole(page):
    """No blank line parts a row from its table."""
    text = page.read_text(encoding="utf-8")
    rows = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]

    assert rows
    assert [block[0] for block in rows if not block[1:] or set(block[1]) - set("| -:")] == []


def test_the_error_page_is_up_to_date():
    """docs/errors.md is what `python -m tlora_fx.errors` prints."""
    from tlora_fx.errors.__main__ import page

    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").strip() == page().strip()


def test_the_job_file_page_names_every_key():
    """docs/job-file.md has a row for each field of a job, its base, its data and its sweep."""
    from tlora_fx.config.halving import HalvingSpec
    from tlora_fx.config.job import BaseSpec, DataSpec, Job
    from tlora_fx.config.sweep import ParameterRange, SweepSpec

    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    # What is left out of a job's record can be handed over from Python only.
    fields = {
        name
        for spec in (Job, BaseSpec, DataSpec, SweepSpec, ParameterRange, HalvingSpec)
        for name, field in spec.model_fields.items()
        if not field.exclude
    }

    assert {name for name in fields if f"`{name}`" not in page} == set()
