"""What `Numerics` says of passes that keep their word, that break it, and that it cannot check."""

from __future__ import annotations

import pytest
import torch

from tests.models import (
    FAMILIES,
    OLD_TRANSFORMERS,
    base_of,
    error_of,
    hand_written,
    job,
    mixed_jobs,
    plain,
)
from tests.numerics.conftest import a_pass, nodes, put_behind
from tests.sampled import sampled
from tests.traced import KINDS
from tlora_fx.compiler import compile
from tlora_fx.errors import NumericsBroken
from tlora_fx.numerics import Numerics, instrument
from tlora_fx.numerics.evaluate import BOUNDS
from tlora_fx.pipeline import REGISTRY, JobPass

aten = torch.ops.aten
CLEAN = "drop-export-noise,tag-roles"
LOWERED = f"{CLEAN},fold-layers,check-token-parallel,fuse-backbone,lower-adapters"
KEEPING = ("plain", "few", "dropping", "head")


def assert_kept(found) -> None:
    """Every pass was checked; one that is declared exact gave the same bits."""
    assert {name for name, _ in found} >= {"fold-layers", "fuse-backbone", "lower-loss"}
    for (name, subject), verdict in found.items():
        word = REGISTRY[name].preserves_numerics
        told = f"{name} on {subject}: {verdict}"
        assert verdict == "exact" or (word == "bound" and verdict.startswith("within bound")), told


@pytest.mark.parametrize(
    ("form", "kinds"),
    sampled([("packed", KEEPING), ("batch", ("plain", "dropping"))]),
    ids=["packed", "batch"],
)
def test_every_pass_keeps_its_word_on_every_kind_of_job(tmp_path, verdicts, form, kinds):
    """Plain LoRA, DoRA, dropout that stays as it is, a trained head; packed and padded rows."""
    base = base_of(tmp_path, "llama", "float32", attention=form, num_hidden_layers=2)

    assert_kept(verdicts([job(kind, base, **KINDS[kind]) for kind in kinds]))


@pytest.mark.parametrize("family", sampled(["gemma2", "gpt2", "bloom", "lfm2"]))
def test_every_pass_keeps_its_word_on_other_architectures(tmp_path, verdicts, family):
    """Interleaved layers, frequencies by segment, Conv1D with dropout, alibi in padded rows."""
    if family == "bloom" and OLD_TRANSFORMERS:
        pytest.skip("this Bloom numbers lines in its masks, and is refused")
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if family == "gpt2" else {}
    base = base_of(tmp_path, family, "float64", **rates)

    assert_kept(verdicts(mixed_jobs(base, FAMILIES[family].targets)))


def test_every_pass_keeps_its_word_on_a_model_written_by_hand(verdicts):
    """Such a model is traced whole; its own dropout is keyed."""
    assert_kept(verdicts(hand_written(plain(layers=1, rate=0.2))))


def test_jobs_that_share_graphs_are_run_with_their_own_numbers(tmp_path, verdicts):
    """Rank, scaling and rate of job and layer, in half precision."""
    base = base_of(tmp_path, "llama", "bfloat16", num_hidden_layers=2)
    targets = {"target_modules": ["q_proj", "down_proj"]}
    jobs = [
        job("one", base, r=2, lora_dropout=0.1, **targets),
        job("two", base, r=4, alpha_pattern={"layers.1.self_attn.q_proj": 1}, **targets),
        job("three", base, r=8, rank_pattern={"layers.0.mlp.down_proj": 3}, **targets),
    ]

    assert_kept(verdicts(jobs))


def test_graphs_that_need_more_memory_than_the_limit_are_not_checked(tmp_path, verdicts):
    """The verdict names both; what did not change is exact all the same."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2)

    found = verdicts([job("few", base, **KINDS["few"])], memory_bytes=2**14)

    assert found["fold-layers", "job few"].startswith("not checked: needs 0.0 GiB, limit 0.0 GiB")
    assert found["tag-roles", "job few"] == "exact"


def test_a_pass_that_declares_other_numbers_is_reported(verdict):
    """And the pass after it is compared with what it left."""

    def scale(group):
        put_behind(nodes(group, "aten.silu")[0], aten.mul.Tensor, 1.5)

    def nothing(group):
        put_behind(nodes(group, "aten.silu")[0], aten.mul.Tensor, 1.0)

    assert verdict(LOWERED, [a_pass(scale, numerics="no")], "few").startswith(
        "other numbers, as declared: "
    )
    assert verdict(LOWERED, [a_pass(scale, numerics="no"), a_pass(nothing)], "few") == "exact"


def test_a_pass_of_others_that_declares_exact_and_only_rounds_is_named(verdict):
    """One multiplication and its inverse keep a bound, not the bits."""

    def rounds(group):
        node = put_behind(nodes(group, "aten.silu")[0], aten.mul.Tensor, 1.1)
        put_behind(node, aten.div.Tensor, 1.1)

    text = error_of(lambda: verdict(LOWERED, [a_pass(rounds)], "few"), NumericsBroken)

    assert 'declares preserves_numerics = "exact"' in text
    assert "the same bits" in text
    assert verdict(LOWERED, [a_pass(rounds, numerics="bound")], "few").startswith("within bound")


def test_a_pass_that_changes_no_code_is_exact_without_a_run(verdict, monkeypatch):
    """What cannot have changed is not computed."""
    monkeypatch.setattr(instrument, "evaluate", None)

    assert verdict(LOWERED, [a_pass(lambda group: None)], "few") == "exact"


def test_an_operator_that_cannot_run_here_is_not_the_passs_fault(verdict):
    """Such as one without a CPU kernel."""

    def spoil(graph):
        node = nodes(graph, "aten.silu")[0]
        node.target = torch.ops.tlora_test.nowhere.default

    with torch.library._scoped_library("tlora_test", "DEF") as library:
        library.define("nowhere(Tensor x) -> Tensor")
        library.impl("nowhere", torch.empty_like, "Meta")
        found = verdict(CLEAN, [a_pass(spoil, JobPass)], "few")

    assert found.startswith("not checked: tlora_test.nowhere.default raised NotImplementedError")


def test_what_the_checker_cannot_do_is_not_the_passs_fault(verdict, monkeypatch):
    """Whatever it trips over."""

    def trip(*args):
        raise KeyError("something odd")

    def scale(group):
        put_behind(nodes(group, "aten.silu")[0], aten.mul.Tensor, 1.5)

    monkeypatch.setattr(instrument, "evaluate", trip)

    assert verdict(LOWERED, [a_pass(scale)], "few") == "not checked: KeyError: 'something odd'"


def test_an_operator_of_ours_that_refuses_its_tables_is_the_passs_fault(verdict):
    """Shapes fit, segments do not."""

    def spoil(group):
        for node in nodes(group, "multi_lora_linear"):
            node.update_arg(8, node.args[9])

    # The structural checks refuse it before: here numbers alone are to find it.
    item = a_pass(spoil, numerics="bound")
    text = error_of(lambda: verdict(LOWERED, [item], "few", checked=False), NumericsBroken)

    assert "cannot run after pass 'spoils'" in text
    assert "multi_lora_linear" in text


def test_verify_numerics_checks_without_an_instrument_given(tmp_path, monkeypatch):
    """`compile(verify="numerics")` adds one, once."""
    seen = []
    monkeypatch.setattr(Numerics, "finished", lambda self, group: seen.append(self.results))
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2)
    jobs = [job("few", base, **KINDS["few"])]

    compile(jobs, verify="numerics")

    (results,) = seen
    assert results[-1].name == "lower-loss"


def test_the_report_has_a_line_a_result():
    """As the command line prints it."""
    watch = Numerics()
    watch.results.append(instrument.Result("fold-layers", "job a", "within bound, 3.1e-07"))

    assert watch.report() == ["numerics  fold-layers on job a: within bound, 3.1e-07"]


def test_bounds_grow_with_the_rounding_of_the_dtype():
    """What passes is stated for every dtype of a base."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

    assert [BOUNDS[kind] for kind in kinds] == sorted(BOUNDS.values())
