"""Convolutions over tokens: packed where they are causal, padded where they are anything else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

from tests.models import VOCABULARY, assert_equals_peft, error_of, job, ready, tokens
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import NotTokenParallel
from tlora_fx.model.batch import pack

WIDE, HIDDEN, KERNEL = 1e-9, 8, 3
#: Sequences of one token to three more than a kernel reaches; a job's part each.
LENGTHS = ([1, 2, 3, 4, 5, 6], [7, 1, 1, 2])


class Convolved(nn.Module):
    """A decoder of convolutions only, so that float64 is float64 throughout.

    convolve    makes of a convolution and [B, C, S] another [B, C, S]
    options     of the convolutions
    """

    def __init__(self, convolve, layers: int = 2, **options) -> None:
        super().__init__()
        self.config = LlamaConfig()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.inner = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.convs = nn.ModuleList(
            nn.Conv1d(HIDDEN, HIDDEN, **{"kernel_size": KERNEL, "groups": HIDDEN, **options})
            for _ in range(layers)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.convolve = convolve

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Logits; padding lies behind, where nothing looks."""
        x = self.embed(input_ids)
        for inner, conv in zip(self.inner, self.convs, strict=True):
            x = x + torch.tanh(self.convolve(conv, inner(x).transpose(1, 2))).transpose(1, 2)
        return CausalLMOutput(logits=self.head(x))


def trimmed(conv, x):
    """As LFM2 and Mamba do: padded on both sides, and cut."""
    return conv(x)[..., : x.shape[-1]]


def cut_by_numbers(conv, x):
    """The same, by how much is too much."""
    return conv(x)[:, :, : -conv.padding[0]]


def cut_twice(conv, x):
    """The same results, by two slices of one convolution."""
    result, tokens = conv(x), x.shape[-1]
    return result[..., :tokens] * result[..., 0:tokens].sigmoid()


def padded(conv, x):
    """Padded in front alone."""
    return conv(F.pad(x, (conv.dilation[0] * (conv.kernel_size[0] - 1), 0)))


def padded_around(left: int, right: int = 0, value: float = 0.0):
    """Padded by hand on both sides, and cut to as many."""
    return lambda conv, x: conv(F.pad(x, (left, right), value=value))[..., : x.shape[-1]]


def next_one(conv, x):
    """Each token's result is that of the one behind it."""
    return conv(x)[..., 1 : x.shape[-1] + 1]


BOTH = KERNEL - 1
CAUSAL = {
    "LFM2's": (trimmed, {"padding": BOTH}),
    "without bias": (trimmed, {"padding": BOTH, "bias": False}),
    "cut by a number": (cut_by_numbers, {"padding": BOTH}),
    "padded in front": (padded, {}),
    "padded in part by the model": (padded_around(1, 2), {"padding": 1}),
    "of four tokens": (trimmed, {"padding": 3, "kernel_size": 4}),
    "of one token": (lambda conv, x: conv(x), {"kernel_size": 1}),
    "dilated": (trimmed, {"padding": 2 * BOTH, "dilation": 2}),
    "over all channels": (trimmed, {"padding": BOTH, "groups": 1}),
    "in two groups": (padded, {"groups": 2}),
    "cut twice": (cut_twice, {"padding": BOTH}),
}
OTHER = {
    "of both sides": (lambda conv, x: conv(x), {"padding": 1}),
    "of the token behind": (next_one, {"padding": BOTH}),
    "further back than it reaches": (padded_around(3), {}),
    "without the token itself": (padded_around(1, -1), {"padding": 1}),
    "without the first token": (padded_around(-1), {"padding": KERNEL}),
    "in front of ones": (padded_around(2, value=1.0), {}),
    "dilated, of both sides": (trimmed, {"padding": 2, "dilation": 2}),
    "with another use of the end": (
        lambda conv, x: trimmed(conv, x) + conv(x)[..., -1:], {"padding": BOTH},
    ),
}  # fmt: skip


def jobs_on(convolve, attention="auto", **options):
    """Two jobs on a model of float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = Convolved(convolve, **options).double()
    base = BaseSpec(module=module, dtype="float64", attention=attention)
    targets = [f"inner.{layer}" for layer in range(2)]
    return [job(f"job{r}", base, r=r, target_modules=targets) for r in (2, 3)]


@pytest.mark.parametrize("what", sampled(CAUSAL, len(CAUSAL)))
def test_a_causal_convolution_is_packed_and_equals_each_sequence_alone(what):
    """Losses and gradients of all adapters, whatever the neighbours."""
    convolve, options = CAUSAL[what]
    model = ready(jobs_on(convolve, **options))
    parts = [tokens(lengths, seed=place) for place, lengths in enumerate(LENGTHS)]

    assert model.group.form == "packed"
    assert_equals_peft(model, parts, WIDE)


@pytest.mark.parametrize("what", sampled(OTHER, len(OTHER)))
def test_another_convolution_is_not_packed(what):
    """The refusal says what it does to the row."""
    convolve, options = OTHER[what]

    text = error_of(lambda: compile(jobs_on(convolve, "packed", **options)), NotTokenParallel)
    assert "neighbours in the row" in text or "adds tokens to the row" in text


def test_what_only_sees_earlier_tokens_otherwise_is_padded():
    """Rows of lines, each alone, may be shifted; the report says why they are not packed."""
    group = compile(jobs_on(padded_around(BOTH + 1))).group

    assert group.form == "batch"
    assert "it adds tokens to the row" in str(group.notes)


def test_padding_behind_the_jobs_changes_nothing():
    """A row that is filled up, with tokens of its own, gives what the row without gives."""
    model = ready(jobs_on(trimmed, padding=BOTH))
    parts = [tokens(lengths, seed=place) for place, lengths in enumerate(LENGTHS)]
    row = pack(parts)
    filled = pack(parts, length=row.input_ids.shape[1] + 9)

    assert torch.equal(model(filled), model(row))
