"""What processes of one test run leave each other of their tracing (tests/traced_once.py)."""

from __future__ import annotations

import pytest
import torch

from tests import traced_once
from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.ir.verifier import fingerprint

KINDS = {
    "plain": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "dora": {"r": 3, "target_modules": ["q_proj"], "use_dora": True},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where graphs are left; this process knows none yet."""
    monkeypatch.setenv(traced_once.TRACES, str(tmp_path / "traces"))
    (tmp_path / "traces").mkdir()
    monkeypatch.setattr(traced_once, "_known", {})
    yield tmp_path / "traces"
    traced_once.install()


@pytest.mark.parametrize("attention", ["packed", "batch"])
def test_a_graph_of_another_process_compiles_to_the_same_model(
    folder, tmp_path, monkeypatch, attention
):
    """Read instead of traced: nothing is written a second time, and the code is the same."""
    base = base_of(tmp_path, "llama", attention=attention)
    jobs = [job(name, base, **lora) for name, lora in KINDS.items()]
    traced = fingerprint(compile(jobs).group)
    left = {path.name for path in folder.iterdir() if not path.suffix}
    monkeypatch.setattr(traced_once, "_known", {})
    monkeypatch.setattr(traced_once, "_write", None)

    traced_once.install()
    read = fingerprint(compile(jobs).group)

    assert len(left) == 1 + len(jobs)  # the base and the jobs
    assert read == traced


def test_jobs_that_differ_in_rates_and_starts_share_a_graph(folder, tmp_path, monkeypatch):
    """It compiles to what its own would; PEFT is asked about each job's fields all the same."""
    base = base_of(tmp_path, "llama")
    jobs = [
        job("one", base, **KINDS["plain"]),
        job("one", base, r=4, target_modules="all-linear", init_lora_weights="gaussian"),
    ]
    first, traced = (fingerprint(compile([own]).group) for own in reversed(jobs))
    left = {path.name for path in folder.iterdir() if not path.suffix}
    asked = []
    monkeypatch.setattr(traced_once, "check_wrapped", lambda *given: asked.append(given[-1].name))
    monkeypatch.setattr(traced_once, "_known", {})
    monkeypatch.setattr(traced_once, "_wrapped", set())

    found = fingerprint(compile(jobs[:1]).group)

    assert len(left) == 2  # the base and one job
    assert asked == ["one"]
    assert found == traced != first


def test_code_of_a_test_is_not_shared():
    """Neither a class of its own nor a forward that it put into a library's class."""

    class Own(torch.nn.Linear):
        def forward(self, x):
            return x

    assert traced_once._words((torch.nn.Linear, torch.nn.Linear.forward)) is not None
    assert traced_once._words((Own, torch.nn.Linear.forward)) is None
    assert traced_once._words((torch.nn.Linear, Own.forward)) is None
