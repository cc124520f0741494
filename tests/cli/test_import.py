"""`tlora-fx import`: what it prints, writes and refuses."""

from __future__ import annotations

import pytest

from tlora_fx.cli import main
from tlora_fx.config.job_file import load_job_file

CONFIG = """\
model_name_or_path: org/base
dataset_name: org/data
use_peft: true
output_dir: runs/first
eval_on_start: true
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in a fresh folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*words):
        try:
            main(["import", *words])
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_a_job_file_is_written_with_what_was_left_out(command, tmp_path):
    """The list stands on stderr and in the file; the file is right."""
    code, out, err = command("config.yaml", "-o", "jobs.yaml")

    assert (code, out) == (0, "")
    assert (
        "the job trains otherwise:\n  eval_on_start: true (evaluations come after steps)\n" in err
    )
    assert "jobs.yaml is written: TRL, job first" in err
    text = (tmp_path / "jobs.yaml").read_text()
    assert "#   eval_on_start: true (evaluations come after steps)\n" in text
    [job] = load_job_file(tmp_path / "jobs.yaml").jobs
    assert job.name == "first"


def test_without_an_output_the_job_file_is_printed(command, tmp_path):
    """On stdout alone, so that it can be redirected."""
    code, out, _ = command("config.yaml", "--from", "trl")
    (tmp_path / "printed.yaml").write_text(out)

    assert code == 0
    assert load_job_file(tmp_path / "printed.yaml").jobs[0].data.path == "org/data"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("config.yaml", "--strict", "-o", "new.yaml"), "eval_on_start"),
        (("config.yaml", "-o", "config.yaml"), "would be overwritten"),
        (("config.yaml", "-o", "no/jobs.yaml"), "there is no such folder"),
        (("none.yaml",), "the config file cannot be read"),
        (("config.yaml", "--from", "axolotl"), "base_model: the base model is not named"),
    ],
)
def test_nothing_is_written_where_it_is_refused(command, tmp_path, words, told):
    """Exit 1, and the reason."""
    code, _, err = command(*words)

    assert code == 1
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == CONFIG
