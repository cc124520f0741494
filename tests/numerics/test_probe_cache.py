"""A result of the probe is kept, and read again where nothing that decides it has changed."""

from __future__ import annotations

import os

import pytest
import torch

from tests.models import base_of, hand_written, job, plain
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import FusedDiffers
from tlora_fx.model.backbone import load_backbone
from tlora_fx.numerics import base_alone, probe_cache
from tlora_fx.numerics.probe import ProbeResult
from tlora_fx.numerics.probe_cache import probe_loaded_once, probe_once, probes_folder


@pytest.fixture
def tried(monkeypatch, tmp_path) -> list[str]:
    """An empty cache; a word for each time that the probe runs."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))
    runs: list[str] = []
    real = probe_cache.probe_compiled

    def counted(group, backbone, jobs):
        runs.append("tried")
        return real(group, backbone, jobs)

    monkeypatch.setattr(probe_cache, "probe_compiled", counted)
    return runs


def probe(model):
    """What is found of a compiled model."""
    return probe_once(model.group, model.backbone, model.jobs)


def test_an_equal_graph_is_tried_once(tmp_path, tried):
    """The second compilation reads what the first one found."""
    base = base_of(tmp_path, "llama", num_hidden_layers=2)
    first, second = (probe(compile([job("one", base, r=4)])) for _ in range(2))

    assert tried == ["tried"]
    assert first == second
    assert not first.skipped


def test_an_equal_base_in_another_folder_is_not_tried_again(tmp_path, tried):
    """Nothing of what the probe computes depends on where a config lies."""
    for name in ("here", "there"):
        compile([job("one", base_of(tmp_path / name, "llama", num_hidden_layers=2), r=4)])

    assert tried == ["tried"]


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-4}, {"r": 8}])
def test_another_base_or_adapter_is_tried_anew(tmp_path, tried, change):
    """By its config, by its rank."""
    settings = {"num_hidden_layers": 2, "r": 4}
    for number, wanted in enumerate((settings, settings | change)):
        rank = wanted.pop("r")
        compile([job("one", base_of(tmp_path / str(number), "llama", **wanted), r=rank)])

    assert len(tried) == 2


def test_other_code_of_tlora_fx_is_tried_anew(tmp_path, tried, monkeypatch):
    """Whatever changed, it may compute otherwise."""
    model = compile([job("one", base_of(tmp_path, "llama", num_hidden_layers=2), r=4)])
    monkeypatch.setattr(probe_cache, "own_source", lambda *rooms: "another")

    probe(model)

    assert len(tried) == 2


def test_a_module_whose_forward_was_replaced_is_tried_anew(tmp_path, tried, monkeypatch):
    """The graph was traced before: it differs from the base of now."""
    model = compile([job("one", base_of(tmp_path, "llama", num_hidden_layers=2), r=4)])
    kind = type(model.backbone.model.get_submodule("model.layers.0.mlp"))
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))

    with pytest.raises(FusedDiffers):
        probe(model)


def test_a_damaged_result_is_made_anew(tmp_path, tried):
    """And written again."""
    model = compile([job("one", base_of(tmp_path, "llama", num_hidden_layers=2), r=4)])
    found = probe(model)
    (path,) = probes_folder().iterdir()
    path.write_text("{")

    assert probe(model) == found
    assert probe(model) == found
    assert len(tried) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, tried, monkeypatch):
    """A file stands where the folder would."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "file"))
    model = compile([job("one", base_of(tmp_path, "llama", num_hidden_layers=2), r=4)])

    assert not probe(model).skipped


def test_a_module_from_python_is_tried_each_time(tried):
    """Its code and weights may be any."""
    jobs = hand_written(plain())

    for _ in range(2):
        compile(jobs)

    assert tried == ["tried", "tried"]


def test_loaded_weights_are_tried_once(tmp_path, monkeypatch):
    """Until a file of the base changes, or a longer sample comes."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))
    base = base_of(tmp_path, "llama", num_hidden_layers=2)
    backbone = load_backbone(base)
    folder = tmp_path / "base"
    backbone.model.to_empty(device="cpu").save_pretrained(folder)
    (weights,) = folder.glob("*.safetensors")
    model = compile([job("one", BaseSpec(model=str(folder)), r=4)])
    lengths = []
    monkeypatch.setattr(
        probe_cache,
        "probe_loaded",
        lambda *parts, ids: lengths.append(parts[-1]) or ProbeResult(lengths=(parts[-1],)),
    )

    def probe(longest):
        parts = model.group, model.backbone, model.jobs, {}.__getitem__, longest
        return probe_loaded_once(*parts, ids=[(1, 2)], device=torch.device("cpu"))

    assert [probe(8).lengths, probe(8).lengths, probe(9).lengths] == [(8,), (8,), (9,)]
    assert lengths == [8, 9]
    os.utime(weights, (1, 1))
    probe(8)
    assert lengths == [8, 9, 8]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_code_of_a_gpu_is_loaded_while_an_unknown_graph_is_tried(
    tmp_path, tried, monkeypatch, on_gpu
):
    """Only where this process uses a GPU, and only where the base is going to run on it alone."""
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    attend = base_alone._attend
    monkeypatch.setattr(base_alone, "_attend", lambda *how: loaded.append((how, attend(*how))))
    model = compile([job("one", base_of(tmp_path, "llama", num_hidden_layers=2), r=4)])
    probe(model)

    assert tried == ["tried"]
    assert loaded == [(("cpu", torch.float64, 8), None)] * on_gpu
