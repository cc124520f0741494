"""The text of `ssm.py`: people read it, the interpreter runs it."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch import Tensor, fx, nn

from tests.models import assert_equals_peft, base_of, hand_written, job, ready, tokens
from tlora_fx.model.source import LONGEST, attribute, class_source, group_source


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A plain job, one with DoRA, and one with an embedding and a head of its own, on Llama."""
    base = base_of(tmp_path_factory.mktemp("source"), "llama", dtype="float64", num_hidden_layers=2)
    return ready(
        [
            job("plain", base, r=8, target_modules="all-linear"),
            job("dora", base, r=3, target_modules=["q_proj"], use_dora=True),
            job("extras", base, r=2, target_modules=["v_proj", "embed_tokens"],
                modules_to_save=["lm_head"]),
        ]
    )  # fmt: skip


def test_the_text_trains_as_each_job_alone(model):
    """What is printed is what runs: losses and gradients equal those of PEFT."""
    parts = [tokens([5, 3], 1), tokens([4], 2), tokens([6], 3)]

    assert_equals_peft(model, parts, 2e-6)


def test_no_line_is_longer_than_a_page(model):
    """Long calls are spread over lines, with their shapes beside the first."""
    assert max(map(len, model.source.splitlines())) <= LONGEST
    assert re.search(r"multi_lora_linear\.default\(  # \[1, T, 32\] f64\n", model.source)


def test_layers_name_their_inputs_by_what_they_hold(model):
    """The running value, and the tables of the rotary embedding."""
    assert "def forward(self, hidden, cos, sin, cu_seqlens" in model.source


def test_a_job_alone_is_named_beside_its_branch(model):
    """Whose code it is stands above it."""
    assert "# model.embed_tokens, job extras alone" in model.source


def test_doras_columns_are_scaled_behind_their_site(model):
    """One call, by the site's short name."""
    assert "q_proj_dora_scale = tlora.dora_scale.default(" in model.source
    assert "job dora alone" not in model.source


def test_adapters_are_read_from_their_site(model):
    """The bank of a site by a short name."""
    assert "site = self.self_attn.o_proj\n" in model.source
    assert "site.lora.a, site.lora.b, site.lora.ranks" in model.source


def test_sites_that_share_an_operator_are_named_one_by_one(model):
    """The operator reads all their banks; each site's result has its module's name."""
    assert "site = self.self_attn\n" in model.source
    assert "[site.q_proj.lora.a, site.k_proj.lora.a, site.v_proj.lora.a]" in model.source
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        assert f"# self_attn.{name}\n" in model.source
        assert f"{name} = self_attn_linears[{place}]  # [1, T, " in model.source


def test_a_title_cannot_leave_the_docstring(model):
    """A folder may be called anything; the text stays one docstring, and runs nothing."""
    text = group_source(model.group, 'x"""\nraise SystemExit\n"""\\')
    first = ast.parse(text).body[0]

    assert isinstance(first, ast.Expr)
    assert "raise SystemExit" in ast.literal_eval(first.value)
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(text)))


def test_text_arguments_with_blanks_stay_whole():
    """A line is broken between arguments only."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"a_rather_long_name_for_an_input_{n}") for n in range(3)]
    equation = "i j k, j k l, " * 8 + "k l -> i l"
    graph.output(graph.call_function(torch.ops.aten.einsum.default, (equation, inputs)))
    text = class_source("Long", "a long call", graph, {})

    assert repr(equation) in text
    ast.parse(text)


class Named(nn.Module):
    """Linears under names that Python does not take behind a dot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)
        self.parts = nn.ModuleDict({"a-b": nn.Linear(8, 8), "c d": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 61)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        for part in self.parts.values():
            hidden = torch.tanh(part(hidden))
        return self.head(hidden)


def test_names_that_are_no_identifiers_are_read_too():
    """An nn.ModuleDict may have any keys; the text trains as PEFT does."""
    model = ready(hand_written(Named(), targets=["a-b"]))

    assert_equals_peft(model, [tokens([5, 3], 1)], 2e-6)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layers.0.up", "self.layers[0].up"),
        ("0.weight", 'self._modules["0"].weight'),
        ("parts.in.weight", "getattr(self.parts, 'in').weight"),
        ("parts.a-b.0", "getattr(self.parts, 'a-b')[0]"),
    ],
)
def test_a_path_becomes_an_expression(path, text):
    """Numbers are children of a list; what is no identifier is asked for by name."""
    assert attribute("self", path) == text
