"""Kinds of adapters beside LoRA, in one group: each as PEFT alone, and a LoRA job beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import pytest
import torch

from tests.alone import train_alone
from tests.runtime.groups import losses_of, make_data, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.fields import IDENTITY
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import OTHER_KINDS
from tlora_fx.errors import JobError, NotElementwise, UnknownTarget
from tlora_fx.model.backbone import load_backbone
from tlora_fx.parallel.mesh import Mesh, MeshShape
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base
from tlora_fx.runtime.distributed import require_elementwise
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import adapter_difference
from tlora_fx.tracing.adapters import resolve_sites

#: Fields of a job of each kind, with as much as a small base shows.
KINDS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4},
    "LORA-FA": {"r": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "LORA-tokens": {"r": 2, "trainable_token_indices": [9, 3, 20]},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 3, "tfinal": 2, "lora_alpha": 6},
    "IA3": {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "LOHA": {"r": 3, "alpha": 5, "rank_pattern": {"v_proj": 2}},
    "LOKR": {"r": 2, "alpha": 4, "decompose_both": True},
    "OFT": {"oft_block_size": 8},
    "VERA": {"r": 4, "projection_prng_key": 3, "target_modules": ["q_proj", "down_proj"]},
}
STEPS = 2


def job_of(base, kind: str, **changes: Any) -> Job:
    """A job of a kind."""
    lora = {"target_modules": ["q_proj", "v_proj"], **KINDS[kind]}
    fields = {"learning_rate": 1e-2, "max_steps": STEPS, "per_device_train_batch_size": 2}
    if kind.startswith("LORA-FA"):
        fields |= {"optim": "lorafa", "weight_decay": 0.1, "adam_epsilon": 1e-6}
    return Job(
        name=kind,
        base=base,
        lora=lora if kind.startswith("LORA") else {"peft_type": kind, **lora},
        data={"path": "unused.jsonl"},
        seed=len(kind) + 4,
        **{**fields, **changes},
    )


def trained(jobs, folder, **options):
    """The compiled model of these jobs after their steps, and where each of them started."""
    starts: dict[str, dict[str, torch.Tensor]] = {}

    class Noting(Trainer):
        """Notes what each job starts from."""

        def prepare(self, data):
            """As every trainer does."""
            super().prepare(data)
            for run in self.runs:
                tensors = adapter_tensors(run.parameters)
                starts[run.job.name] = {name: each.clone() for name, each in tensors.items()}

    model = compile(jobs)
    Noting(model, output=folder, device="cpu", data=make_data(jobs), **options).run()
    return model, starts


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def group(base, tmp_path_factory):
    """A trained group of all kinds: the model, its folder, the starts."""
    folder = tmp_path_factory.mktemp("run") / "run"
    model, starts = trained([job_of(base, kind) for kind in KINDS], folder)
    return model, folder, starts


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_trains_as_peft_trains_it_alone(group, kind):
    """Losses of all steps and the adapter after them, whatever its neighbours are."""
    model, folder, starts = group
    job = next(job for job in model.jobs if job.name == kind)

    alone = train_alone(
        job, plain_base(model.backbone), make_data([job])[kind], starts[kind], STEPS, masks=False
    )

    assert losses_of(folder, [job])[kind] == pytest.approx(alone.losses, rel=2e-6)
    found = adapter_tensors(model.job_parameters(kind))
    assert found.keys() == alone.adapters.keys()
    assert adapter_difference(found, alone.adapters) <= 1e-5
    assert any(not torch.equal(tensor, starts[kind][name]) for name, tensor in found.items())
    if kind.startswith("LORA-FA"):
        downs = [name for name in found if ".lora_A." in name]
        assert downs
        assert all(torch.equal(found[name], starts[kind][name]) for name in downs)


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_peft_loads_what_is_written(group, kind):
    """Its class of config, and every tensor, bitwise."""
    model, folder, _ = group
    loaded = peft.PeftModel.from_pretrained(plain_base(model.backbone), folder / kind)

    kept = peft.get_peft_model_state_dict(loaded)
    ends = adapter_tensors(model.job_parameters(kind))
    assert kept.keys() >= ends.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in ends.items())
    assert loaded.peft_config["default"].peft_type == kind.partition("-")[0]


@pytest.mark.parametrize("kind", sorted(OTHER_KINDS))
def test_a_job_goes_on_from_a_folder_of_its_kind(group, kind):
    """The folder says what is trained; PEFT's defaults stand for what it leaves out."""
    model, folder, _ = group
    job = next(job for job in model.jobs if job.name == kind)
    again = Job(name="again", base=job.base, adapter=folder / kind, data={"path": "x"})

    assert not again.is_lora
    mine, theirs = again.lora_config().to_dict(), job.lora_config().to_dict()
    same = sorted(set(mine) - {"target_modules", "feedforward_modules"})
    assert [mine[name] for name in same] == [theirs[name] for name in same]
    assert sorted(mine["target_modules"]) == sorted(theirs["target_modules"])


@pytest.mark.slow
def test_a_resumed_run_and_a_job_without_neighbours_do_the_same(base, tmp_path):
    """Bitwise from a checkpoint; alone up to rounding."""
    changes = {"lr_scheduler_type": "constant"}
    long = [job_of(base, kind, max_steps=3, **changes) for kind in KINDS]
    short = [job_of(base, kind, max_steps=1, **changes) for kind in KINDS]
    whole, _ = trained(long, tmp_path / "whole")
    trained(short, tmp_path / "cut")

    resumed, _ = trained(long, tmp_path / "cut", resume=True)

    for job in long:
        ends = adapter_tensors(whole.job_parameters(job.name))
        again = adapter_tensors(resumed.job_parameters(job.name))
        assert all(torch.equal(tensor, again[name]) for name, tensor in ends.items())
        single, _ = trained([job], tmp_path / f"alone-{job.name}")
        alone = adapter_tensors(single.job_parameters(job.name))
        assert adapter_difference(alone, ends) <= 1e-7


@pytest.mark.parametrize("kind", sorted(OTHER_KINDS))
def test_every_field_of_peft_is_honoured_or_refused(kind):
    """None is unknown, and those that are left out have PEFT's defaults."""
    spec, config = OTHER_KINDS[kind], peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {field.name: field for field in dataclasses.fields(config)}

    assert set(fields) <= {*spec.model_fields, *spec.refused, *IDENTITY}
    assert set(spec.model_fields) <= set(fields)
    for name in set(spec.model_fields) - {"peft_type"}:
        factory = fields[name].default_factory
        default = fields[name].default if factory is dataclasses.MISSING else factory()
        assert spec.model_fields[name].default == default


def test_ia3_may_have_no_feedforward_modules():
    """PEFT takes a list that is empty for none at all, and None for those that it knows."""
    lora = {"peft_type": "ia3", "target_modules": ["k_proj"], "feedforward_modules": []}
    job = Job(name="a", base={"model": "m"}, lora=lora, data={"path": "x"})

    assert job.lora_config().feedforward_modules == set()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"peft_type": "IA3", "r": 4}, "unknown key 'r' in 'lora' of the kind IA3"),
        ({"peft_type": "loha", "rank": 4}, "unknown key 'rank'"),
        ({"peft_type": "LOHA", "r": 0}, "wrong value of 'lora.r'"),
        ({"peft_type": "LOKR", "module_dropout": 0.1}, "'module_dropout' is refused"),
        ({"peft_type": "OFT", "r": 4}, "OFT needs one of 'r' and 'oft_block_size'"),
        ({"peft_type": "OFT", "coft": True}, "constrained OFT changes its own weights"),
        ({"peft_type": "VERA", "save_projection": True}, "'save_projection' is refused"),
        ({"peft_type": "VERA", "bias": "all"}, "'bias' is refused"),
        ({"peft_type": "BOFT"}, "peft_type 'BOFT' is refused"),
        ({"peft_type": "ADALORA"}, "AdaLoRA needs 'total_step'"),
        ({"peft_type": "ADALORA", "total_step": 9, "tinit": 5, "tfinal": 4}, "no step between"),
        ({"peft_type": "ADALORA", "total_step": 9, "target_r": 12}, "'target_r' below 'init_r'"),
        ({"peft_type": "ADALORA", "total_step": 9, "r": 4}, "begins with 'init_r'"),
        ({"peft_type": "ADALORA", "total_step": 9, "use_dora": True}, "'use_dora' is refused"),
        ({"peft_type": "SOMETHING"}, "'peft_type' is refused"),
    ],
)
def test_what_a_kind_does_not_take_is_refused(lora, said):
    """In one sentence, from the job alone."""
    with pytest.raises(JobError) as told:
        Job(name="a", base={"model": "m"}, lora=lora, data={"path": "x"})

    assert said in str(told.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "dpo"}, "not at hand under IA3"),
        ({"optim": "muon"}, "IA3 trains vectors"),
        ({"optim": "lorafa"}, "IA3 has none"),
        ({"loraplus_lr_ratio": 4.0}, "IA3 has none"),
    ],
)
def test_what_needs_lora_says_so(fields, said):
    """A method, an optimizer and a rate that read A and B."""
    with pytest.raises(JobError) as told:
        Job(name="a", base={"model": "m"}, lora={"peft_type": "IA3"}, data={"path": "x"}, **fields)

    assert said in str(told.value)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], "3", {"embed_tokens": 3}])
def test_what_are_no_token_ids_is_refused(ids):
    """Before anything loads."""
    with pytest.raises(JobError, match="wrong value of 'trainable_token_indices'"):
        Job(
            name="a",
            base={"model": "m"},
            lora={"trainable_token_indices": ids},
            data={"path": "x"},
        )


@pytest.mark.parametrize(
    ("ids", "tied", "said"),
    [
        ([53], True, "token 53 of 53 in model.embed_tokens"),
        ([53], False, "token 53 of 53 in model.embed_tokens"),
        ({"lm_head": [1]}, False, "lm_head"),
    ],
)
def test_tokens_that_no_embedding_has_are_refused(tmp_path, ids, tied, said):
    """They are named by an embedding, and lie in it."""
    spec = tiny_base(tmp_path, tie_word_embeddings=tied)
    lora = {"target_modules": ["q_proj"], "trainable_token_indices": ids}
    job = Job(name="a", base=spec, lora=lora, data={"path": "x"})

    with pytest.raises(UnknownTarget) as told:
        resolve_sites(job, load_backbone(spec))

    assert said in str(told.value)
    assert told.value.facts["job"] == "a"


@pytest.mark.parametrize(
    "lora",
    [{"peft_type": "OFT"}, {"trainable_token_indices": [1]}],
)
def test_what_is_not_cut_into_pieces_is_refused_under_tp(lora):
    """Such a branch reads whole matrices of the base."""
    halved = dataclasses.replace(Mesh.alone("cpu"), shape=MeshShape(tp=2))
    job = Job(name="a", base={"model": "m"}, lora=lora, data={"path": "x"})

    with pytest.raises(NotElementwise, match="tp=2"):
        require_elementwise([job], halved)


def test_ranks_that_move_between_all_modules_are_refused_in_a_pipeline():
    """A stage has some modules alone."""
    staged = dataclasses.replace(Mesh.alone("cpu"), shape=MeshShape(pp=2))
    lora = {"peft_type": "ADALORA", "total_step": 9}
    job = Job(name="a", base={"model": "m"}, lora=lora, data={"path": "x"})

    with pytest.raises(NotElementwise, match="pp=2"):
        require_elementwise([job], staged)
