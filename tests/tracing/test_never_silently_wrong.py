"""Bases that packing would get wrong are caught by name, or trained another way and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3VLMoeConfig

from tests.models import (
    FAMILIES,
    LONG_LIMIT,
    OLD_TORCH,
    OLD_TRANSFORMERS,
    VOCABULARY,
    Plain,
    PlainLayer,
    assert_equals_peft,
    assert_same,
    base_of,
    error_of,
    hand_written,
    job,
    ready,
    run_fused,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseNotTraceable, BaseRefused, CompileError, NotTokenParallel

ROUNDED, WIDE = 3e-6, 1e-9
BYPASSING = ("bloom", "falcon", "falcon-alibi")


def two_jobs(base, targets):
    """Two plain jobs with different targets."""
    return [
        job("one", base, r=4, target_modules=list(targets)),
        job("two", base, r=2, target_modules=list(targets[:1]), lora_alpha=5),
    ]


def of_one_layer(folder, family, **changes):
    """The smallest base of a family that attends in its own code."""
    layers = "n_layer" if family == "bloom" else "num_hidden_layers"
    return base_of(folder, family, **{layers: 1}, **changes)


@pytest.mark.parametrize("family", sampled(BYPASSING))
def test_bases_that_bypass_the_packed_operator_run_padded_and_equal_peft(tmp_path, family):
    """Bloom and Falcon attend in their own code: `attention: auto` pads their rows."""
    if family == "bloom" and OLD_TRANSFORMERS:
        pytest.skip("this transformers' Bloom numbers the lines of a batch and is refused by name")
    model = ready(two_jobs(of_one_layer(tmp_path, family), FAMILIES[family].targets))

    assert model.group.form == "batch"
    assert any("padded, not packed" in note for _, note in model.group.notes)
    assert_equals_peft(model, [tokens([9, 7], seed=1), tokens([6], seed=2)], ROUNDED)


@pytest.mark.parametrize("family", sampled(BYPASSING))
def test_bases_that_bypass_the_packed_operator_are_refused_when_packing_is_asked(tmp_path, family):
    """`attention: packed` says no, and what to set instead."""
    base = of_one_layer(tmp_path, family, attention="packed")

    text = error_of(lambda: compile(two_jobs(base, FAMILIES[family].targets)), CompileError)

    assert "attention: batch" in text


class Careless(Plain):
    """Takes positions as a packable model does, and attends over the whole row."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits; positions are not looked at."""
        return super().forward(input_ids)


def test_attention_over_the_whole_row_is_caught_by_the_token_check():
    """The check names the operator and its line; nobody is to register one of torch."""
    jobs = hand_written(Careless(layers=1), "packed")

    text = error_of(lambda: compile(jobs), NotTokenParallel)

    assert "aten.matmul.default" in text
    assert "it multiplies every token with every other" in text
    assert "models.py" in text
    assert "scores = q @ k.transpose(1, 2)" in text
    assert "register" not in text


class Mean(Plain):
    """Adds something of the whole row to every token."""

    def __init__(self, what) -> None:
        super().__init__(layers=1)
        self.what = what

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits without attention."""
        hidden = self.what(self.embed(input_ids), position_ids)
        for layer in self.layers:
            hidden = hidden + layer.out(torch.tanh(hidden))
        return self.head(hidden)


def table(x):
    """Sixty-four values that no input holds."""
    return torch.sin(torch.arange(64, device=x.device, dtype=x.dtype))


MIXING = {
    "a mean over the row": lambda x, p: x - x.mean(1, keepdim=True),
    "the row's length": lambda x, p: x / x.shape[1],
    "the largest position": lambda x, p: x * p.max(),
    "a running sum": lambda x, p: x.cumsum(1),
    "the token before": lambda x, p: torch.cat([x[:, :1], x[:, :-1]], dim=1),
    "a place in the row": lambda x, p: x + torch.arange(x.shape[1], device=x.device)[None, :, None],
    "torch's generator": lambda x, p: x + torch.rand_like(x),
    "noise that all share": lambda x, p: x * torch.rand(1, device=x.device),
    "a table read by place": lambda x, p: x + table(x)[: x.shape[1], None],
    "the row's length in a tensor": lambda x, p: x * x.new_full((1,), x.shape[1]),
    "an operator without a rule": lambda x, p: x.roll(1, 1),
    "an order over the row": lambda x, p: x.sort(dim=1).values,
    "an order of the default dimension": lambda x, p: x.mT.sort().values.mT,
    "attention of torch": lambda x, p: nn.functional.scaled_dot_product_attention(x, x, x),
    "an einsum of tokens": lambda x, p: torch.einsum("bth,bsh,bsk->btk", x, x, x),
}


@pytest.mark.parametrize("what", sampled(MIXING))
def test_what_depends_on_the_row_is_not_shared(what):
    """Each way to see other tokens is an error that names the line."""
    if "einsum" in what and OLD_TORCH:
        pytest.skip("this torch specialises the einsum, which is refused without a line")
    jobs = hand_written(Mean(MIXING[what]), "packed")

    text = error_of(lambda: compile(jobs), CompileError)

    assert "source" in text
    assert "test_never_silently_wrong.py" in text


ALLOWED = {
    "a mean over features": lambda x, p: x - x.mean(-1, keepdim=True),
    "a table of positions": lambda x, p: x + torch.ones(64, 32, dtype=x.dtype, device=x.device)[p],
    "features by number": lambda x, p: x + x[..., [0]],
    "an einsum of features": lambda x, p: torch.einsum("bth,bth->bt", x, x)[..., None] * x,
    "a constant": lambda x, p: x * torch.tensor([0.5] * 32, dtype=x.dtype, device=x.device),
    "an order over features": lambda x, p: x.sort().values,
    "a split": lambda x, p: torch.cat(x.chunk(2, -1)[::-1], -1),
}


@pytest.mark.parametrize("what", sampled(ALLOWED))
def test_what_works_on_single_tokens_is_shared_and_right(what):
    """No false alarm, and constants keep their values through the meta device."""
    module = Mean(ALLOWED[what]).double()
    model = ready(hand_written(module, "packed"))

    found = run_fused(model, [tokens([5], seed=1)])["one"].loss

    part = tokens([5], seed=1)
    ids = torch.tensor(part.sequences)
    with torch.no_grad():
        for parameter in model.job_parameters("one").values():
            parameter.zero_()
        expected = nn.functional.cross_entropy(
            module(ids, torch.arange(5)[None])[0, :-1], ids[0, 1:], reduction="sum"
        )
    base_alone = run_fused(model, [part])["one"].loss
    assert found != base_alone
    torch.testing.assert_close(base_alone, expected, rtol=1e-12, atol=0)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """Two jobs on a longrope Phi-3 whose original length is six."""
    base = base_of(tmp_path_factory.mktemp("phi3"), "phi3-longrope", num_hidden_layers=1)
    return ready(two_jobs(base, FAMILIES["phi3"].targets))


@pytest.mark.parametrize("length", [LONG_LIMIT - 1, LONG_LIMIT, LONG_LIMIT + 1])
def test_a_long_neighbour_does_not_switch_longrope(longrope, length):
    """A job around the original length reads the frequencies that it would read alone."""
    part, long = tokens([length, 2], seed=1), tokens([3 * LONG_LIMIT], seed=2)

    together = run_fused(longrope, [part, long])["one"]

    assert_same(together, run_fused(longrope, [part, tokens([])])["one"], WIDE)
    assert_equals_peft(longrope, [part, long], ROUNDED)


def test_longrope_switches_beyond_its_original_length(longrope):
    """The switch is real: the same early tokens weigh otherwise in a longer sequence."""
    short = tokens([LONG_LIMIT], seed=1)
    longer = tokens([LONG_LIMIT + 1], seed=1)
    first = [-100, *longer.labels[0][1:LONG_LIMIT], -100]
    watched = type(longer)(longer.sequences, [first], longer.seed, longer.step)

    losses = [run_fused(longrope, [p, tokens([])])["one"].loss for p in (short, watched)]

    assert losses[0] != losses[1]


def test_dynamic_ntk_is_refused_by_name(tmp_path):
    """Its frequencies depend on the longest sequence that the process has ever seen."""
    base = base_of(tmp_path, "llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})

    text = error_of(lambda: compile(two_jobs(base, ["q_proj"])), BaseRefused)

    assert "dynamic NTK" in text


def test_gemma2_on_meta_keeps_what_no_checkpoint_holds(tmp_path):
    """embed_scale and inv_freq have the values that the model's own code gives them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = base_of(tmp_path, "gemma2", dtype="float32", num_hidden_layers=1)
    model = ready(two_jobs(base, ["q_proj"])[:1])
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.config))

    buffers = {**dict(model.net.named_buffers()), **dict(model.net.named_parameters())}
    for name, value in real.named_buffers():
        if name in buffers:
            assert torch.equal(buffers[name], value), name
    assert any("embed_scale" in name for name in buffers)
    assert any("inv_freq" in name for name in buffers)


def test_layers_that_compute_with_their_index_are_not_folded(tmp_path):
    """GPT-2 with scale_attn_by_inverse_layer_idx: each layer has its own code."""
    base = base_of(tmp_path, "gpt2", n_layer=2, scale_attn_by_inverse_layer_idx=True)
    model = ready(two_jobs(base, ["c_attn", "c_fc"]))

    assert all(len(block.instances) == 1 for block in model.group.blocks.values())
    assert_equals_peft(model, [tokens([5, 7], seed=1), tokens([6], seed=2)], WIDE)


class NumberedLayer(PlainLayer):
    """A layer that knows its index, and may compute with it."""

    def __init__(self, index: int, *, used: bool) -> None:
        super().__init__(0, 0.0)
        self.index = index
        self.used = used

    def forward(self, hidden: Tensor) -> Tensor:
        """Residual attention, weaker from layer to layer."""
        return super().forward(hidden / (self.index + 1) if self.used else hidden)


class Numbered(Plain):
    """A model whose layers know their index."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NumberedLayer(index, used=used) for index in range(3))


@pytest.mark.parametrize(("used", "pieces"), [(True, 3), (False, 1)])
def test_an_index_unfolds_layers_only_where_it_is_read(used, pieces):
    """The tripwire: a forward that reads its layer's index traces each layer."""
    model = ready(hand_written(Numbered(used=used)))

    blocks = [block for block in model.group.blocks.values() if block.name != "head"]
    told = any("their forward reads their index" in note for _, note in model.group.notes)
    assert (len(blocks), told) == (pieces, used)
    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


@pytest.mark.parametrize("part", ["whole", "text"])
def test_a_router_loss_is_refused_by_name(tmp_path, part):
    """A mixture of experts that adds a loss of its own, or is the text part of a larger model."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    config = MixtralConfig(**asked) if part == "whole" else Qwen3VLMoeConfig(text_config=asked)
    config.save_pretrained(tmp_path)
    base = BaseSpec(config=tmp_path, dtype="float32")

    text = error_of(lambda: compile(two_jobs(base, ["q_proj"])), BaseRefused)

    assert "output_router_logits: true" in text


def test_layerdrop_is_refused_by_name(tmp_path):
    """OPT that skips layers at random cannot be traced as one graph; the error names its line."""
    base = base_of(tmp_path, "opt", layerdrop=0.5)

    text = error_of(lambda: compile(two_jobs(base, ["q_proj"])), CompileError)

    assert "modeling_opt.py" in text


class Recurrent(Plain):
    """A model that walks over the tokens in Python."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of a running state."""
        hidden = self.embed(ids)
        state, states = torch.zeros_like(hidden[:, 0]), []
        for place in range(hidden.shape[1]):
            state = torch.tanh(self.layers[0].out(state) + hidden[:, place])
            states.append(state)
        return self.head(torch.stack(states, 1))


def test_a_loop_over_tokens_is_refused_in_our_words():
    """Tracing would fix the number of tokens; no text names a log of torch."""
    text = error_of(
        lambda: compile(hand_written(Recurrent(layers=1), targets=("head",))), BaseNotTraceable
    )

    assert "walks over the tokens of a row one after another" in text.splitlines()[0]
    assert "TORCH_LOGS" not in text


class Doubled(Plain):
    """A model whose code without gradients hands on a size that it computed."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        with torch.no_grad():
            size, scale = hidden.shape[1] * 2, hidden.sum(-1)
        room = hidden.new_zeros(hidden.shape[0], size, 32)[:, : size // 2]
        return self.head(self.layers[0](hidden + room * scale[..., None]))


def test_a_size_out_of_code_without_gradients_is_no_tensor():
    """Only tensors are detached."""
    model = ready(hand_written(Doubled(layers=1)))

    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


class LastButOne(Plain):
    """A model that treats one layer, the third of four, otherwise from outside."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden * 3 if place == 2 else hidden)
        return self.head(hidden)


class Louder(PlainLayer):
    """A layer whose loudness the model decides."""

    def forward(self, hidden: Tensor, gain: float = 1.0) -> Tensor:
        """Residual attention."""
        return super().forward(hidden) * gain


class OneLouder(Plain):
    """A model that hands one layer another number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Louder(0, 0.0) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(ids)
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden, 3.0 if place == 2 else 1.0)
        return self.head(hidden)


@pytest.mark.parametrize("make", [lambda: LastButOne(layers=4), OneLouder])
def test_a_layer_that_is_treated_otherwise_from_outside_is_not_folded_away(make):
    """All layers of a hand-written model are traced, not only the first two."""
    model = ready(hand_written(make()))

    assert any("fold-layers" in name for name, _ in model.group.notes)
    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


def one_layer_three_times() -> Plain:
    """A model whose list holds one layer at three places."""
    model = Plain(layers=1)
    model.layers.extend([model.layers[0]] * 2)
    return model


def one_layer_under_two_names() -> Plain:
    """A model that also has its last layer as an attribute, which it does not call."""
    model = Plain(layers=3)
    model.last = model.layers[2]
    return model


def one_linear_of_two_layers() -> Plain:
    """A model of layers that share the linear that is not adapted."""
    model = Plain(layers=3)
    model.layers[1].qkv = model.layers[0].qkv
    return model


@pytest.mark.parametrize(
    "make", [one_layer_three_times, one_layer_under_two_names, one_linear_of_two_layers]
)
def test_a_module_at_several_places_has_one_adapter(make):
    """PEFT wraps it once, where it stands first, and all its calls go through that adapter."""
    model = ready(hand_written(make()))

    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


def test_layers_that_share_a_module_without_parameters_are_folded():
    """Such as an activation: the layer that calls it is where it stands."""
    model = Plain(layers=3)
    for layer in model.layers:
        layer.drop = model.layers[0].drop

    ssm = ready(hand_written(model))

    assert [block for block in ssm.group.blocks if "layers" in block] == ["layers_0_2"]
    assert_equals_peft(ssm, [tokens([5, 3], seed=1)], WIDE)


class ScaledHead(Plain):
    """A head that looks at the tokens beside each token."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits from which each line's mean is taken."""
        logits = super().forward(ids)
        return logits - logits.mean(1, keepdim=True)


def test_a_head_that_mixes_tokens_of_a_line_is_refused():
    """The head runs on single rows, so in batch form it may not look along the line."""
    text = error_of(lambda: compile(hand_written(ScaledHead(layers=1))), NotTokenParallel)

    assert "it reduces over the row" in text


class Spectrum(Plain):
    """Mixes features by a Fourier transform: what adapters do passes through complex numbers."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the spectrum of the running maxima of features."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(torch.fft.fft(hidden.cummax(dim=-1).values, dim=-1).real)


def test_gradients_pass_through_complex_numbers():
    """An adapter whose gradient comes that way alone is trained, and not taken for idle."""
    model = ready(hand_written(Spectrum(layers=1), "batch"))

    assert_equals_peft(model, [tokens([9, 7], seed=1)], WIDE)


class SameSize(nn.Module):
    """A model whose hidden size is its vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)
        self.out = nn.Linear(VOCABULARY, VOCABULARY)
        self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, soft-capped and scaled."""
        hidden = self.embed(ids)
        hidden = hidden + torch.tanh(self.out(hidden))
        return torch.tanh(self.head(hidden) / 3) * 3


def test_a_hidden_size_equal_to_the_vocabulary_does_not_hide_the_head():
    """The head is found by what carries the row on, not by its width."""
    model = ready(hand_written(SameSize(), targets=("out", "head")))

    head = model.group.blocks["head"].graph
    assert sum("linear" in str(node.target) for node in head.nodes) == 1
    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)
