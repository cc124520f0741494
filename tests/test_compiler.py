"""Compiling: what is refused, with which words, and what comes out."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from tests.models import Plain, base_of, error_of, hand_written, job
from tlora_fx import compiler
from tlora_fx.compiler import DEFAULT_PIPELINE, as_jobs, compile, run_passes, trace
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import (
    BaseNotLoadable,
    BaseNotTraceable,
    CompileError,
    JobError,
    JobsDiffer,
    NotAdmitted,
    PipelineError,
    StoppedAfter,
    SuperModelMisuse,
    UnknownTarget,
)
from tlora_fx.inspect.program import Recorder
from tlora_fx.ir.lora_sites import lowered_sites
from tlora_fx.tracing.adapters import resolve_sites


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of two layers."""
    return base_of(tmp_path_factory.mktemp("llama"), "llama", "float32", num_hidden_layers=2)


def queries(name, spec, **changes):
    """A small job."""
    made = job(name, spec, r=2, target_modules=["q_proj"])
    return made.model_copy(update=changes)


def test_no_job_is_refused():
    """There is nothing to compile."""
    assert "no job" in error_of(lambda: compile([]), JobsDiffer)


@pytest.mark.parametrize("found", [None, 3, [3], [[]], {"name": "a"}, nn.Linear(2, 2)])
@pytest.mark.parametrize("entry", [compile, run_passes, trace])
def test_what_is_no_job_is_refused(entry, found):
    """Each entry says what it takes; a model, as torch.compile takes it, is told where it goes."""
    text = error_of(lambda: entry(found), JobError)

    assert "expected  a Job, a list of them" in text
    assert ("base=model" in text) is isinstance(found, nn.Module)


def test_jobs_may_be_one_or_several(base):
    """A job, which is iterable too, a list, and what yields jobs."""
    job = queries("a", base)

    assert [as_jobs(given) for given in (job, [job], iter([job]))] == [[job]] * 3


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"pipeline": ["cse"]}, PipelineError, "neither a text nor a Pipeline"),
        ({"verify": "numeric"}, PipelineError, "nearest   numerics"),
        ({"instruments": Recorder()}, PipelineError, "instances of tlora_fx.pipeline.Instrument"),
        ({"instruments": [Recorder]}, PipelineError, "the class Recorder"),
        ({"open": True}, NotAdmitted, "OpenSlots(jobs=8"),
    ],
)
def test_an_option_of_another_kind_is_refused(base, options, error, said):
    """A word of verify that is mistyped would check less than was asked for, and say nothing."""
    assert said in error_of(lambda: compile([queries("a", base)], **options), error)


def test_two_jobs_of_one_name_are_refused(base):
    """A name is a folder."""
    assert "one name" in error_of(lambda: compile([queries("a", base)] * 2), JobsDiffer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", {"dtype": "float64"}),
        ("base", {"seed": 7}),
        ("adapter_dtype", "bfloat16"),
        ("adapter_compute", "float32"),
    ],
)
def test_jobs_that_cannot_share_a_backbone_are_told_apart(base, field, value):
    """The error names both jobs, the field and both values."""
    other = base.model_copy(update=value) if field == "base" else value
    jobs = [queries("a", base), queries("b", base, **{field: other})]

    text = error_of(lambda: compile(jobs), JobsDiffer)

    assert "'a' and 'b' cannot share a backbone" in text
    assert field in text


def test_an_unknown_target_gets_the_nearest_name(base):
    """And the list of what there is."""
    text = error_of(
        lambda: compile([job("a", base, target_modules=["q_prj", "v_proj"])]), UnknownTarget
    )

    assert "q_prj" in text
    assert "nearest" in text
    assert "q_proj" in text
    assert "down_proj" in text


def test_an_unknown_module_to_save_gets_the_nearest_name(base):
    """As targets do."""
    spec = {"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]}

    assert "lm_head" in error_of(lambda: compile([job("a", base, **spec)]), UnknownTarget)


def test_a_pattern_that_matches_nothing_is_refused(base):
    """A regular expression for target_modules."""
    spec = {"target_modules": r".*\.attention\.query"}

    assert "adapts no module" in error_of(lambda: compile([job("a", base, **spec)]), UnknownTarget)


class Branching(Plain):
    """Takes another way for another input."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, or those of the ids the other way round."""
        if ids.sum() > 100:
            ids = ids.flip(1)
        return super().forward(ids)


def test_a_base_that_cannot_be_traced_names_operator_and_line():
    """A branch on values is no graph."""
    spec = BaseSpec(module=Branching(layers=2), dtype="float32")

    text = error_of(lambda: compile([job("a", spec, target_modules=["out"])]), BaseNotTraceable)

    assert "reads out of a tensor" in text.splitlines()[0]
    assert "Error:" not in text
    assert "test_compiler.py" in text
    assert "if ids.sum() > 100:" in text
    assert "attention: batch" not in text


def test_what_failed_is_not_advised(tmp_path):
    """Where packed and batch form fail one after the other, no text says to set the latter."""
    base = base_of(tmp_path, "opt", "float32", layerdrop=0.5)

    text = error_of(lambda: compile(job("a", base, target_modules=["q_proj"])), CompileError)

    assert "and before that, in packed form" in text
    assert "attention: batch" not in text


def test_a_config_of_no_language_model_is_refused(tmp_path):
    """transformers says why."""
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    spec = BaseSpec(config=tmp_path)

    text = error_of(lambda: compile([job("a", spec, target_modules=["q"])]), BaseNotLoadable)

    assert "causal language model" in text
    assert "model_type 'vit'" in text
    assert len(text.splitlines()) < 7


def test_a_config_of_no_model_is_refused(tmp_path):
    """A file that is no config."""
    (tmp_path / "config.json").write_text("{}")

    spec = BaseSpec(config=tmp_path)
    text = error_of(lambda: compile([job("a", spec, target_modules=["q"])]), BaseNotLoadable)

    assert str(tmp_path) in text


def test_more_than_sixty_four_jobs_are_refused(base):
    """The limit is an option of fuse-backbone, and the error says so."""
    jobs = [queries(f"j{n}", base) for n in range(65)]

    assert "max-jobs" in error_of(lambda: compile(jobs), JobsDiffer)


def test_one_job_is_a_group_too(base):
    """A single job compiles, from a job or a list."""
    one = queries("a", base)

    assert as_jobs(one) == [one] == as_jobs([one])
    assert compile(one).group.job_names == ["a"]


def test_a_job_on_a_module_can_be_traced():
    """In padded rows, as `compile` takes them; its layers fold."""
    (job,) = hand_written(Plain())
    graph = trace(job)

    assert graph.form == "batch"
    assert [block.instances for block in graph.blocks.values()] == [
        ("layers.0", "layers.1", "layers.2")
    ]


def test_a_job_can_be_traced_by_itself(base):
    """`trace` gives the folded graph of one job."""
    graph = trace(queries("a", base))

    assert graph.name == "a"
    assert [block.instances for block in graph.blocks.values()] == [
        ("model.layers.0", "model.layers.1")
    ]


@pytest.mark.parametrize("pipeline", [None, DEFAULT_PIPELINE], ids=["default", "named"])
@pytest.mark.parametrize(
    ("compute", "dtype"), [("base", torch.bfloat16), ("float32", torch.float32)]
)
def test_adapters_are_kept_in_float32_and_multiplied_as_asked(base, compute, dtype, pipeline):
    """On a bfloat16 base: in the base's dtype, or PEFT's way, also where passes are named."""
    half = base.model_copy(update={"dtype": "bfloat16"})
    model = compile(queries("a", half, adapter_compute=compute), pipeline)

    (bank, *_) = model.banks.values()
    (site, *_) = [s for block in model.group.blocks.values() for s in lowered_sites(block.graph)]
    assert bank.a.dtype == torch.float32
    assert site.arguments["compute_dtype"] == dtype


def test_a_pattern_for_a_rank_that_fits_no_module_is_reported(base):
    """PEFT passes over such a key; the report names it."""
    fields = {"rank_pattern": {"q_proj": 2, "q_prj": 3}, "alpha_pattern": {"down_proj": 4}}
    model = compile(job("a", base, r=4, target_modules=["q_proj"], **fields))

    told = [text for by, text in model.group.notes if by == "adapters"]
    assert [text.split("'")[3] for text in told] == ["q_prj", "down_proj"]


@pytest.mark.parametrize("passes", ["drop-export-noise,tag-roles", " "])
def test_a_pipeline_that_never_fuses_builds_no_model(base, passes):
    """It may be looked at, not trained."""
    assert "never fuses" in error_of(lambda: compile(queries("a", base), passes), PipelineError)


def test_a_pipeline_that_does_not_fold_is_refused(base):
    """Only two layers of each structure are traced; folding adds the others."""
    passes = DEFAULT_PIPELINE.replace("fold-layers,", "")

    assert "fold-layers" in error_of(lambda: compile(queries("a", base), passes), PipelineError)


def test_branches_that_nobody_lowers_carry_their_own_numbers(base):
    """Layers of other scalings share no code then."""
    fused = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"
    fields = {"alpha_pattern": {"layers.1.self_attn.q_proj": 400}}
    model = compile(job("a", base, r=2, target_modules=["q_proj"], **fields), fused)

    assert model.group.exact
    assert len(model.group.blocks) == 2
    assert "lower-loss" in error_of(model.compile, SuperModelMisuse)


def test_a_run_of_passes_stops_where_it_is_asked_to(base, monkeypatch):
    """From Python, and by the environment for a model that cannot be built then."""
    one = job("a", base, r=4, target_modules=["q_proj"])

    assert not run_passes(one, stop_after="fold-layers").fused
    assert run_passes(one, stop_after="fuse-backbone").fused
    monkeypatch.setenv("TLORA_FX_LOG", "stop-after=fuse-backbone")
    assert "fuse-backbone" in error_of(lambda: compile(one), StoppedAfter)


def test_dropout_can_be_switched_off_for_a_comparison(tmp_path):
    """`dropout=False`: every rate is 0, the base's too."""
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_layer": 2}
    spec = base_of(tmp_path, "gpt2", "float32", **rates)
    one = job("a", spec, target_modules=["c_attn"], lora_dropout=0.5)

    assert "keyed_dropout" in compile(one).source
    still = compile(one, dropout=False)
    assert "keyed_dropout" not in still.source
    assert not any(bank.rates.any() for bank in still.banks.values())


class Small(nn.Module):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 61)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def test_a_model_without_layers_compiles():
    """Nothing to fold, nothing to outline but the head."""
    spec = BaseSpec(module=Small(), dtype="float32")

    model = compile(job("a", spec, target_modules=["mix"]))

    assert list(model.group.blocks) == ["head"]


def test_jobs_with_equal_adapters_are_looked_at_once(base, monkeypatch):
    """Each has sites of its own all the same."""
    ranks = {"a": 2, "b": 4, "c": 2}
    jobs = [job(name, base, r=rank, target_modules=["q_proj"]) for name, rank in ranks.items()]
    asked = []

    def counted(jobs, backbone):
        asked.extend(each.name for each in jobs)
        return [resolve_sites(each, backbone) for each in jobs]

    monkeypatch.setattr(compiler, "resolved_sites", counted)
    prepared = compiler.prepare(jobs)

    assert asked == ["a", "b"]
    assert prepared.sites == [resolve_sites(each, prepared.backbone) for each in jobs]
    assert prepared.sites[0] is not prepared.sites[2]


def test_compiling_keeps_back_notices_of_libraries_that_it_imports(base, monkeypatch, caplog):
    """Of a program of a user, whose first lines they would be; other messages are told."""

    class StoppedHereError(Exception):
        pass

    def imports(*given, **options):
        for text in ("Failed to load kernels.so", "something else"):
            logging.getLogger("torchao").warning(text)
        raise StoppedHereError

    monkeypatch.setattr(compiler, "_prepare_for", imports)
    with pytest.raises(StoppedHereError):
        compile([queries("a", base)])

    assert caplog.messages == ["something else"]
