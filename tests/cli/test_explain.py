"""`tlora-fx explain`."""

from __future__ import annotations

import pytest

from tests.models import save_config
from tlora_fx.cli import main

JOBS = """
base: {config: llama, dtype: float32}
jobs:
  - {name: one, lora: {r: 4, target_modules: [q_proj]}, data: {path: x.jsonl}}
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job file beside its base's config."""
    folder = tmp_path_factory.mktemp("jobs")
    save_config(folder, "llama")
    (folder / "jobs.yaml").write_text(JOBS)
    (folder / "x.jsonl").write_text('{"text": "a"}\n')
    return folder / "jobs.yaml"


def run(*arguments: object) -> int | str | None:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    return end.value.code


def test_explain_says_what_became_of_a_module(jobs, capsys):
    """Plain text on stdout."""
    assert run("explain", jobs, "--node", "layers.2.self_attn.q_proj") == 0

    out = capsys.readouterr().out
    assert out.startswith("model.layers.2.self_attn.q_proj   Linear(")
    assert "one: lowered: rank 4, scaling 2, dropout 0" in out


def test_a_wrong_module_exits_with_1(jobs, capsys):
    """The nearest name on stderr."""
    assert run("explain", jobs, "--node", "layers.2.self_attn.q_porj") == 1

    assert "nearest  model.layers.2.self_attn.q_proj" in capsys.readouterr().err
