"""What processes of one test run, and one run after another, leave each other of their tracing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from tests import kept_between_runs, traced_once
from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.errors import PassFailed
from tlora_fx.inspect.program import Recorder
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.model.backbone import load_backbone
from tlora_fx.passes.fuse_backbone import FuseBackbone
from tlora_fx.pipeline import Runner
from tlora_fx.tracing import export, trace_cache

KINDS = {
    "plain": {"r": 4, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1},
    "dora": {"r": 3, "target_modules": ["q_proj"], "use_dora": True},
}


@pytest.fixture
def forget(tmp_path, monkeypatch):
    """An empty folder; a call of it makes this process know no graph, as a new one does."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))

    def forget():
        monkeypatch.setattr(traced_once, "_known", {})
        monkeypatch.setattr(traced_once, "_wrapped", set())
        monkeypatch.setattr(traced_once, "_compared", {})

    forget()
    return forget


@pytest.fixture
def fused(monkeypatch):
    """Equal jobs are fused once, as where their passes are not tested; graphs may be known."""
    monkeypatch.setattr(traced_once, "_fused", OrderedDict())
    traced_once.install(fused=True)
    yield
    traced_once.install()


def refuse(*given, **named):
    raise AssertionError("it is traced again")


def left() -> set[str]:
    """Names of the graphs in the folder."""
    files = trace_cache.traces_folder().iterdir()
    return {path.name for path in files if '"text"' in path.read_text()}


@pytest.mark.parametrize("attention", ["packed", "batch"])
def test_a_graph_of_another_process_compiles_to_the_same_model(
    forget, tmp_path, monkeypatch, attention
):
    """Read instead of traced, and the code is the same."""
    base = base_of(tmp_path, "llama", attention=attention, num_hidden_layers=1)
    jobs = [job(name, base, **lora) for name, lora in KINDS.items()]
    traced = fingerprint(compile(jobs).group)
    before = left()
    forget()
    monkeypatch.setattr(torch.export, "export", refuse)

    read = fingerprint(compile(jobs).group)

    assert len(before) == 1 + len(jobs)  # the base and the jobs
    assert read == traced


def test_jobs_that_differ_in_rates_and_starts_share_a_graph(forget, tmp_path, monkeypatch):
    """It compiles to what its own would; PEFT is asked about each job's fields all the same."""
    base = base_of(tmp_path, "llama", num_hidden_layers=1)
    jobs = [
        job("one", base, **KINDS["plain"]),
        job("one", base, r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian"),
    ]
    first, traced = (fingerprint(compile([own]).group) for own in reversed(jobs))
    asked = []
    monkeypatch.setattr(traced_once, "wrap_pruned", lambda job, *rest: asked.append(job.name))
    monkeypatch.setattr(traced_once, "_wrapped", set())

    found = fingerprint(compile(jobs[:1]).group)

    assert len(left()) == 2  # the base and one job
    assert asked == ["one"]
    assert found == traced != first


def test_a_loss_is_compared_on_the_first_samples_that_any_process_has(forget, tmp_path):
    """Samples of a job, and made ones, each once."""
    backbone = load_backbone(base_of(tmp_path, "llama", num_hidden_layers=1))
    asked = []

    def compare(backbone, rows, jobs):
        asked.append(len(rows))
        return f"on {len(rows)}"

    notes = []
    for rows in (["one"], [], ["another", "two"]):
        notes.append(traced_once._loss(compare)(backbone, rows))
        forget()

    assert asked == [1, 0]
    assert notes == ["on 1", "on 0", "on 1"]


def test_equal_jobs_are_fused_once_and_others_again(fused, tmp_path, monkeypatch):
    """A model that changes its group leaves the next one alone."""
    base = base_of(tmp_path, "llama", num_hidden_layers=1)
    jobs = [job(name, base, **lora) for name, lora in KINDS.items()]
    model = compile(jobs)
    first = fingerprint(model.group)
    model.group.root.erase_node(model.group.root.output_node())
    monkeypatch.setattr(Runner, "run_group", refuse)

    again = fingerprint(compile(jobs).group)

    assert again == first
    with pytest.raises(AssertionError, match="again"):
        compile([job("other", base, **KINDS["plain"])])


def test_neither_data_nor_steps_nor_the_folder_of_a_base_are_fused(fused, tmp_path, monkeypatch):
    """What is in a graph is: another scale of an adapter, or another kind."""
    near, far = (base_of(tmp_path / name, "llama", num_hidden_layers=1) for name in ("near", "far"))
    first = job("one", near, **KINDS["plain"])
    known = fingerprint(compile([first]).group)
    data = first.data.model_copy(update={"path": "another.jsonl"})
    changes = {"base": far, "data": data, "max_steps": 7, "learning_rate": 0.5}
    monkeypatch.setattr(Runner, "run_group", refuse)

    again = compile([first.model_copy(update=changes)])

    assert fingerprint(again.group) == known
    for lora in (KINDS["plain"] | {"lora_alpha": 3}, KINDS["dora"]):
        with pytest.raises(AssertionError, match="again"):
            compile([first.model_copy(update={"lora": lora})])


def test_a_pass_that_a_test_has_replaced_runs(fused, tmp_path, monkeypatch):
    """So does every pass that somebody watches."""
    jobs = [job("one", base_of(tmp_path, "llama", num_hidden_layers=1), **KINDS["plain"])]
    compile(jobs)
    recorder = Recorder()

    compile(jobs, instruments=[recorder])
    monkeypatch.setattr(FuseBackbone, "run", refuse)

    assert recorder.stages
    with pytest.raises(PassFailed):
        compile(jobs)


def test_bases_that_differ_in_how_they_are_drawn_share_a_graph(forget, tmp_path, monkeypatch):
    """Also in the tokens that end a text; in one process."""
    base = base_of(tmp_path, "llama", num_hidden_layers=1)
    traced = fingerprint(compile([job("one", base, **KINDS["plain"])]).group)
    other = base_of(
        tmp_path / "other", "llama", num_hidden_layers=1, initializer_range=0.2, eos_token_id=[3, 4]
    )
    for name in ("trace_base", "trace_job"):
        monkeypatch.setattr(export, name, refuse)

    assert fingerprint(compile([job("one", other, **KINDS["plain"])]).group) == traced


def test_traces_and_probes_lie_in_a_folder_that_stays(tmp_path, monkeypatch):
    """All else in the cache is of one run."""
    monkeypatch.setenv("TLORA_FX_TEST_TRACES", str(tmp_path / "kept"))

    folder = kept_between_runs.link(tmp_path / "run" / "cache")
    (tmp_path / "run" / "cache" / "traces" / "graph").touch()

    assert folder == tmp_path / "kept"
    assert [path.name for path in (folder / "traces").iterdir()] == ["graph"]
    assert sorted(path.name for path in folder.iterdir()) == ["probes", "traces"]
