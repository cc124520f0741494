"""Starts that are made of a job's data: PEFT's own, from the plain base and the same batches."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda

from tests.alone import train_alone
from tests.parallel.processes import run_processes
from tests.runtime.elastic import Watch
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile, resolve_pipeline
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import JobError, NotElementwise, StartNotComputed, SuperModelMisuse
from tlora_fx.inspect.dump import dump
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.backbone import load_backbone
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime import compiled_folder, data_starts
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base, start_adapters
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.data_starts import data_start, first_samples
from tlora_fx.runtime.distributed import require_elementwise
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import adapter_difference

EVA = {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}}
CORDA = {"init_lora_weights": "corda"}
KINDS: dict[str, dict[str, Any]] = {
    "eva": EVA | {"target_modules": "all-linear", "use_rslora": True},
    "whitened": {
        "init_lora_weights": "eva",
        "eva_config": {"rho": 1.0, "whiten": True, "use_label_mask": False, "tau": 0.9},
    },
    "corda": CORDA | {"r": 3, "target_modules": "all-linear", "rank_pattern": {"v_proj": 2}},
    "kpm": CORDA | {"corda_config": {"corda_method": "kpm"}, "use_rslora": True},
}
STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseSpec:
    return tiny_base(tmp_path_factory.mktemp("base"), dtype="float32")


def jobs_of(base: BaseSpec) -> dict[str, Job]:
    """A job of each kind, and one that starts as PEFT's do by default."""
    made = [
        make_job(base, name, seed=seed, lora=lora)
        for seed, (name, lora) in enumerate(KINDS.items())
    ]
    return {job.name: job for job in [*made, make_job(base, "plain", seed=9)]}


def data_of(*jobs: Job) -> Any:
    """Enough samples for more than one batch of EVA's."""
    return make_data(jobs, longest=14, count=23)


class Noting(Trainer):
    """Notes what each job starts from."""

    def prepare(self, data: Any) -> None:
        """As every trainer does."""
        super().prepare(data)
        self.starts = {run.job.name: adapter_tensors(run.parameters) for run in self.runs}


def started(job: Job, data: Any) -> dict[str, torch.Tensor]:
    """What one job in a model of its own begins with, by names of PEFT's files."""
    model = compile([job])
    trainer = Trainer(model, output=None, device="cpu")
    trainer.prepare({job.name: data})
    return adapter_tensors(model.job_parameters(job.name))


def batch_of(samples: Any, *, labels: bool = True) -> dict[str, torch.Tensor]:
    """Samples padded on the right, as a user of PEFT does it."""
    pad = torch.nn.utils.rnn.pad_sequence
    rows = [torch.tensor(sample.input_ids) for sample in samples]
    batch = {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }
    targets = [torch.tensor(sample.labels) for sample in samples]
    given = pad(targets, batch_first=True, padding_value=-100)
    return batch | {"labels": given} if labels else batch


def training_order(job: Job, data: Any) -> list[Any]:
    """A job's samples as its first epoch takes them."""
    steps = range(data.steps_per_epoch)
    return [sample for step in steps for batch in data.step(step) for sample in batch]


def eva_of_peft(
    job: Job, plain: torch.nn.Module, samples: Any, *, labels: bool = True
) -> dict[str, torch.Tensor]:
    """The start by `initialize_lora_eva_weights`: four samples a batch, the rest in the last."""
    edges = [*range(0, len(samples) - 3, 4)]
    cuts = zip(edges, [*edges[1:], len(samples)], strict=True)
    batches = [batch_of(samples[a:b], labels=labels) for a, b in cuts]
    fields = {**job.lora, "eva_config": peft.EvaConfig(**job.lora["eva_config"])}
    config = peft.LoraConfig(task_type=job.base.task, **fields)
    model: Any = peft.get_peft_model(plain, config)
    peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return peft.get_peft_model_state_dict(model)


def corda_of_peft(job: Job, plain: torch.nn.Module, samples: Any) -> Any:
    """The start by `preprocess_corda` and `get_peft_model`, and the model that PEFT leaves."""
    fields = {**job.lora, "corda_config": CordaConfig(**job.lora["corda_config"])}
    config = peft.LoraConfig(task_type=job.base.task, **fields)
    if config.target_modules == "all-linear":
        linears = (p for p, module in plain.named_modules() if isinstance(module, torch.nn.Linear))
        names = {path.rpartition(".")[2] for path in linears}
        config.target_modules = names - {"lm_head"}

    def run() -> None:
        for sample in samples:
            plain(**batch_of([sample], labels=False))

    preprocess_corda(plain, config, run_model=run)
    model: Any = peft.get_peft_model(plain, config)
    return peft.get_peft_model_state_dict(model), model


@pytest.mark.parametrize("name", ["eva", "whitened"])
def test_eva_starts_as_peft_does(base, name):
    """A and B of every module, to the last bit but few."""
    job = jobs_of(base)[name]
    data = data_of(job)[name]

    found = started(job, data)

    theirs = eva_of_peft(job, plain_base(load_backbone(base)), training_order(job, data))
    assert found.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
    assert not any(tensor.any() for key, tensor in found.items() if "lora_B" in key)


@pytest.mark.parametrize("name", ["corda", "kpm"])
def test_corda_starts_as_peft_does(base, name):
    """The trained halves are PEFT's; the constant ones take away what PEFT takes from the base."""
    job = jobs_of(base)[name]
    job = job.model_copy(update={"lora": {"corda_config": {}, **job.lora}})
    data = data_of(job)[name]

    found = started(job, data)

    plain = plain_base(load_backbone(base))
    theirs, left = corda_of_peft(job, copy.deepcopy(plain), training_order(job, data))
    assert found.keys() == theirs.keys()
    for key, tensor in theirs.items():
        twice = [tensor, tensor] if "lora_A" in key else [tensor, -tensor]
        expected = torch.cat(twice, dim=0 if "lora_A" in key else 1)
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-5)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            left.eval()(ids).logits, plain.eval()(ids).logits, rtol=1e-4, atol=1e-5
        )


def train_replicated(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """In each process of two: one job from the beginning, and one that joins; who is in at last."""
    jobs = jobs_of(BaseSpec(config=folder / "base", dtype="float32", seed=7))
    data = data_of(*jobs.values())
    model = compile([jobs["eva"]], open=OpenSlots(rows=80, jobs=4, rank=16))
    plan = find_planner("replicated").plan(model, MeshShape.parse("dp=2"))
    watch: Any = Watch([(1, "admit", jobs["kpm"], data["kpm"])])
    of_first = {"eva": data["eva"]}
    watch.trainer = Trainer(
        model, output=folder / "run", device="cpu", data=of_first, plan=plan, callback=watch
    )
    watch.trainer.run()
    sharded = compile([jobs["eva"]])
    fsdp = find_planner("fsdp").plan(sharded, MeshShape.parse("dp=2"))
    with pytest.raises(NotElementwise, match="for which a process needs the whole base"):
        Trainer(sharded, output=folder / "no", device="cpu", data=of_first, plan=fsdp).run()
    ends = {name: adapter_tensors(model.job_parameters(name)) for name in model.members}
    # Processes hand each other no tensors.
    return {n: {key: t.numpy() for key, t in tensors.items()} for n, tensors in ends.items()}


def test_replicas_have_one_start(tmp_path):
    """Bitwise, as the leader computes it; losses are those of the job alone."""
    base = tiny_base(tmp_path / "base", dtype="float32")

    first, second = run_processes(2, train_replicated, tmp_path)

    assert first.keys() == second.keys()
    for name, tensors in first.items():
        assert all((array == second[name][key]).all() for key, array in tensors.items())
    for name in ("eva", "kpm"):
        job = jobs_of(base)[name]
        Trainer(compile([job]), output=tmp_path / name, device="cpu", data=data_of(job)).run()
        expected = losses_of(tmp_path / name, [job])[name]
        assert losses_of(tmp_path / "run", [job])[name] == pytest.approx(expected, rel=1e-5)


def test_a_jobs_start_is_its_own(base, tmp_path):
    """In a group, and joining a run, it is bitwise that of the job alone; so are its losses."""
    jobs = jobs_of(base)
    data = data_of(*jobs.values())
    first = [jobs[name] for name in ("plain", "eva", "corda")]
    model = compile(first, open=OpenSlots(rows=80, jobs=6, rank=16))
    watch = Watch([(1, "admit", jobs[name], data[name]) for name in ("whitened", "kpm")])
    of_first = {job.name: data[job.name] for job in first}
    trainer = Noting(model, output=tmp_path / "run", device="cpu", data=of_first, callback=watch)
    watch.trainer = trainer
    trainer.run()

    for name in KINDS:
        own = {name: data[name]}
        alone = Noting(compile([jobs[name]]), output=tmp_path / name, device="cpu", data=own)
        alone.run()
        expected = losses_of(tmp_path / name, [jobs[name]])[name]
        assert losses_of(tmp_path / "run", [jobs[name]])[name] == pytest.approx(expected, rel=1e-5)
        for key, tensor in trainer.starts.get(name, {}).items():
            assert torch.equal(tensor, alone.starts[name][key])
    assert {"eva", "corda"} < trainer.starts.keys()
    assert not watch.refused


@pytest.mark.parametrize("name", list(KINDS))
def test_a_job_trains_as_peft_alone_does_and_its_folder_loads(base, tmp_path, name):
    """Losses and adapters of all steps; what is written needs no data and no other base."""
    job = jobs_of(base)[name]
    data = data_of(job)

    model = compile([job])
    trainer = Noting(model, output=tmp_path, device="cpu", data=data)
    trainer.run()

    plain = plain_base(model.backbone)
    alone = train_alone(job, plain, data[name], trainer.starts[name], STEPS, masks=False)
    assert losses_of(tmp_path, [job])[name] == pytest.approx(alone.losses, rel=1e-5)
    ends = adapter_tensors(model.job_parameters(name))
    assert adapter_difference(ends, alone.adapters) <= 1e-4
    written = json.loads((tmp_path / name / "adapter_config.json").read_text())
    assert written["init_lora_weights"] is True
    assert written["eva_config"] is None
    assert written["corda_config"] is None
    kept = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(plain, tmp_path / name))
    assert all(torch.equal(kept[key], tensor) for key, tensor in ends.items())


def test_a_resumed_job_computes_no_start(base, tmp_path, monkeypatch):
    """Its checkpoint has it; a job beside it that is new has one made."""
    jobs = [jobs_of(base)[name] for name in ("eva", "kpm")]
    constant = {"lr_scheduler_type": "constant"}
    long = [job.model_copy(update=constant) for job in jobs]
    short = [job.model_copy(update={**constant, "max_steps": 2}) for job in jobs]

    def train(these: Any, folder: Any, **options: Any) -> Any:
        compiled = compile(these)
        Trainer(compiled, output=folder, device="cpu", data=data_of(*these), **options).run()
        return compiled

    whole = train(long, tmp_path / "whole")
    train(short, tmp_path / "cut")
    monkeypatch.setattr(data_starts, "data_start", None)
    resumed = train(long, tmp_path / "cut", resume=True)
    for job in jobs:
        again = adapter_tensors(resumed.job_parameters(job.name))
        ends = adapter_tensors(whole.job_parameters(job.name))
        assert all(torch.equal(tensor, again[key]) for key, tensor in ends.items())


def test_a_base_with_conv1d_starts_as_in_peft(tmp_path):
    """GPT-2 stores its weights turned."""
    transformers.GPT2Config(
        vocab_size=53, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ).save_pretrained(tmp_path / "base")  # fmt: skip
    base = BaseSpec(config=tmp_path / "base", dtype="float32", seed=3)
    for lora in (EVA, CORDA | {"corda_config": {}}):
        job = make_job(base, "a", lora=lora | {"target_modules": ["c_attn", "c_fc"]})
        data = data_of(job)["a"]
        found = started(job, data)
        plain = plain_base(load_backbone(base))
        samples = training_order(job, data)
        if lora["init_lora_weights"] == "eva":
            theirs = eva_of_peft(job, plain, samples)
        else:
            theirs, _ = corda_of_peft(job, plain, samples)
        for key, tensor in theirs.items():
            mine = found[key]
            if job.changes_base:
                mine = mine[: len(tensor)] if "lora_A" in key else mine[:, : tensor.shape[1]]
            torch.testing.assert_close(mine, tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [EVA, CORDA | {"corda_config": {}}])
def test_a_classifier_starts_as_in_peft(tmp_path, lora):
    """By all tokens of its texts, for none of them has a label."""
    tiny_base(tmp_path, num_hidden_layers=1)
    base = BaseSpec(config=tmp_path, dtype="float32", seed=7, task="SEQ_CLS", labels=2)
    job = make_job(base, "a", lora=lora)
    drawn = data_of(job)["a"].samples
    samples = [
        Sample(each.input_ids, (-100,) * (len(each.input_ids) - 1) + (index % 2,))
        for index, each in enumerate(drawn)
    ]
    data = JobData(job, samples, DataReport())

    found = started(job, data)

    plain: Any = plain_base(load_backbone(base))
    plain.config.pad_token_id = 0
    if lora is EVA:
        theirs = eva_of_peft(job, plain, training_order(job, data), labels=False)
    else:
        theirs, _ = corda_of_peft(job, plain, training_order(job, data))
    downs = [key for key in theirs if "lora_A" in key]
    assert downs
    for key in downs:
        torch.testing.assert_close(found[key][:4], theirs[key], rtol=1e-4, atol=1e-5)


def test_a_start_is_made_of_the_first_samples_in_training_order(base, monkeypatch):
    """As many as the module says; the pairs of preferences and packed sequences are whole."""
    job = jobs_of(base)["eva"]
    data = data_of(job)["eva"]
    assert first_samples(data) == training_order(job, data)

    monkeypatch.setattr(data_starts, "SAMPLES", 5)
    assert first_samples(data) == training_order(job, data)[:5]
    units = [(2 * pair, 2 * pair + 1) for pair in range(11)]
    assert len(first_samples(replace(data, units=units))) == 10


def test_a_start_without_data_is_refused(base):
    """Not drawn instead; only where its numbers do not matter it is."""
    job = jobs_of(base)["kpm"]
    model = compile([job])
    Trainer(model, device="cpu").prepare(data_of(job))

    with pytest.raises(SuperModelMisuse, match="starts from its data, and none is at hand"):
        start_adapters(model)
    start_adapters(model, {"kpm": {}})


def test_a_compiled_folder_reads_the_data_of_its_jobs(base, tmp_path, monkeypatch):
    """Their adapters begin as where they were compiled."""
    jobs = [jobs_of(base)[name] for name in ("eva", "plain")]
    data = data_of(*jobs)
    asked = []

    def read(these: Any) -> Any:
        asked.extend(job.name for job in these)
        return {name: data[name] for name in asked}

    monkeypatch.setattr(compiled_folder, "load_all_data", read)
    dump(compile(jobs), tmp_path)

    found = adapter_tensors(compiled_folder.load(tmp_path).job_parameters("eva"))

    assert asked == ["eva"]
    expected = started(jobs[0], data["eva"])
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


def test_a_start_that_cannot_be_made_is_told(base, monkeypatch):
    """With the job, what was found, and what to do; PEFT would wait for ever."""
    job = jobs_of(base)["eva"]
    model = compile([job])
    few = make_data([job], longest=2, count=1)["eva"]
    Trainer(model, device="cpu").prepare(data_of(job))

    with pytest.raises(StartNotComputed, match="too little data to start by eva"):
        data_start(model, job, few)
    monkeypatch.setattr(data_starts, "EVA_MOST_BATCHES", 2)
    with pytest.raises(StartNotComputed, match="does not converge on the data of job 'eva'"):
        data_start(model, job, data_of(job)["eva"])
    monkeypatch.undo()
    large = make_job(base, "large", lora=EVA | {"r": 40})
    with pytest.raises(StartNotComputed, match="n_components=40 invalid for n_features=32"):
        started(large, data_of(large)["large"])
    large = make_job(base, "large", lora=CORDA | {"r": 40})
    with pytest.raises(StartNotComputed, match="cannot start by corda from its data"):
        started(large, data_of(large)["large"])


def test_a_job_whose_start_fails_is_not_admitted(base, tmp_path):
    """The others train on."""
    jobs = jobs_of(base)
    data = data_of(*jobs.values())
    large = make_job(base, "large", lora=EVA | {"r": 40})
    model = compile([jobs["plain"]], open=OpenSlots(rows=120, jobs=3, rank=48))
    heard = []

    class Asking(Watch):
        """Asks for a job that has no start."""

        def stepped(self, report: Any) -> None:
            if report.step == 1:
                with pytest.raises(StartNotComputed) as told:
                    self.trainer.admit(large, data_of(large)["large"])
                heard.append(told.value)

    watch: Any = Asking()
    watch.trainer = Trainer(
        model, output=tmp_path, device="cpu", data={"plain": data["plain"]}, callback=watch
    )
    [run] = watch.trainer.run()
    assert heard
    assert run.step == STEPS


def test_plans_and_bases_that_have_no_whole_layers_are_refused(base):
    """Before any weight is loaded."""
    jobs = jobs_of(base)
    for shape in (MeshShape(tp=2), MeshShape(pp=2)):
        mesh = replace(Mesh.alone("cpu"), shape=shape)
        for name in KINDS:
            with pytest.raises(NotElementwise, match=f"job '{name}' has a start"):
                require_elementwise([jobs[name]], mesh)
    rounding = "quantize-base{to=int8 at-least=256}@before:lower-adapters"
    quantised = compile([jobs["eva"]], resolve_pipeline(None, [rounding]))
    with pytest.raises(StartNotComputed, match="stores these in another form"):
        data_starts.require_data_starts(quantised, quantised.jobs)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"init_lora_weights": "eva"}, "needs eva_config={'rho': 1.0}"),
        ({"init_lora_weights": "eva", "eva_config": {}}, "with rho 2 moves ranks"),
        ({"init_lora_weights": "eva", "eva_config": {"rho": 1.5}}, "with rho 1.5 moves ranks"),
        (EVA | {"rank_pattern": {"q_proj": 2}}, "'rank_pattern' exclude each other"),
        ({"eva_config": {"rho": 1.0}}, "'eva_config' needs init_lora_weights='eva'"),
        (EVA | {"corda_config": {}}, "'corda_config' needs init_lora_weights='corda'"),
        (CORDA | {"corda_config": {"cache_file": "x"}}, "'cache_file' is refused"),
        (CORDA | {"corda_config": {"covariance_file": "x"}}, "'covariance_file' is refused"),
        (CORDA | {"corda_config": {"corda_method": "kpn"}}, "one of ipm, kpm"),
        (EVA | {"eva_config": {"rho": 1.0, "tua": 0.9}}, "did you mean 'tau'?"),
        (EVA | {"eva_config": {"rho": 1.0, "tau": 2}}, "0 <= n <= 1"),
        (CORDA | {"lora_dropout": 0.1}, "'lora_dropout' exclude each other"),
        (CORDA | {"use_dora": True}, "'use_dora' exclude each other"),
        (EVA | {"lora_bias": True}, "True or False"),
        (EVA | {"target_parameters": ["experts.up"]}, "init_lora_weights 'eva' exclude each other"),
    ],
)
def test_what_does_not_go_together_is_told(base, lora, said):
    """In one sentence, before anything is loaded."""
    with pytest.raises(JobError) as told:
        make_job(base, "a", lora=lora)
    assert said in str(told.value)


def test_configs_of_pefts_classes_are_taken(base):
    """As PEFT's users write them."""
    eva = make_job(base, "a", lora=EVA | {"eva_config": peft.EvaConfig(rho=1.0, tau=0.5)})
    corda = make_job(base, "a", lora=CORDA | {"corda_config": CordaConfig()})

    assert eva.start_config().eva_config == peft.EvaConfig(rho=1.0, tau=0.5)
    assert corda.start_config().corda_config == CordaConfig()
