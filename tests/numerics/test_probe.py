"""The probe: a fused graph against the unmodified base, each sequence alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.models import (
    FAMILIES,
    SHALLOW,
    Plain,
    base_of,
    error_of,
    hand_written,
    job,
    mixed_jobs,
    plain,
)
from tests.sampled import sampled
from tlora_fx.compiler import compile, prepare, resolve_pipeline
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import FusedDiffers, TloraError
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.numerics import base_alone, probe
from tlora_fx.numerics.probe import ProbeResult, probe_compiled, probe_loaded
from tlora_fx.pipeline import GroupPass, Numerics, Pipeline
from tlora_fx.runtime.adapters.files import base_tensors

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def probed(model) -> ProbeResult:
    """What the probe finds of a compiled model."""
    return probe_compiled(model.group, model.backbone, model.jobs)


@pytest.mark.parametrize(
    "family", sampled(["llama", "gemma2", "phi3-longrope", "gpt2", "falcon"], 2)
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_base_that_fuses_right_equals_itself(tmp_path, family, dtype):
    """Logits and gradients of every trained structure, in either precision."""
    base = base_of(tmp_path, family, dtype, **SHALLOW.get(family, {}))
    model = compile(mixed_jobs(base, FAMILIES[family].targets))

    found = probed(model)

    assert not found.skipped
    assert found.lengths
    assert max(found.logits, found.gradient) < (1e-6 if dtype == "float64" else 1e-4)


def test_of_two_jobs_alike_one_is_compared_beside_the_other(tmp_path, monkeypatch):
    """The neighbour has an adapter too, which takes no memory of its own and learns nothing."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2)
    model = compile([job(name, base, r=2, target_modules=["q_proj"]) for name in ("one", "two")])
    ran = []
    fused = probe._Probe._fused
    monkeypatch.setattr(
        probe._Probe, "_fused", lambda self: ran.append((self, fused(self))) or ran[-1][1]
    )

    assert not probed(model).skipped

    ((seen, outcomes),) = ran
    assert set(outcomes["one"].gradients)
    assert not outcomes["two"].gradients
    drawn = [seen.tensors.own("two", f"q.{n}.lora_A", (2, 32), torch.float32) for n in range(2)]
    assert not torch.equal(*drawn)
    assert all(part.count_nonzero() == 64 for part in drawn)
    assert len({part.untyped_storage().data_ptr() for part in drawn}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["auto", "batch"])
def test_a_causal_module_passes(dtype, attention):
    """Masked attention and dropout of a hand-written module."""
    base = BaseSpec(module=Plain(layers=2, rate=0.1).to(DTYPES[dtype]), dtype=dtype,
                    attention=attention)  # fmt: skip
    model = compile([job("one", base, r=2, target_modules=["out"], lora_dropout=0.2)])

    assert not probed(model).skipped


class LengthScaled(Plain):
    """Divides by the length of the line."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits that depend on S."""
        hidden = self.embed(ids) / ids.shape[1] ** 0.5
        return self.head(hidden + self.layers[0].out(hidden))


class Reversed(torch.autograd.Function):
    """The identity, with the gradient turned round."""

    @staticmethod
    def forward(ctx, x):
        """What is given."""
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Its opposite."""
        return -gradient


class GradientReversal(Plain):
    """Hides a sign in the backward."""

    def forward(self, ids: Tensor) -> Tensor:
        """Right logits, wrong gradients."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = Reversed.apply(layer(hidden))
        return self.head(hidden)


class LongBranch(Plain):
    """Does otherwise beyond 40 tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        """Doubled beyond 40."""
        hidden = super().forward(ids)
        return hidden * 2 if ids.shape[1] > 40 else hidden


class Counting(Plain):
    """Scales by how often it was called."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        """More each time."""
        self.calls += 1
        return super().forward(ids) * self.calls


class LateMixer(Plain):
    """Looks ahead behind a projection that starts at zero."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.mix = nn.Linear(32, 32, bias=False)
        nn.init.zeros_(self.mix.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean of all tokens, times zero at the start."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden + self.mix(hidden.mean(1, keepdim=True)))


NASTY = {
    "looks ahead": lambda: Plain(layers=2, ahead=1),
    "looks far ahead": lambda: Plain(layers=2, ahead=99),
    "length": lambda: LengthScaled(layers=2),
    "gradient reversal": lambda: GradientReversal(layers=2),
    "long branch": lambda: LongBranch(layers=2),
    "counter": lambda: Counting(layers=2),
    "mixer behind zeros": LateMixer,
}


@pytest.mark.parametrize("name", sampled(NASTY))
@pytest.mark.parametrize("attention", ["auto", "batch"])
def test_a_base_that_does_otherwise_alone_is_refused(name, attention):
    """Whatever rule speaks first, no such base compiles."""
    jobs = hand_written(NASTY[name](), attention)

    error_of(lambda: compile(jobs), TloraError)


def test_the_error_names_the_first_module_that_differs(monkeypatch):
    """The layer's own module, not what reads it."""
    model = compile(hand_written(plain(layers=3)))
    wrong = copy.deepcopy(plain(layers=3))
    wrong.layers[1].norm.eps = 0.3
    monkeypatch.setattr(base_alone, "build_skeleton", None)
    model.backbone.spec = model.backbone.spec.model_copy(update={"module": wrong})

    text = error_of(lambda: probed(model), FusedDiffers)

    assert "layers.1.norm" in text
    assert "%" in text


def test_loaded_weights_are_tried_at_the_longest_length(tmp_path):
    """The base's own tensors, and the length of the data."""
    base = base_of(tmp_path, "llama", "float64", num_hidden_layers=2)
    model = compile([job("one", base, r=2, target_modules=["q_proj"])])
    tensors = base_tensors(model.backbone)

    found = probe_loaded(model.group, model.backbone, model.jobs, tensors.__getitem__, 29)

    assert 29 in found.lengths
    assert found.gradient < 1e-6


class SeesAll(nn.Module):
    """A causal model in which one id of many attends to the whole line."""

    ID = 3333

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.head = nn.Embedding(5000, 8), nn.Linear(8, 8), nn.Linear(8, 5000)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden, places = self.out(self.embed(ids)), torch.arange(ids.shape[1], device=ids.device)
        seen = (places[:, None] >= places) | (ids == self.ID)[:, :, None]
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        return self.head(hidden + 9 * scores.softmax(-1) @ hidden)


def test_ids_of_the_samples_are_tried(tmp_path):
    """None that a probe draws looks behind its line; one that the data holds does."""
    (one,) = hand_written(SeesAll(), "batch")
    two = job("two", one.base, r=2, target_modules=["out"])
    model = compile([one, two])
    tensors = base_tensors(model.backbone)
    parts = model.group, model.backbone, model.jobs, tensors.__getitem__, 20

    assert not probe_loaded(*parts).skipped
    assert not probe_loaded(*parts, ids=[[7, 8, 9], [1]]).skipped
    text = error_of(lambda: probe_loaded(*parts, ids=[[7, 8, SeesAll.ID], []]), FusedDiffers)
    assert "job 'one'" in text


class Steep(nn.Module):
    """A model of single tokens that makes much of a rounding, as a router's choice does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.sin(200 * self.out(self.embed(ids))))


def in_bfloat16(module: nn.Module, **options):
    """What the probe finds of a job on a module in bfloat16, with its weights."""
    base = BaseSpec(module=module.bfloat16(), dtype="bfloat16", attention="batch")
    model = compile([job("one", base, r=2, target_modules=["out"])])
    value = base_tensors(model.backbone).__getitem__
    return probe_loaded(model.group, model.backbone, model.jobs, value, 20, **options)


def test_where_half_precision_differs_float32_decides():
    """Both sides round elsewhere; that the graph is right is seen where they round less."""
    torch.manual_seed(7)
    found = in_bfloat16(Steep())

    assert "differ by" in found.rounding
    assert found.rounding.endswith("in bfloat16")
    assert found.gradient < 2e-4


def test_what_is_wrong_in_half_precision_alone_is_refused(monkeypatch):
    """As a kernel of that dtype may be: float32 agrees, and the base itself rounds by far less."""
    fused = probe._Probe._fused

    def wrong(own, *args):
        outcomes = fused(own, *args)
        if own.wide is None:
            for outcome in outcomes.values():
                outcome.logits = [1.5 * logits for logits in outcome.logits]
        return outcomes

    monkeypatch.setattr(probe._Probe, "_fused", wrong)
    text = error_of(lambda: in_bfloat16(plain()), FusedDiffers)

    assert "logits of" in text


def test_what_differs_in_float32_too_is_refused():
    """Half precision excuses nothing."""
    torch.manual_seed(7)
    text = error_of(lambda: in_bfloat16(SeesAll(), ids=[[SeesAll.ID]]), FusedDiffers)

    assert "logits of" in text


def test_the_longest_sample_is_cut_rather_than_left_out(tmp_path):
    """Data longer than a probe's tokens is tried as far as they go."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    base = base_of(tmp_path, "llama", "float64", **sizes)
    model = compile([job("one", base, r=2, target_modules=["q_proj"])])
    tensors = base_tensors(model.backbone)

    found = probe_loaded(model.group, model.backbone, model.jobs, tensors.__getitem__, 4000, 300)

    assert max(found.lengths) == 300 - sum(probe.LENGTHS)


@pytest.mark.parametrize("family", sampled(["falcon", "llama", "gpt2"]))
def test_a_large_base_runs_one_layer_of_each_end(tmp_path, monkeypatch, family):
    """The first and the last of equal layers; those between hand on what they get."""
    monkeypatch.setattr(probe, "SMALL_BASE", 1)
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    base = base_of(tmp_path, family, "float32", **{layers: 6})
    model = compile([job("one", base, r=2, target_modules=list(FAMILIES[family].targets))])

    found = probed(model)

    assert not found.skipped
    assert found.gradient < 1e-4


def test_what_is_too_large_is_said(tmp_path, monkeypatch):
    """No weights are drawn beyond the stated memory."""
    monkeypatch.setattr(probe, "WEIGHTS", 10)
    base = base_of(tmp_path, "llama", num_hidden_layers=2)
    model = compile([job("one", base, r=2, target_modules=["q_proj"])])

    assert "too many to draw" in str(probed(model))
    assert prepare(model.jobs).backbone is not None


@pytest.mark.slow
def test_a_deep_base_in_half_precision_is_not_refused_for_its_rounding(tmp_path):
    """Thirty-two layers of bfloat16 part by more than two layers do, fused or alone."""
    base = base_of(tmp_path, "gemma2", "bfloat16", num_hidden_layers=32)
    model = compile([job("one", base, r=8, target_modules=["q_proj", "down_proj"])])
    model.materialize(base_tensors(model.backbone), "cpu")

    found = probe_loaded(
        model.group, model.backbone, model.jobs, model.base_tensor_or_value, longest=40
    )

    assert not found.skipped
    assert found.lengths


def test_the_ends_of_a_large_base_are_tried_on_its_own_weights(tmp_path, monkeypatch):
    """Only the tensors of two layers of six are asked for."""
    monkeypatch.setattr(probe, "SMALL_BASE", 1)
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=6)
    model = compile([job("one", base, r=2, target_modules=["q_proj"])])
    weights, asked = base_tensors(model.backbone), set()

    def value(name):
        asked.add(name.split(".layers.")[-1].partition(".")[0])
        return weights[name]

    found = probe_loaded(model.group, model.backbone, model.jobs, value, longest=20)

    assert not found.skipped
    assert asked & set("012345") == {"0", "5"}


@pytest.fixture
def few_rows(monkeypatch):
    """Every base has a head that is large, of which 32 rows are drawn."""
    monkeypatch.setattr(probe, "SMALL_BASE", 0)
    monkeypatch.setattr(probe, "HEAD_ROWS", 32)
    monkeypatch.setattr(probe, "LARGEST_ID", 32)
    heads = []
    plain = probe._Wide

    class Wide(plain):
        def __init__(self, group, backbone, wide, head=frozenset()):
            heads.append(len(head))
            super().__init__(group, backbone, wide, head)

    monkeypatch.setattr(probe, "_Wide", Wide)
    return heads


@pytest.mark.parametrize("family", sampled(["llama", "gpt2"]))
def test_a_large_head_is_tried_by_some_of_its_rows(tmp_path, few_rows, family):
    """Also where embeddings are tied to it; logits of 32 tokens agree as all do."""
    base = base_of(tmp_path, family, "float64", **SHALLOW.get(family, {}))
    model = compile([job("one", base, target_modules=FAMILIES[family].targets[:1])])
    few_rows.clear()
    found = probed(model)

    assert few_rows == [1]
    assert not found.skipped
    assert max(found.logits, found.gradient) < 1e-6


def test_a_head_that_a_job_trains_is_tried_whole(tmp_path, few_rows):
    """The job's matrix has as many rows as the vocabulary."""
    base = base_of(tmp_path, "llama", "float64", num_hidden_layers=2)
    model = compile([job("one", base, target_modules=["q_proj", "lm_head"])])
    few_rows.clear()
    found = probed(model)

    assert few_rows == [1, 0]
    assert not found.skipped


@dataclass(frozen=True)
class Relu(GroupPass):
    """A pass of a user that computes something else, and says so."""

    name: ClassVar[str] = "relu"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "no"

    def run(self, group: GroupGraph) -> None:
        """Put a ReLU in the place of each SiLU."""
        for node in (node for graph in group.graphs() for node in graph.nodes):
            if node.target is torch.ops.aten.silu.default:
                node.target = torch.ops.aten.relu.default


def test_a_difference_that_a_pass_may_have_made_is_not_the_bases_alone(tmp_path):
    """The help names passes that were added, and how to tell which one it was."""
    spec = base_of(tmp_path, "llama", "float64", num_hidden_layers=2)
    passes = [*resolve_pipeline().passes]
    passes.insert(5, Relu())

    text = error_of(lambda: compile([job("one", spec)], Pipeline(tuple(passes))), FusedDiffers)

    assert "help      it may be a pass that was added (relu): verify='numerics'" in text


def test_a_difference_is_told_of_the_whole_head(tmp_path, few_rows):
    """What few rows show is shown again with all of them."""
    model = compile([job("one", base_of(tmp_path, "llama", "float64", num_hidden_layers=2))])
    broken = copy.deepcopy(model.group)
    [scaled, *_] = [
        node
        for graph in broken.graphs()
        for node in graph.nodes
        if node.target is torch.ops.aten.silu.default
    ]
    scaled.target = torch.ops.aten.relu.default
    few_rows.clear()

    with pytest.raises(FusedDiffers):
        probe_compiled(broken, model.backbone, model.jobs)
    assert few_rows == [1, 0]
