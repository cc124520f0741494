"""`tlora-fx bisect`."""

from __future__ import annotations

import pytest

from tests.cli.test_compile import run
from tests.models import save_config

JOBS = """
base: {config: llama, dtype: float32}
jobs:
  - name: one
    lora: {r: 4, target_modules: [q_proj, down_proj], lora_dropout: 0.1}
    data: {path: x.jsonl}
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job file beside its base's config."""
    folder = tmp_path_factory.mktemp("jobs")
    save_config(folder, "llama", num_hidden_layers=2)
    (folder / "jobs.yaml").write_text(JOBS)
    (folder / "x.jsonl").write_text('{"text": "a"}\n')
    return folder / "jobs.yaml"


def test_the_pass_and_the_rewrite_that_break_a_check_are_named(jobs, tmp_path, capsys):
    """Also where the pass may only leave branches that carry their own numbers."""
    check = '! grep -q "site = self.mlp.down_proj" {}/program.py'

    assert run("bisect", "--check", check, jobs, "--keep", tmp_path) == 0

    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "pass 6 'lower-adapters' breaks the check"
    assert "rewrite 2 of 2: multi_lora_linear at layers_0_1.mlp.down_proj" in out
    assert "tlora_fx.multi_lora_linear.default" in out
    assert "run 1   after 4 check-token-parallel" in err
    assert (tmp_path / "06-lower-adapters" / "graph.tfx").is_file()


def test_our_own_passes_keep_the_numbers(jobs, capsys):
    """The check that is built in finds nothing to blame."""
    assert run("bisect", "--check", "numerics", jobs) == 1

    assert "the check never fails" in capsys.readouterr().out


def test_a_wrong_command_is_no_culprit(jobs, capsys):
    """It stops the search at once."""
    assert run("bisect", "--check", "no-such-command {}", jobs) == 1

    err = capsys.readouterr().err
    assert "error[T0230]" in err
    assert "no such command" in err


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_compiled(jobs, tmp_path, capsys):
    """A name is taken by a file, or the disk is read-only."""
    (tmp_path / "file").touch()
    words = ["bisect", "--check", "true", jobs, "--keep", tmp_path / "file" / "kept"]

    assert run(*words) == 1
    assert "name another by --keep" in capsys.readouterr().err
