"""`next_task`, the files, and what compiling checks."""

import peft
import pytest
import safetensors.torch
import torch
from conftest import JOBS, PREFIX, job_of
from tlora_fx_sd_lora.spec import SDLoRASpec
from tlora_fx_sd_lora.tasks import direction_norm
from tlora_fx_sd_lora.tuner import SDLoRAConfig

import tlora_fx
from tlora_fx.errors import JobError
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import plain_base


def merged(base, folder):
    """The base's weights with an adapter of PEFT's loading merged into them."""
    model = peft.PeftModel.from_pretrained(plain_base(load_backbone(base)), folder)
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize("name", JOBS)
def test_the_next_task_starts_from_what_was_saved(sequence, name):
    """The trainer's start is the folder's tensors, bitwise."""
    saved = safetensors.torch.load_file(sequence[1][name] / "adapter_model.safetensors")
    starts = sequence[2].starts[name]

    assert saved.keys() == starts.keys()
    assert all(torch.equal(tensor, starts[key]) for key, tensor in saved.items())


@pytest.mark.parametrize("name", JOBS)
def test_a_new_task_changes_no_weight(base, sequence, name):
    """All merged weights are as the task before left them; PEFT loads both folders."""
    before, after = merged(base, sequence[0].folder / name), merged(base, sequence[1][name])
    untouched = plain_base(load_backbone(base)).state_dict()

    assert any((before[key] - untouched[key]).abs().max() > 1e-3 for key in before)
    for key, weight in before.items():
        torch.testing.assert_close(after[key], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", JOBS)
def test_directions_have_norm_one(sequence, name):
    """And their magnitudes are the norms that they had."""
    first, starts = sequence[0].ends[name], sequence[2].starts[name]
    for key in [key for key in starts if key.endswith("_earlier_A")]:
        site = key.removesuffix("earlier_A")
        product = starts[site + "earlier_B"] @ starts[key]
        learned = first[site + "magnitudes"] * first[site + "B"] @ first[site + "A"]

        assert float(product.norm()) == pytest.approx(1, rel=1e-9)
        assert float(starts[site + "magnitudes"][0]) == pytest.approx(float(learned.norm()))


def test_a_norm_is_that_of_the_whole_product():
    """Without making it."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 11, generator=draw), torch.randn(7, 3, generator=draw)

    torch.testing.assert_close(direction_norm(a, b), torch.linalg.matrix_norm(b @ a))


def test_numbers_are_verified_and_the_model_is_probed(base, sequence):
    """In the second task, beside a LoRA job: against the untouched base under PEFT."""
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    jobs = [job_of(base, name, 1, sequence[1][name]) for name in JOBS]
    jobs.append(tlora_fx.Job(name="plain", base=base, lora=lora, data={"path": "x.jsonl"}))

    model = tlora_fx.compile(jobs, verify="numerics")

    ranks = {job.name: job.lora_fields.get("earlier_ranks") for job in model.jobs}
    assert ranks == {"left": [4], "right": [2], "plain": None}


def test_frozen_directions_are_probed_too(base):
    """In float32, where a row's numbers are compared with PEFT's module beside the base."""
    single = base.model_copy(update={"dtype": "float32"})
    lora = {"peft_type": "SDLORA", "r": 2, "earlier_ranks": [3, 1], "target_modules": ["v_proj"]}
    jobs = [
        tlora_fx.Job(name=name, base=single, lora=lora, data={"path": "x.jsonl"}) for name in JOBS
    ]

    model = tlora_fx.compile(jobs)

    assert model.group.form == "packed"
    assert not [note for stage, note in model.group.notes if stage == "probe"]


def test_a_job_names_what_peft_has():
    """Fields and their defaults are those of the config's class."""
    fields = SDLoRAConfig().to_dict()

    for name, field in SDLoRASpec.model_fields.items():
        if name != "peft_type":
            assert fields[name] == field.default


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"lora_alpha": 8}, "unknown key 'lora_alpha' in 'lora' of the kind SDLoRA"),
        ({"r": 0}, "wrong value of 'lora.r'"),
        ({"earlier_ranks": [0]}, "wrong value of 'lora.earlier_ranks"),
    ],
)
def test_what_it_does_not_take_is_refused(base, field, said):
    """As of any kind."""
    with pytest.raises(JobError) as told:
        tlora_fx.Job(
            name="a", base=base, lora={"peft_type": "sdlora", **field}, data={"path": "x.jsonl"}
        )

    assert said in str(told.value)


def test_its_parts_are_where_a_folder_has_them(sequence):
    """By PEFT's names, without the adapter's."""
    parts = {key.rpartition(".")[2] for key in sequence[2].ends["left"]}

    assert all(key.startswith(PREFIX) for key in sequence[2].ends["left"])
    assert parts == {
        "sdlora_A", "sdlora_B", "sdlora_magnitudes", "sdlora_earlier_A", "sdlora_earlier_B",
    }  # fmt: skip
