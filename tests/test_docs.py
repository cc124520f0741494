"""What the pages show runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from scripts.make_docs import REFERENCE, gather
from tests import fresh
from tlora_fx.config.job import Job
from tlora_fx.errors import JobError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
PACKAGES = [ROOT / "examples" / name for name in ("extension", "own_kernel")]
CHANGELOG = ROOT / "CHANGELOG.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def imports_of(text):
    """What a file or a block imports: name to module and name."""
    lines = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return {
        alias.asname or alias.name: (getattr(line, "module", None), alias.name)
        for line in lines
        for alias in line.names
    }


def test_what_the_page_shows_stands_in_the_package():
    """Every block is a piece of a file of the examples, to the letter, behind its imports."""
    configs = [(package / "pyproject.toml").read_text(encoding="utf-8") for package in PACKAGES]
    assert [block for block in blocks("toml") if not any(block in each for each in configs)] == []
    files = [path.read_text("utf-8") for package in PACKAGES for path in package.rglob("*.py")]

    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        given = {}
        for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
            head = re.match(r"(?:(?:from|import) .*\n)*", block)[0]
            piece = block[len(head) :].lstrip("\n")
            given |= imports_of(head)
            source = next((text for text in files if piece in text), None)
            assert source is not None, piece
            used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r'"[^"\n]*"', "", piece)))
            wanted = {name: home for name, home in imports_of(source).items() if name in used}
            assert wanted.items() <= given.items(), piece


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page):
    """No link of a page is broken."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_pages_name_are_there(page):
    """`ir/graph.py` may stand in tlora_fx, `service/` in a run; no other file has moved."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`(?!service/)((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|json))`", text)

    assert [
        n for n in named if not (ROOT / n).exists() and not (ROOT / "tlora_fx" / n).exists()
    ] == []


def test_the_tutorial_works_word_by_word(tmp_path):
    """Its blocks and commands run one after another; PEFT answers what `generate` does."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = follow_tutorial(tmp_path)

    answer = re.search(r"^sums: (3 \+ 4 =.*)$", said, flags=re.MULTILINE)
    assert said.count(answer[1]) >= 2
    assert re.search(r"3 \+ 4 = \d", said)
    assert (tmp_path / "tutorial/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_a_newcomer_clones_runs_the_demo_and_follows_the_tutorial(tmp_path):
    """As the README and the tutorial say; what is installed already is taken for .venv."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (clone,) = re.findall(r"^git clone .*", readme, flags=re.MULTILINE)
    (demo,) = re.findall(r"^make demo\b", readme, flags=re.MULTILINE)
    subprocess.run(
        clone.split(" && ")[0].replace("<address of this repository>", str(ROOT)).split(),
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    folder, installed = tmp_path / "tlora-fx", tmp_path / "installed"
    installed.touch()
    given = [f"BIN={Path(sys.executable).parent}", f"STAMP={installed}"]
    subprocess.run(
        [*demo.split(), *given], cwd=folder, check=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip

    assert len(list((folder / "runs/quickstart").glob("*/adapter_config.json"))) == 3
    assert re.search(r"3 \+ 4 = \d", follow_tutorial(folder))


def follow_tutorial(folder):
    """Do what the page says, block by block, in a folder; returns what was printed."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    said = ""
    for language, block in re.findall(r"```(\w*)\n(.*?)```", page, flags=re.DOTALL):
        if language == "yaml":
            (folder / "tutorial/jobs.yaml").write_text(block, encoding="utf-8")
        elif language == "python":
            said += ran(folder, "-c", block)
        elif block.startswith("tlora-fx "):
            said += typed(folder, block)
        else:
            assert [line for line in block.splitlines() if line not in said] == []
    return said


def typed(folder, block):
    """Type commands; what stands before ^C runs until then."""
    before, _, after = block.rpartition("^C")
    lines = [shlex.split(line, comments=True)[1:] for line in before.splitlines()]
    said = interrupted(folder, lines[0], lines[1:]) if lines else ""
    for line in after.splitlines():
        if words := shlex.split(line, comments=True):
            said += ran(folder, "-m", "tlora_fx", *words[1:])
    return said


def interrupted(folder, command, meanwhile):
    """Start a training, run other commands once it has done some steps, and press Ctrl-C."""
    output = folder / command[command.index("-o") + 1]
    program = fresh.Program("-m", "tlora_fx", *command, cwd=folder)
    until = time.monotonic() + 900
    while not (lines := list(output.glob("*/metrics.jsonl"))) and time.monotonic() < until:
        assert program.poll() is None
        time.sleep(0.01)
    assert lines
    # It shall not end before Ctrl-C is pressed, however slow the others are.
    os.kill(program.pid, signal.SIGSTOP)
    try:
        said = "".join(ran(folder, "-m", "tlora_fx", *words) for words in meanwhile)
    finally:
        os.kill(program.pid, signal.SIGINT)
        os.kill(program.pid, signal.SIGCONT)
    ended = program.wait()
    assert ended.returncode == 130, ended.stderr
    assert "stopped after a checkpoint" in ended.stderr
    assert f"go on with: tlora-fx {shlex.join(command)} --resume" in ended.stderr
    return said


def test_the_site_holds_every_page_and_what_links_lead_to(tmp_path):
    """`scripts/make_docs.py` gathers them; the reference has what authors of passes ask for."""
    pages = gather(tmp_path)

    names = {str(page) for page in pages}
    assert {str(path.relative_to(ROOT)) for path in PAGES} < names
    assert (tmp_path / "benchmarks/results/site-2026-11-22.json").is_file()
    assert {"docs/adr/index.md", "examples/extension/index.md"} < names
    for page in pages:
        prose = re.sub(r"```.*?```", "", (tmp_path / page).read_text(), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#:\s]+)[)#]", prose)
        assert [link for link in links if not (tmp_path / page.parent / link).is_file()] == []
    asked = ["small_base", "GroupGraph", "JobGraph", "Block", "TensorRef", "Match", "GroupPass"]
    given = {
        name: value
        for modules in REFERENCE.values()
        for module in modules
        for name, value in vars(import_module(module)).items()
        if getattr(value, "__module__", "") == module
    }
    assert [name for name in asked if not given[name].__doc__] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """mkdocs is strict: a link to nothing, an anchor that is not there, an unknown module."""
    pytest.importorskip("mkdocstrings")
    gather(tmp_path / "pages")
    text = (ROOT / "mkdocs.yml").read_text().replace("build/docs", str(tmp_path))
    (tmp_path / "mkdocs.yml").write_text(text.replace("paths: [.]", f"paths: [{ROOT}]"))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/reference/graphs.html").read_text()
    assert 'id="tlora_fx.ir.graph.GroupGraph"' in page


def ran(folder, *words):
    """What a program printed that ended well."""
    ended = fresh.run(*words, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_example_of_the_page_on_numerics_runs(capsys):
    """It prints a verdict of every pass."""
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    jobs = str(ROOT / "examples" / "quickstart" / "jobs.yaml")

    exec(code.replace('"jobs.yaml"', repr(jobs)), {})

    assert "numerics  lower-adapters on group: within bound" in capsys.readouterr().out


def test_the_examples_of_the_page_on_nano_batches_run(capsys):
    """The graph calls each layer twice, and the controller finds a count that pays."""
    page = (ROOT / "docs" / "nano-batches.md").read_text(encoding="utf-8")
    jobs = str(ROOT / "examples" / "quickstart" / "jobs.yaml")

    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(code.replace('"examples/quickstart/jobs.yaml"', repr(jobs)), {})

    layers, chosen = capsys.readouterr().out.splitlines()
    assert layers in page
    assert int(chosen.split()[0]) in (4, 6, 8)


def test_the_example_of_the_page_on_loops_runs(capsys):
    """It prints losses, targets and steps, own losses, and how far compiled layers are."""
    page = (ROOT / "docs" / "group-step.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    jobs = str(ROOT / "examples" / "quickstart" / "jobs.yaml")

    names = {}
    exec(code.replace('"examples/quickstart/jobs.yaml"', repr(jobs)), names)

    first, second, logprobs, metrics, layers = capsys.readouterr().out.splitlines()
    assert float(first.split()[0]) > 0
    assert (first.split()[1], second.split()[0]) == ("3", "1")
    assert logprobs.startswith("tensor([-")
    assert metrics == "({'sequences': 1.0}, {'sequences': 1.0})"
    assert len(names["mine"][0]) == len(names["reference"][0]) == 3
    assert layers == "compiling None"


def test_the_example_of_the_page_on_sampling_runs(capsys):
    """It prints tokens, their log-probabilities and the reason of the end, and learns from them."""
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    jobs = str(ROOT / "examples" / "quickstart" / "jobs.yaml")

    names = {}
    exec(code.replace('"examples/quickstart/jobs.yaml"', repr(jobs)), names)

    assert re.match(r"\(\d+, .*\) \(-\d.*\) (length|stop)$", capsys.readouterr().out)
    assert [len(each) for each in names["drawn"].values()] == [2, 1]
    assert names["step"].member(names["first"]).step == 1


def test_the_examples_of_the_page_on_python_run(tmp_path, monkeypatch, capsys):
    """The script of TRL and what it becomes train, and so does all that follows on the page."""
    page = (ROOT / "docs" / "in-python.md").read_text(encoding="utf-8")
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(re.findall(r"```python\n(.*?)```", tutorial, flags=re.DOTALL)[0], {})
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    for code in blocks:
        exec(code, names)

    said = capsys.readouterr().out
    assert re.search(r"^sums +done +20 ", said, flags=re.MULTILINE)
    assert re.search(r"^prefer +done +4 ", said, flags=re.MULTILINE)
    assert re.search(r"^judge +done +4 ", said, flags=re.MULTILINE)
    assert re.search(r"^own 20 [01]", said, flags=re.MULTILINE)
    assert len(names["table"]) == 3
    assert (len(names["swept"]), len(names["drawn"])) == (4, 3)
    before, after = (block.splitlines() for block in blocks[:2])
    assert len(set(before) - set(after)) <= 10


def test_the_mistake_of_the_page_on_python_is_told_so():
    """To the letter."""
    page = (ROOT / "docs" / "in-python.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"```\n(error.*?)\n```", page, flags=re.DOTALL)

    with pytest.raises(JobError) as caught:
        Job("sums", base="m", lora=8, data="x.jsonl", beta=0.1)

    assert str(caught.value) == told


def test_the_example_of_the_page_on_scheduling_runs(capsys):
    """It prints what a step of the group is made of."""
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    names = {}
    exec(code, names)

    assert "optimizer" in capsys.readouterr().out
    assert names["times"].shape == (2,)
