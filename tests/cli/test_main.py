"""`tlora-fx` itself: its own options, and what other libraries say meanwhile."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh
from tlora_fx import __version__
from tlora_fx.cli import main
from tlora_fx.errors import printable
from tlora_fx.host.quiet_import import NOTICES, without_foreign_notices


@pytest.mark.parametrize("words", [["--version"], ["--version", "plan"]])
def test_the_version_is_said_without_a_command(words, capsys):
    """And nothing else happens."""
    with pytest.raises(SystemExit) as end:
        main(words)

    assert not end.value.code
    assert capsys.readouterr().out.strip() == __version__


def test_the_module_says_its_version_too():
    """`python -m tlora_fx --version`, as a user starts it."""
    told = fresh.run("-m", "tlora_fx", "--version")

    assert (told.returncode, told.stdout.strip()) == (0, __version__), told.stderr


@pytest.mark.slow
def test_importing_peft_says_nothing():
    """In an interpreter of its own, which imports PEFT and transformers anew."""
    code = (
        "from tlora_fx.host.quiet_import import without_foreign_notices\n"
        "with without_foreign_notices():\n"
        "    import peft, transformers.models.llama.modeling_llama\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stderr == ""


@pytest.mark.parametrize("name", NOTICES)
def test_other_messages_of_the_same_libraries_are_told(name):
    """And all of them again afterwards."""
    logger, seen = logging.getLogger(name), logging.Handler()
    told = []
    seen.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(seen)
    try:
        with without_foreign_notices():
            logger.warning("a notice: %s", NOTICES[name])
            logger.warning("something else")
        logger.warning("later: %s", NOTICES[name])
    finally:
        logger.removeHandler(seen)

    assert told == ["something else", f"later: {NOTICES[name]}"]


@pytest.mark.parametrize("named", ["folder", "argument"])
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, capsys, named
):
    """No tokenizer opens it, and no ledger holds it; its bytes are spelled out."""
    name = os.fsdecode(b"t\xe4st")
    folder = tmp_path / (name if named == "folder" else "plain")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(["run", "jobs", "-o", name if named == "argument" else "out"])

    said = capsys.readouterr().err
    assert end.value.code == 1
    assert "error[T0002]" in said
    assert f"  {named}" in said
    assert "t\\xe4st" in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("train", "-o", "out"),
        ("verify",),
        ("compile", "-o", "out"),
        ("explain", "--node", "lm_head"),
        ("plan", "--gpus", "1"),
        ("profile", "-o", "out"),
        ("inspect",),
        ("data",),
        ("bisect", "--check", "true"),
    ],
    ids=lambda words: words[0],
)
def test_no_command_runs_the_code_of_a_base_unasked(tmp_path, monkeypatch, capsys, words):
    """Every one that reads a job file wants its own switch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    config = {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "evil.py").write_text("open('mark', 'w')")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "jobs.yaml").write_text(
        "base: {config: base, trust_remote_code: true}\n"
        "jobs: [{name: a, lora: {r: 2}, data: {path: x.jsonl}}]\n"
    )
    name, *more = words
    with pytest.raises(SystemExit) as end:
        main([name, "jobs.yaml", *more])

    assert end.value.code == 1
    assert "error[T0105]" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


def test_what_an_error_quotes_is_shown_and_not_obeyed(tmp_path, capsys):
    """A key that would clear the terminal and write a line of its own."""
    (tmp_path / "jobs.yaml").write_text('base: {config: b}\n"\\e[2J\\u202edone\\r": 1\njobs: []\n')
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "jobs.yaml")])

    told = capsys.readouterr().err
    assert r"\x1b[2J\u202edone\r" in told
    assert printable(told) == told


def test_an_output_that_lacks_characters_gets_them_spelled_out(tmp_path):
    """A pipe in ASCII gets the whole table; it was a traceback."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "status.json").write_text('{"status": "running", "step": 1, "steps": 2}')
    (tmp_path / "job" / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "grad_norm": null, "learning_rate": 0.1, "tokens": 9, '
        '"seconds": 0.5}\n'
    )
    ended = subprocess.run(
        [sys.executable, "-c", "from tlora_fx.cli import main; main()", "watch", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u25" in ended.stdout


def test_an_output_on_a_full_disk_is_told(tmp_path):
    """In one line; it was a traceback."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "status.json").write_text('{"status": "running", "step": 1, "steps": 2}')
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from tlora_fx.cli import main; main()", "results", tmp_path],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip

    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "the output cannot be written: No space left on device" in ended.stderr


@pytest.mark.parametrize(("words", "sets"), [(["passes"], True), (["passes", "--help"], False)])
def test_a_command_sets_up_threads_before_it_computes(monkeypatch, words, sets):
    """OpenMP reads its variables when torch is imported."""
    called = []
    monkeypatch.setattr("tlora_fx.cli.thread_rules.set_up", lambda: called.append("set up"))
    monkeypatch.setattr(
        "tlora_fx.cli._app", lambda asked: lambda *args, **how: called.append(asked)
    )
    main(words)

    assert called == (["set up", "passes"] if sets else ["passes"])


def test_a_command_imports_torch_with_threads_that_sleep():
    """Seen by what OpenMP itself shows at its start; the process ends once torch has begun."""
    code = (
        "import os, sys\n"
        "class Begun:\n"
        "    def find_spec(name, *_):\n"
        "        if 'torch._C' in sys.modules: os._exit(3)\n"
        "sys.meta_path.insert(0, Begun)\n"
        "from tlora_fx.cli import main\n"
        "main(['passes'])\n"
    )
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 3
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in ended.stderr
