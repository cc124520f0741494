"""What Python hands over trains as the same job in a job file does, and stays as it is."""

from __future__ import annotations

import copy

import datasets
import pandas
import peft
import pytest
import torch
import transformers

from tests.api.bases import (
    LORA,
    ROWS,
    SHORT,
    TOKENIZER,
    adapter,
    assert_same,
    from_file,
    loaded,
    save_base,
)
from tlora_fx import Job, Trainer, TrainerCallback, compile, train
from tlora_fx.errors import (
    BaseRefused,
    DataError,
    DeviceUnknown,
    JobError,
    JobsDiffer,
    MalformedRowError,
    RunFolderError,
    TloraError,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="module")
def filed(base, tmp_path_factory):
    """The job that all others equal, with its data in a file."""
    return from_file(tmp_path_factory.mktemp("filed"), base, eval_split=0.2, eval_steps=2)


def trained(folder, **arguments):
    given = {"lora": peft.LoraConfig(**LORA), "data": ROWS, **SHORT}
    job = Job("a", **given | arguments)
    return train([job], output=folder / "run", device="cpu", verbose=False)


OBJECTS = {
    "rows and a path": lambda base: {"base": {"model": str(base), "dtype": "float64"}},
    "a Dataset and a model": lambda base: {
        "base": loaded(base),
        "data": datasets.Dataset.from_list(ROWS),
    },
    "a tokenizer": lambda base: {
        "base": loaded(base),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(TOKENIZER),
    },
    "evaluation and rank": lambda base: {"base": loaded(base), "lora": LORA},
}


@pytest.mark.parametrize("objects", OBJECTS)
def test_objects_train_as_the_job_file_does(objects, base, filed, tmp_path):
    """Losses, evaluations and adapters are bitwise those of the same job in files."""
    found = trained(tmp_path, **OBJECTS[objects](base), eval_split=0.2, eval_steps=2)

    assert_same(found, filed)


def test_evaluation_rows_are_those_of_a_file(base, tmp_path):
    """`eval_data` takes what `data` takes."""
    (tmp_path / "eval.json").write_text(str(ROWS[:5]).replace("'", '"'))
    eval_data = {"path": "eval.json"}
    expected = from_file(tmp_path, base, eval_data=eval_data, eval_steps=2)
    found = trained(
        tmp_path, base=loaded(base), eval_data=datasets.Dataset.from_list(ROWS[:5]), eval_steps=2
    )

    assert_same(found, expected)


def test_a_stream_is_read_as_far_as_the_steps_need(base, tmp_path):
    """Of an endless IterableDataset as many rows are read as four batches of two take."""

    def endless():
        while True:
            yield from ROWS

    batch = {"per_device_train_batch_size": 2}
    expected = from_file(tmp_path, base, ROWS[:8], **batch)
    stream = datasets.IterableDataset.from_generator(endless)

    assert_same(trained(tmp_path, base=loaded(base), data=stream, **batch), expected)


def test_messages_of_a_dataset_are_those_of_a_file(base, tmp_path):
    """Columns of objects, whose missing keys Arrow fills with null."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"], "weight": 1},
            ]
        }
        for row in ROWS
    ]
    expected = from_file(tmp_path, base, rows)

    assert_same(
        trained(tmp_path, base=loaded(base), data=datasets.Dataset.from_list(rows)), expected
    )


def state_of(module):
    """All that training might change of a module."""
    return (
        [(name, id(p), p.data_ptr(), p.requires_grad, p.grad) for name, p in named(module)],
        [part.training for part in module.modules()],
        [dict(part._forward_hooks) for part in module.modules()],
        copy.deepcopy(module.config.to_dict()),
        module.config._attn_implementation,
        {name: tensor.clone() for name, tensor in module.state_dict().items()},
    )


def named(module):
    return [*module.named_parameters(), *module.named_buffers()]


def assert_unchanged(before, after):
    assert before[:-1] == after[:-1]
    assert all(torch.equal(before[-1][name], after[-1][name]) for name in before[-1])


def prepared(base):
    """A model in the middle of somebody's work: frozen in part, in eval mode, with hooks."""
    model = loaded(base).eval()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].train()
    model.enable_input_require_grads()
    seen = []
    model.model.norm.register_forward_hook(lambda module, given, result: seen.append(1))
    return model


def test_a_model_is_given_back_as_it_was(base, tmp_path):
    """Parameters, their gradients' switches, modes, hooks and config; the result shares weights."""
    model = prepared(base)
    before = state_of(model)
    found = trained(tmp_path, base=model)
    assert_unchanged(before, state_of(model))

    adapted = found["a"].peft_model()

    assert_unchanged(before, state_of(model))
    shared = {p.data_ptr() for p in model.parameters()}
    assert shared <= {p.data_ptr() for p in adapted.parameters()}


def test_a_model_is_given_back_after_an_error(base, tmp_path):
    """Bad rows, and a callback that stops the run in the middle of it."""
    model = prepared(base)
    before = state_of(model)

    class Stops(TrainerCallback):
        def stepped(self, report):
            raise KeyboardInterrupt

    with pytest.raises(DataError):
        trained(tmp_path, base=model, data=[{"prompt": "a"}])
    job = Job("a", base=model, lora=LORA, data=ROWS, **SHORT)
    with pytest.raises(KeyboardInterrupt):
        train(job, output=tmp_path / "two", device="cpu", verbose=False, callbacks=[Stops()])

    assert_unchanged(before, state_of(model))


def test_the_weights_of_a_model_are_in_memory_once(base, tmp_path):
    """What trains reads the memory of the model that was handed over."""
    module = loaded(base)
    job = Job("a", base=module, lora={"r": 4, "target_modules": "all-linear"}, data=ROWS, **SHORT)
    model = compile(job)
    Trainer(model, job, output=tmp_path / "run", device="cpu").run()

    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    read = {tensor.untyped_storage().data_ptr() for _, tensor in named(model)}
    assert own <= read


def test_a_model_that_accelerate_moves_is_refused(base, tmp_path):
    """Its modules are replaced by others while it runs."""
    module = loaded(base)
    module.model.norm._hf_hook = object()

    with pytest.raises(BaseRefused, match="device_map"):
        trained(tmp_path, base=module)


def test_the_weights_of_a_model_are_those_that_train(base, tmp_path):
    """A base that was changed in memory trains as it is, not as its folder has it."""
    model = loaded(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "changed")
    transformers.AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "changed")
    expected = from_file(tmp_path, tmp_path / "changed")

    assert_same(trained(tmp_path, base=model), expected)


def test_the_result_is_a_table(base, tmp_path):
    """One row for each job, as text, as a page's table and as a DataFrame."""
    model = loaded(base)
    jobs = [
        Job("a", base=model, lora=4, data=ROWS, eval_split=0.2, eval_steps=2, **SHORT),
        Job("b", base=model, lora=2, data=ROWS, max_steps=2),
    ]
    found = train(jobs, output=tmp_path / "run", device="cpu", verbose=False)

    table = found.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["steps"].tolist() == [4, 2]
    assert table["status"].tolist() == ["done", "done"]
    assert list(found) == ["a", "b"]
    a = found["a"]
    assert a.best == min(each["eval_loss"] for each in a.evaluations)
    assert (a.metric, len(a.losses), len(a.evaluations)) == ("eval_loss", 4, 2)
    assert a.tokens > 0
    assert a.seconds > 0
    assert found["b"].best is None
    assert table["lora.r"].tolist() == [4, 2]
    assert table["max_steps"].tolist() == [4, 2]
    assert str(found).splitlines()[2].split()[:4] == ["b", "done", "2", "2"]
    found.to_csv(tmp_path / "table.csv")
    assert pandas.read_csv(tmp_path / "table.csv")["loss"].tolist() == table["loss"].tolist()
    assert "<td>done</td>" in found._repr_html_()


def test_the_adapter_is_a_model_of_peft(base, tmp_path, tokenizer):
    """Its tensors are those of the folder, and PEFT's logits are what a loaded folder has."""
    found = trained(tmp_path, base={"model": str(base), "dtype": "float64"})
    adapted = found["a"].peft_model()
    ids = tokenizer("3 + 4 =", return_tensors="pt").input_ids

    again = peft.PeftModel.from_pretrained(loaded(base), found["a"].adapter).eval()
    assert torch.equal(adapted(ids).logits, again(ids).logits)


def test_a_failed_job_is_a_row(base, tmp_path):
    """Its neighbour trains on, and the reason stands in the table's row."""
    model = loaded(base, torch.float32)
    jobs = [
        Job("a", base=model, lora=LORA, data=ROWS, **SHORT),
        Job("b", base=model, lora=LORA | {"lora_alpha": 1e38}, data=ROWS, max_steps=4),
    ]
    found = train(jobs, output=tmp_path / "run", device="cpu", verbose=False)

    assert [result.status for result in found.values()] == ["done", "failed"]
    assert "not finite" in found["b"].reason or "loss" in found["b"].reason


def test_verbose_false_says_nothing(base, tmp_path, capfd):
    """Neither progress nor warnings are printed; warnings are kept."""
    model = loaded(base)
    capfd.readouterr()
    found = train(
        Job("a", base=model, lora=LORA, data=ROWS, max_steps=1, learning_rate=2.0),
        output=tmp_path / "run", device="cpu", verbose=False,
    )  # fmt: skip

    assert capfd.readouterr() == ("", "")
    assert "learning_rate 2" in found.warnings[0]


def test_a_key_that_fits_no_module_is_warned_of(base, tmp_path):
    """Its rank is nobody's."""
    lora = LORA | {"rank_pattern": {"q_prj": 8}}
    found = train(
        Job("a", base=loaded(base), lora=lora, data=ROWS, max_steps=1),
        output=tmp_path / "run", device="cpu", verbose=False,
    )  # fmt: skip

    warning = "job 'a': 'q_prj' in rank_pattern fits no adapted module, so it changes nothing"
    assert found.warnings == (warning,)


def test_progress_is_told(base, tmp_path, capfd):
    """By default the data and each job's end are told."""
    train(Job("a", base=loaded(base), lora=LORA, data=ROWS, **SHORT), output=tmp_path / "run")

    said = capfd.readouterr().err
    assert "a: 25 samples" in said
    assert "a: done after 4 steps" in said


def test_a_run_goes_on_from_its_checkpoint(base, filed, tmp_path):
    """Stopped after two steps and resumed, it is the run that never stopped."""
    model = loaded(base)
    job = Job("a", base=model, lora=LORA, data=ROWS, eval_split=0.2, eval_steps=2, **SHORT)

    class Stops(TrainerCallback):
        def stepped(self, report):
            if report.step == 2:
                import signal

                signal.raise_signal(signal.SIGINT)

    run = {"output": tmp_path / "run", "device": "cpu", "verbose": False}
    with pytest.raises(KeyboardInterrupt):
        train([job], **run, callbacks=[Stops()])

    assert_same(train([job], **run, resume=True), filed)


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (lambda job, at: train(job, output=at), RunFolderError, "folder with output=..."),
        (lambda job, at: train(job, output=at / "no", resume=True), RunFolderError, "resume=True"),
        (lambda job, at: train(job(data=[{"x": 1}]), output=at / "n"), TloraError, "column"),
    ],
)
def test_errors_speak_of_arguments(act, error, said, base, tmp_path):
    """No option of the command line is named."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")

    def job(**fields):
        return Job("a", **{"base": str(base), "lora": LORA, "data": ROWS} | fields)

    with pytest.raises(error) as caught:
        act(job if "data" in said or said == "column" else job(), tmp_path / "full")

    text = str(caught.value)
    assert said in text
    assert not any(word in text for word in ("-o ", "--", "YAML", "job file"))


@pytest.mark.parametrize("jobs", [None, 3, {"name": "a"}, [{"name": "a"}]])
def test_what_is_no_job_is_refused(jobs, tmp_path):
    """A dict of a job file's keys, and nothing at all."""
    with pytest.raises(JobError, match=r"a job is no tlora_fx\.Job"):
        train(jobs, output=tmp_path / "run", verbose=False)


@pytest.mark.parametrize(
    "callbacks", [TrainerCallback(), [TrainerCallback], [lambda report: None], None]
)
def test_what_hears_of_nothing_is_refused(base, callbacks, tmp_path):
    """One alone, a class, a function: each would hear nothing, or fail at the first step."""
    job = Job("a", base=loaded(base), lora=4, data=ROWS, max_steps=1)

    with pytest.raises(JobError, match=r"train\(callbacks=...\): it is no list of callbacks"):
        train(job, output=tmp_path / "run", verbose=False, callbacks=callbacks)


def test_an_unreadable_row_names_its_number(base, tmp_path):
    """The second of three rows."""
    with pytest.raises(DataError, match="<list>: row 2"):
        trained(tmp_path, base=loaded(base), data=[ROWS[0], "no row", ROWS[1]])


@pytest.mark.parametrize("as_rows", [list, datasets.Dataset.from_list])
@pytest.mark.parametrize("part", ["data", "eval_data"])
def test_a_row_that_cannot_be_used_is_told_before_anything_is_traced(
    base, tmp_path, monkeypatch, as_rows, part
):
    """Also of the rows that a job is evaluated on; a model is traced for seconds."""
    monkeypatch.setattr("tlora_fx.api.train.compile", lambda jobs: pytest.fail("it is compiled"))
    rows = [{"text": "a"}, {"text": None}]
    job = Job(
        "a", base=str(base), lora=2, **{"data": [{"text": "a"}], part: as_rows(rows)}, max_steps=1
    )

    with pytest.raises(MalformedRowError, match="no value in the column 'text'"):
        train(job, output=tmp_path / "run")


def test_one_plain_module_trains(tmp_path):
    """An nn.Module of its user's own, from ids to logits, with a tokenizer beside it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(len(tokenizer), 8)
            self.out = torch.nn.Linear(8, len(tokenizer))

        def forward(self, ids):
            return self.out(self.embed(ids))

    module = Small()
    lora = {"r": 2, "target_modules": ["out"]}
    found = trained(
        tmp_path, base=module, tokenizer=tokenizer, lora=lora, max_steps=30, learning_rate=5e-2
    )

    assert found["a"].losses[-1] < found["a"].losses[0]
    with pytest.raises(TloraError, match="Module that does not say"):
        trained(tmp_path / "two", base=module, lora={"r": 2, "target_modules": ["out"]})


def test_a_sequential_trains_as_a_module_with_names(tmp_path, tokenizer):
    """Its parts are called 0 and 1, which are no names in Python."""
    parts = torch.nn.Embedding(len(tokenizer), 8), torch.nn.Linear(8, len(tokenizer))

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = parts

        def forward(self, ids):
            return self.out(self.embed(ids))

    bases = {"out": Named(), "1": torch.nn.Sequential(*parts)}
    named, numbered = (
        trained(
            tmp_path / name, base=base, tokenizer=tokenizer, max_steps=20, learning_rate=5e-2,
            lora={"r": 2, "target_modules": [name]},
        )["a"].losses
        for name, base in bases.items()
    )  # fmt: skip

    assert numbered[0] == pytest.approx(named[0], rel=1e-6)
    assert numbered[-1] < numbered[0]


def test_two_copies_of_one_model_are_no_base(base):
    """They may have other weights; the error says that objects are compared."""
    jobs = [Job(name, base=loaded(base), lora=2, data=ROWS) for name in "ab"]
    with pytest.raises(JobsDiffer, match="give all jobs the same object"):
        compile(jobs)


def test_a_task_of_another_kind_is_refused(base):
    """A language model gives logits of tokens."""
    with pytest.raises(JobError, match=r"Job\(base=...\)"):
        Job("a", base={"module": loaded(base), "task": "SEQ_CLS", "labels": 2}, lora=4, data=ROWS)


def test_adapters_differ_by_data(base, tmp_path):
    """The comparison of these tests sees other rows."""
    one = trained(tmp_path / "one", base=loaded(base))
    two = trained(tmp_path / "two", base=loaded(base), data=ROWS[:-1])

    assert any(not torch.equal(adapter(one)[name], adapter(two)[name]) for name in adapter(one))


@pytest.mark.parametrize(
    ("argument", "wrong", "expected"),
    [("lora", "8", "a LoraConfig, a rank, or a dict"), ("base", 12, "a model, or a dict")],
)
def test_a_wrong_object_is_told_which_ones_are_right(argument, wrong, expected):
    """A dict, as of a job file, is the last that a script would hand over."""
    given = {"base": "someone/base", "lora": 2, "data": ROWS} | {argument: wrong}

    with pytest.raises(JobError, match=expected):
        Job("a", **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device")
def test_a_device_that_is_not_there_is_refused(base, tmp_path):
    """Also of a model that was handed over, which torch would move there."""
    with pytest.raises(DeviceUnknown, match="no device 'cuda'"):
        train(
            Job("a", base=loaded(base), data=ROWS, lora=2, max_steps=1),
            output=tmp_path / "run",
            device="cuda",
            verbose=False,
        )
