"""What a job may adapt, and what is said of targets that cannot be adapted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig

from tests.models import (
    Plain,
    assert_same,
    error_of,
    hand_written,
    job,
    peft_model,
    ready,
    run_alone,
    run_fused,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import FusionError, JobError, UnknownTarget
from tlora_fx.model.backbone import load_backbone
from tlora_fx.model.batch import pad
from tlora_fx.runtime.keyed_dropout import KeyedDropout
from tlora_fx.testing.equivalence import SIZES
from tlora_fx.tracing.adapters import resolve_sites


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of two experts, whose matrices are stacked parameters."""
    folder = tmp_path_factory.mktemp("mixtral")
    MixtralConfig(**SIZES, num_local_experts=2).save_pretrained(folder)
    return BaseSpec(config=folder, dtype="float32")


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", "down_proj gate_up_proj k_proj o_proj q_proj router_logits v_proj"),
        (["w1", "w3"], "gate_up_proj"),
        (["q_proj", "gate"], "q_proj router_logits"),
        (r".*\.(w1|w2|w3)", "down_proj gate_up_proj"),
    ],
)
def test_targets_among_experts_are_their_parameters(experts, targets, names):
    """PEFT adapts these, also where targets name the linears of before."""
    sites = resolve_sites(job("one", experts, target_modules=targets), load_backbone(experts))

    assert sorted({path.rpartition(".")[2] for path in sites}) == names.split()
    assert len(sites) == SIZES["num_hidden_layers"] * len(names.split())


def test_half_of_a_fused_matrix_is_refused_with_the_linears_to_name_instead(experts):
    """PEFT has no parameter for it."""
    one = job("one", experts, target_modules=["w1"])

    text = error_of(lambda: compile(one), UnknownTarget)

    assert "without also targeting w3" in text
    assert "[k_proj, o_proj, q_proj, v_proj]" in text


def test_the_linears_of_a_base_with_experts_are_adapted_as_peft_does(experts):
    """A pattern too: PEFT reads it as names on such a base, so it fits every layer."""
    pattern = r".*layers\.0\.self_attn\.q_proj"

    sites = resolve_sites(job("one", experts, target_modules=pattern), load_backbone(experts))

    assert [path.split(".")[2] for path in sites] == ["0", "1", "2"]


class Twice(Plain):
    """A model that runs each layer twice."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(layer(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_a_module_that_runs_twice_learns_from_both_runs(rate):
    """As with PEFT: one A and B, whose gradients add; with dropout, a mask for each run."""
    (one,) = hand_written(Twice(layers=1))
    one = one.model_copy(update={"lora": {**one.lora, "lora_dropout": rate}})
    model = ready([one])
    part = tokens([5, 3])
    fused, wrapped = run_fused(model, [part])["one"], peft_model(model, "one")
    if rate:
        masks = KeyedDropout(wrapped, part.seed)
        with masks.row(part.step, pad([part]).token_index.long()):
            alone = run_alone(wrapped, part)
    else:
        alone = run_alone(wrapped, part)

    assert bool(model.banks) == (not rate)
    assert_same(fused, alone, 1e-12, "one")


class ByPlace(Plain):
    """A model whose second projection is also one of relative positions."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.places = nn.Parameter(torch.randn(5, 32))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        out, hidden = self.layers[0].out, self.embed(ids)
        return self.head(hidden + out(hidden) @ out(self.places).t() @ self.places)


def test_a_module_that_runs_on_no_tokens_is_not_adapted():
    """Its result is the same for all tokens, but another for each job; what else to adapt helps."""
    text = error_of(lambda: compile(hand_written(ByPlace())), FusionError)

    assert "no token of the row" in text
    assert "leave it out of target_modules" in text
    assert compile(hand_written(ByPlace(), targets=("head",))).banks.keys() == {"head"}


class Aside(Plain):
    """A model with a linear whose result nobody reads."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.aside = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        self.aside(self.embed(ids))
        return super().forward(ids)


def test_an_adapter_off_the_way_to_the_loss_is_reported():
    """It would stay as it starts; each job is told, jobs that share a graph too."""
    (job,) = hand_written(Aside(), targets=("aside", "out"))
    same = job.model_copy(update={"name": "same"})
    out = {**job.lora, "target_modules": ["out"]}
    model = compile([job, same, job.model_copy(update={"name": "other", "lora": out})])

    notes = [text for _, text in model.group.notes if "does not depend on" in text]
    assert notes == [
        f"job '{name}': the loss does not depend on adapters of aside: they are not saved"
        for name in (job.name, "same")
    ]


class Detached(Plain):
    """A model whose head alone gets a gradient."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.detach())


@pytest.mark.parametrize(("module", "target"), [(Aside(), "aside"), (Detached(layers=1), "out")])
def test_a_job_without_an_adapter_on_the_way_to_the_loss_is_refused(module, target):
    """Nothing would be trained."""
    text = error_of(lambda: compile(hand_written(module, targets=(target,))), UnknownTarget)

    assert "adapts nothing that its loss depends on" in text


def test_what_peft_refuses_on_a_base_is_our_error():
    """A LayerNorm cannot carry an adapter; PEFT says so, and we say for which job."""
    text = error_of(lambda: compile(hand_written(Plain(layers=1), targets=("norm",))), JobError)

    assert "PEFT refuses the fields of LORA on this base" in text
    assert "LayerNorm" in text
