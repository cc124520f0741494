"""Jobs answer prompts, after training and meanwhile, as transformers does with a PEFT adapter."""

from __future__ import annotations

import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer

from tests.runtime.conftest import UNMARKED
from tests.runtime.groups import READING, make_job, tiny_base
from tlora_fx.cli import main
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import GenerationError, JobError
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.runtime.generation import (
    AdapterGenerator,
    AdapterWeights,
    Prompt,
    PromptAnswerer,
    SamplingOptions,
)
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer, TrainerCallback

PROMPTS = ["1+1=", "a b c x y z", "?"]
LORA = {
    "a": {"r": 4, "target_modules": "all-linear"},
    "b.2": {"r": 2},
    "dora": {"r": 2, "use_dora": True},
    "bias": {"r": 2, "bias": "all"},
}


class Listen(TrainerCallback):
    """Keeps what jobs say, and warnings."""

    def __init__(self):
        self.reports, self.texts = [], []

    def sampled(self, report):
        self.reports.append(report)

    def warned(self, text):
        self.texts.append(text)


def jobs_on(folder, base, kinds=LORA, **fields):
    data = make_job(base, "x").data.model_copy(update={"path": str(folder / "data.jsonl")})
    fields = {"max_steps": 4, "learning_rate": 0.1} | fields
    return [
        make_job(base, name, lora=lora, **fields).model_copy(update={"data": data})
        for name, lora in kinds.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tokenizer):
    """A base with a tokenizer, and some data."""
    folder = tmp_path_factory.mktemp("generation")
    tiny_base(folder / "base", **READING)
    make_tokenizer(UNMARKED, adds_bos=True).save_pretrained(folder / "base")
    texts = ({"text": "1+1=2"}, {"text": "a b c"}, {"text": "2+2=?"}, {"text": "x=2"})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


@pytest.fixture(scope="module")
def base(folder):
    return BaseSpec(config=folder / "base", dtype="float64", seed=7)


@pytest.fixture(scope="module")
def trained(folder, base):
    """Four jobs that answer after steps 2 and 4; what was heard, and the run's folder."""
    listen = Listen()
    jobs = jobs_on(folder, base, sample_prompts=PROMPTS, sample_steps=2, sample_max_new_tokens=6)
    # An answer of another length is another batch, before those of the others.
    jobs[2] = jobs[2].model_copy(update={"sample_max_new_tokens": 3})
    trainer = Trainer(compile(jobs), output=folder / "run", device="cpu", callback=listen)
    trainer.run()
    return folder / "run", listen, trainer


def by_transformers(run, base, name, prompt, tokens=6):
    """What transformers generates with the adapter folder, one prompt alone."""
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(run / name)
    model = PeftModel.from_pretrained(plain_base(load_backbone(base)), run / name).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def test_what_jobs_say_is_what_transformers_generates_with_each_adapter(trained, base):
    """Greedy, several jobs and prompts of other lengths in one call, against one at a time."""
    run, _, _ = trained
    generator = AdapterGenerator.of_folders({name: run / name for name in LORA}, "cpu")
    asked = [(name, prompt) for prompt in PROMPTS for name in LORA]
    said = generator.answers(
        [Prompt(name, generator.encode(prompt)) for name, prompt in asked], SamplingOptions(6)
    )

    assert said == [by_transformers(run, base, name, prompt) for name, prompt in asked]
    assert len(set(said)) > 3


def test_adapters_on_parameters_are_asked_one_by_one():
    """PEFT mixes none in a batch."""
    names = {"target_modules": ["q_proj"]}

    assert AdapterWeights(LoraConfig(**names), {}).can_be_mixed
    assert not AdapterWeights(
        LoraConfig(**names, target_parameters=["gate.weight"]), {}
    ).can_be_mixed


def test_a_long_question_does_not_shorten_the_answers_to_others(trained, base):
    """The base has 64 positions, of which the first question leaves three."""
    run, _, _ = trained
    generator = AdapterGenerator.of_folders({name: run / name for name in ("a", "b.2")}, "cpu")
    short = generator.encode(PROMPTS[0])
    long = short + [short[-1]] * (61 - len(short))

    said = generator.answers([Prompt("a", long), Prompt("b.2", short)], SamplingOptions(6))

    assert said[1] == by_transformers(run, base, "b.2", PROMPTS[0])
    assert said[0] == generator.answers([Prompt("a", long)], SamplingOptions(3))[0]


def test_jobs_of_adalora_are_asked_one_by_one(folder, base):
    """Two of them and a job with LoRA in one call answer as transformers does with each."""
    ada = {"peft_type": "ADALORA", "total_step": 4, "target_modules": ["q_proj", "v_proj"]}
    kinds = {
        "one": {**ada, "init_r": 3, "target_r": 2},
        "other": {**ada, "init_r": 4, "target_r": 2},
        "plain": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    }
    run = folder / "adalora"
    Trainer(compile(jobs_on(folder, base, kinds)), output=run, device="cpu").run()
    generator = AdapterGenerator.of_folders({name: run / name for name in kinds}, "cpu")

    said = generator.answers(
        [Prompt(name, generator.encode(PROMPTS[0])) for name in kinds], SamplingOptions(6)
    )

    assert said == [by_transformers(run, base, name, PROMPTS[0]) for name in kinds]


def test_samples_of_the_last_step_are_what_the_saved_adapters_say(trained, base):
    """They are heard, and stand in the metrics beside the step's line."""
    run, listen, _ = trained
    last = {report.job: report for report in listen.reports if report.step == 4}

    assert [report.step for report in listen.reports] == [2] * 4 + [4] * 4
    assert sorted(last) == sorted(LORA)
    for name, report in last.items():
        most = 3 if name == "dora" else 6
        expected = [(prompt, by_transformers(run, base, name, prompt, most)) for prompt in PROMPTS]
        told = [
            row["samples"] for row in read_metrics(run / name / "metrics.jsonl") if "samples" in row
        ]
        assert list(report.texts) == expected
        assert [(each["prompt"], each["completion"]) for each in told[-1]] == expected


def test_sampling_changes_no_bit_of_training(trained, folder, base):
    """Losses and adapters are those of a run that asks nothing."""
    run, _, trainer = trained
    silent = Trainer(compile(jobs_on(folder, base)), output=folder / "silent", device="cpu")
    silent.run()

    for name in LORA:
        mine, theirs = (each.model.job_parameters(name) for each in (trainer, silent))
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        told = [
            [row["loss"] for row in read_metrics(at / name / "metrics.jsonl") if "loss" in row]
            for at in (run, folder / "silent")
        ]
        assert told[0] == told[1]


def test_samples_are_drawn_on_the_tensors_that_train(trained):
    """No matrix of the base is held twice."""
    from tlora_fx.runtime.generation import resident_base

    model = trained[2].model
    held = resident_base(model)

    for name, parameter in held.named_parameters():
        assert parameter.data_ptr() == model.base_tensor_or_value(name).data_ptr()


def test_conversations_are_asked_by_the_chat_template(trained):
    """A prompt is the user's turn, and the assistant's is begun."""
    run, _, _ = trained
    generator = AdapterGenerator.of_folders({"a": run / "a"}, "cpu")
    ids = generator.encode([{"role": "user", "content": "1+1"}])

    assert generator.tokenizer.decode(ids).replace(" ", "") == "<|user|>1+1<|assistant|>"


def test_a_prompt_that_begins_with_the_start_token_gets_no_second_one(trained):
    """A prompt may be what a chat template wrote."""
    run, _, _ = trained
    speakers = AdapterGenerator.of_folders({"a": run / "a"}, "cpu")

    assert speakers.encode("<s>1+1") == speakers.encode("1+1")


def test_a_prompt_without_room_costs_its_samples_and_not_the_run(folder, base):
    """It is told, and the job is done."""
    listen = Listen()
    job = jobs_on(folder, base, sample_prompts=["a" * 70], sample_steps=4)[0]
    [run] = Trainer(compile([job]), output=folder / "long", device="cpu", callback=listen).run()

    assert run.status == "done"
    assert [text for text in listen.texts if "leaves no room for an answer" in text]
    assert listen.reports == []


def test_a_prompt_without_room_costs_no_other_prompt_its_answer(folder, base, trained):
    """Neither one of the same job nor a neighbour's; what is left out is told once."""
    listen = Listen()
    jobs = jobs_on(folder, base, sample_prompts=PROMPTS, sample_steps=2, sample_max_new_tokens=6)
    jobs[0] = jobs[0].model_copy(update={"sample_prompts": ["a " * 70, *PROMPTS]})
    jobs[1] = jobs[1].model_copy(update={"sample_prompts": ["b" * 70]})
    jobs[2] = jobs[2].model_copy(update={"sample_max_new_tokens": 3})
    Trainer(compile(jobs), output=folder / "one-long", device="cpu", callback=listen).run()

    expected = [each for each in trained[1].reports if each.job != "b.2"]
    assert listen.reports == expected
    told = [text.partition(": ")[0] for text in listen.texts if "no room" in text]
    assert told == [
        f"no answer of job 'a' to '{'a ' * 19}a…'",
        f"no answer of job 'b.2' to '{'b' * 39}…'",
    ]


@pytest.mark.parametrize(
    ("prompt", "told"), [("", "no tokens"), ([{"role": "robot"}], "chat template")]
)
def test_what_cannot_be_asked_is_refused(trained, prompt, told):
    """Nothing to go on from, and a message without content."""
    generator = AdapterGenerator.of_folders({"a": trained[0] / "a"}, "cpu")
    generator.tokenizer = AutoTokenizer.from_pretrained(trained[0] / "a", bos_token=None)
    if not prompt:
        with pytest.raises(GenerationError, match=told):
            generator.answers([Prompt("a", [])])
    else:
        generator.tokenizer.chat_template = None
        with pytest.raises(GenerationError, match=told):
            generator.encode(prompt)


def test_a_plan_that_holds_the_base_in_pieces_draws_no_samples(trained):
    """It says so before training, once, and what does."""
    trainer = trained[2]
    sampler = PromptAnswerer(Plan(planner="fsdp"), trainer.model)
    listen = Listen()

    sampler.warn([SimpleNamespace(sample_prompts=[])], listen)
    assert listen.texts == []
    sampler.warn([SimpleNamespace(sample_prompts=["2 + 2"])], listen)
    assert len(listen.texts) == 1
    assert not sampler.tell(trainer.runs, listen)
    assert not sampler.tell(trainer.runs, listen)
    [told] = listen.texts
    assert "the plan 'fsdp' holds the base in pieces" in told


def command(words, capsys):
    """The exit code of a command, and what it printed."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    told = capsys.readouterr()
    return end.value.code or 0, told.out, told.err


def test_generate_prints_each_answer_of_each_job(trained, capsys):
    """As lines of JSON too; by default every job answers."""
    run, listen, _ = trained
    words = ["generate", run, "--prompt", PROMPTS[0], "--max-new-tokens", 6, "--device", "cpu"]
    _, plain, _ = command([*words, "--job", "a", "--job", "b.2"], capsys)
    _, lines, _ = command([*words, "--json"], capsys)
    said = {report.job: report.texts[0][1] for report in listen.reports if report.step == 4}

    assert plain == f"a: 1+1={said['a']}\nb.2: 1+1={said['b.2']}\n"
    told = [json.loads(line) for line in lines.splitlines()]
    assert [row["job"] for row in told] == ["a", "b.2", "bias", "dora"]
    assert told[0] == {"job": "a", "prompt": "1+1=", "completion": said["a"]}


def test_a_chat_goes_on_from_what_was_said(trained, capsys, monkeypatch):
    """Each turn is answered by the whole conversation, until it begins anew."""
    run, _, _ = trained
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n\n2+2\n/new\n1+1\n/exit\nnever\n"))
    words = ["chat", run, "--job", "a", "--max-new-tokens", 4, "--device", "cpu"]
    code, out, _ = command(words, capsys)
    generator = AdapterGenerator.of_folders({"a": run / "a"}, "cpu")
    turns, said = [], []
    for text in ("1+1", "2+2"):
        turns.append({"role": "user", "content": text})
        [answer] = generator.answers([Prompt("a", generator.encode(turns))], SamplingOptions(4))
        turns.append({"role": "assistant", "content": answer})
        said.append(f"a: {answer}")

    assert code == 0
    assert out.rstrip("\n").split("\n") == [*said, said[0]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--job", "aa"], "did you mean 'a'?"),
        (["--device", "tpu"], "this machine has no device 'tpu'"),
        (["--job", "a", "--prompt", "a" * 70], "leaves no room for an answer"),
    ],
)
def test_generate_says_what_is_wrong(trained, capsys, words, told):
    """And ends with 1."""
    code, _, err = command(["generate", trained[0], "--prompt", "x", *words], capsys)

    assert code == 1
    assert told in err


def test_jobs_of_other_bases_are_not_asked_together(trained, tmp_path):
    """The one that differs is named."""
    run, _, _ = trained
    shutil.copytree(run / "a", tmp_path / "other")
    job = json.loads((run / "a" / "job.json").read_text())
    job |= {"name": "other", "base": job["base"] | {"seed": 8}}
    (tmp_path / "other" / "job.json").write_text(json.dumps(job))

    with pytest.raises(GenerationError) as caught:
        AdapterGenerator.of_folders({"a": run / "a", "other": tmp_path / "other"}, "cpu")
    assert caught.value.facts["job"] == "other"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("none", []),
        ("all", ["tensorboard", "wandb", "trackio", "mlflow"]),
        ("wandb", ["wandb"]),
        (["mlflow", "wandb"], ["mlflow", "wandb"]),
    ],
)
def test_trackers_are_named_as_in_transformers(base, given, taken):
    """One, several, all or none."""
    assert make_job(base, "a", report_to=given).report_to == taken


def test_a_tracker_that_does_not_exist_is_refused(base):
    """With those that do."""
    with pytest.raises(JobError, match="tensorboard"):
        make_job(base, "a", report_to="tensorbord")
