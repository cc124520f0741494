"""`tlora-fx explain`."""

from __future__ import annotations

import pytest

from tests.cli.test_compile import jobs  # noqa: F401  (a fixture)
from tlora_fx.cli import main


def run(*arguments: object) -> int | str | None:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    return end.value.code


def test_explain_says_what_became_of_a_module(jobs, capsys):  # noqa: F811
    """Plain text on stdout."""
    assert run("explain", jobs, "--node", "layers.1.self_attn.q_proj") == 0

    out = capsys.readouterr().out
    assert out.startswith("model.layers.1.self_attn.q_proj   Linear(")
    assert "one: lowered: rank 4, scaling 2, dropout 0" in out


def test_a_wrong_module_exits_with_1(jobs, capsys):  # noqa: F811
    """The nearest name on stderr."""
    assert run("explain", jobs, "--node", "layers.1.self_attn.q_porj") == 1

    assert "nearest  model.layers.1.self_attn.q_proj" in capsys.readouterr().err
