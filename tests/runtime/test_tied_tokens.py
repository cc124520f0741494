"""Single tokens of an embedding that shares its weight with the head, each as PEFT alone."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from tests.alone import train_alone
from tests.runtime.groups import VOCABULARY, losses_of, make_data, make_job, tiny_base
from tests.runtime.test_other_kinds import trained
from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.errors import MeshDoesNotFit, UnknownTarget
from tlora_fx.ir.graph import HEAD, is_call
from tlora_fx.model.backbone import load_backbone
from tlora_fx.parallel.mesh import MeshShape
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base
from tlora_fx.runtime.verification.verify import adapter_difference
from tlora_fx.tracing.adapters import resolve_sites

TOKENS: dict[str, Any] = {"all": [9, 3, 20], "named": {"embed_tokens": [3, 5]}, "none": None}
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def group(base, tmp_path_factory):
    """A trained group: the model, its folder, the starts."""
    jobs = [
        make_job(base, name, lora={"trainable_token_indices": ids}, seed=seed, max_steps=STEPS)
        for seed, (name, ids) in enumerate(TOKENS.items())
    ]
    folder = tmp_path_factory.mktemp("run") / "run"
    model, starts = trained(jobs, folder)
    return model, folder, starts


@pytest.mark.parametrize("name", TOKENS)
def test_a_job_trains_as_peft_trains_it_alone(group, name):
    """Rows of the embedding and columns of the logits are one parameter, with one gradient."""
    model, folder, starts = group
    job = next(job for job in model.jobs if job.name == name)
    data = make_data([job])[name]

    alone = train_alone(job, plain_base(model.backbone), data, starts[name], STEPS, masks=False)

    found = adapter_tensors(model.job_parameters(name))
    assert losses_of(folder, [job])[name] == pytest.approx(alone.losses, rel=2e-6)
    assert found.keys() == alone.adapters.keys()
    assert adapter_difference(found, alone.adapters) <= 1e-6
    assert (DELTA in found) == (name != "none")
    assert name == "none" or not torch.equal(found[DELTA], starts[name][DELTA])


def test_the_head_multiplies_with_the_embedding_once(group):
    """A job's own tokens are a product with their rows alone."""
    model, _, _ = group
    head = model.group.blocks[HEAD].graph
    products = [node for node in head.nodes if is_call(node, torch.ops.aten.linear.default)]
    sizes = [node.all_input_nodes[1].meta["tensor"].shape[0] for node in products]

    assert sorted(sizes) == [2, 3, VOCABULARY]


def test_peft_loads_what_is_written_for_both(group):
    """The embedding's rows are the head's in the loaded model, and in one that is merged."""
    model, folder, _ = group
    ids = torch.arange(1, 9)[None]
    rows = adapter_tensors(model.job_parameters("all"))[DELTA]

    loaded = peft.PeftModel.from_pretrained(plain_base(model.backbone), folder / "all").eval()
    hidden = loaded(ids, output_hidden_states=True).hidden_states[-1]
    logits = loaded(ids).logits
    merged = loaded.merge_and_unload()

    torch.testing.assert_close(logits[..., TOKENS["all"]], hidden @ rows.T)
    torch.testing.assert_close(merged(ids).logits, logits)
    assert torch.equal(merged.lm_head.weight[TOKENS["all"]], rows)


def test_a_job_goes_on_from_the_folder(group, tmp_path):
    """It starts from what was written, and trains as PEFT does from there."""
    model, folder, _ = group
    job = Job(
        name="again",
        base=model.jobs[0].base,
        adapter=folder / "all",
        data={"path": "unused.jsonl"},
        max_steps=1,
    )
    again, starts = trained([job], tmp_path / "run")
    ends = adapter_tensors(model.job_parameters("all"))
    data = make_data([job])["again"]

    alone = train_alone(job, plain_base(model.backbone), data, starts["again"], 1, masks=False)

    assert all(torch.equal(starts["again"][name], tensor) for name, tensor in ends.items())
    found = adapter_tensors(again.job_parameters("again"))
    assert adapter_difference(found, alone.adapters) <= 1e-6


def test_a_pipeline_is_refused(group):
    """Its first stage has the embedding, and its last one the head."""
    model, _, _ = group

    with pytest.raises(MeshDoesNotFit, match="job 'all' trains the same tokens in both"):
        require_fits(model, MeshShape(pp=2))


@pytest.mark.parametrize("form", ["batch", "packed"])
def test_every_pass_keeps_the_numbers(tmp_path, form):
    """Checked after each pass, and against the base by itself, in both forms of rows."""
    base = tiny_base(tmp_path, tie_word_embeddings=True).model_copy(update={"attention": form})
    jobs = [
        make_job(base, "a", lora={"trainable_token_indices": [1, 2], "lora_dropout": 0.1}),
        make_job(base, "b"),
    ]

    assert compile(jobs, verify="numerics").group.form == form


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "the job adapts it"),
        ({"modules_to_save": ["lm_head"]}, "the job adapts it"),
    ],
)
def test_a_head_that_cannot_follow_is_refused(base, lora, said):
    """Where the job trains it in another way too."""
    job = make_job(base, "a", lora=lora | {"trainable_token_indices": [1]})

    with pytest.raises(UnknownTarget, match=said) as told:
        resolve_sites(job, load_backbone(base))
    assert told.value.facts["job"] == "a"


def test_a_head_with_a_bias_is_refused(base):
    """PEFT leaves the bias out of its product."""
    backbone = load_backbone(base)
    head = backbone.model.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY, device="meta"))

    with pytest.raises(UnknownTarget, match="a bias, which PEFT leaves out"):
        resolve_sites(make_job(base, "a", lora={"trainable_token_indices": [1]}), backbone)


def test_an_embedding_whose_a_stays_zero_is_refused(base):
    """LoRA-FA freezes A, which an embedding starts as zeros."""
    job = make_job(base, "a", lora={"target_modules": ["embed_tokens"]}, optim="lorafa")

    with pytest.raises(UnknownTarget, match="freezes an embedding's A") as told:
        resolve_sites(job, load_backbone(base))
    assert told.value.facts["job"] == "a"
