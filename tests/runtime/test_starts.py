"""Starts that PEFT computes from the base: its numbers, beside a base that stays as it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch

from tests.alone import train_alone
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tests.runtime.parameters import job_with, start
from tlora_fx.compiler import compile
from tlora_fx.config.adapter_folder import read_adapter_config
from tlora_fx.config.job import Job
from tlora_fx.errors import JobError, NotElementwise, UnknownTarget
from tlora_fx.ir.graph import AdapterSite
from tlora_fx.model.backbone import load_backbone
from tlora_fx.ops.tables import site_id
from tlora_fx.parallel.mesh import Mesh, MeshShape
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    base_tensors,
    plain_base,
    start_adapters,
)
from tlora_fx.runtime.adapters.starts import (
    computed_start,
    constant_part,
    trained_parameters,
    trained_part,
)
from tlora_fx.runtime.distributed import require_elementwise
from tlora_fx.runtime.optim.optimizer import JobOptimizer
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import adapter_difference

#: The start of each job of the group, and what else its adapter has.
JOBS = {
    "pissa": {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"v_proj": 2}},
    "olora": {"r": 3, "target_modules": "all-linear", "alpha_pattern": {"o_proj": 5}},
    "orthogonal": {"r": 4},
}
STEPS = 4


def jobs_of(base):
    """A job of each start, and a neighbour that starts as PEFT's do by default."""
    started = [
        make_job(base, init, seed=seed, lora=lora | {"init_lora_weights": init}, weight_decay=0.1)
        for seed, (init, lora) in enumerate(JOBS.items())
    ]
    return [*started, make_job(base, "plain", seed=9)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A trained group: the model, its folder, and each job's first adapter."""
    jobs = jobs_of(base)
    folder = tmp_path_factory.mktemp("run") / "run"
    starts: dict[str, dict[str, torch.Tensor]] = {}

    class Trained(Trainer):
        """Notes what each job starts from."""

        def prepare(self, data):
            """As every trainer does."""
            super().prepare(data)
            starts.update({r.job.name: copied(adapter_tensors(r.parameters)) for r in self.runs})

    model = compile(jobs)
    Trained(model, output=folder, device="cpu", data=make_data(jobs)).run()
    return model, folder, starts


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def residual(model, job, start):
    """The base as PEFT leaves it: each adapted weight less what the adapter starts as."""
    changed = plain_base(model.backbone)
    sites = next(graph for graph in model.group.jobs if graph.name == job.name).sites
    for path, site in sites.items():
        a, b = (start[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
        half = site.rank // 2
        taken = site.scaling * b[:, :half].double() @ a[:half].double()
        changed.get_submodule(path).weight.data -= taken
    return changed


def as_written(job, tensors):
    """The trained halves, by names of PEFT's files."""
    named = {name: name.replace(".weight", ".default.weight") for name in tensors}
    return {name: trained_part(job, named[name], tensors[name]) for name in tensors}


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_job_trains_as_peft_alone_does_beside_the_rest_of_the_base(run, init):
    """Losses and adapters of all steps; PEFT has W - s B0 A0, the group has W."""
    model, folder, starts = run
    job = next(job for job in model.jobs if job.name == init)
    lora = {**job.lora, "init_lora_weights": True}
    plain = Job.model_validate({**job.model_dump(exclude={"lora", "adapter"}), "lora": lora})

    alone = train_alone(
        plain,
        residual(model, job, starts[init]),
        make_data([job])[init],
        as_written(job, starts[init]),
        STEPS,
        masks=False,
    )

    assert losses_of(folder, [job])[init] == pytest.approx(alone.losses, rel=2e-6)
    found = as_written(job, adapter_tensors(model.job_parameters(init)))
    assert found.keys() == alone.adapters.keys()
    assert adapter_difference(found, alone.adapters) <= 1e-5
    begun = as_written(job, starts[init])
    assert not any(torch.equal(tensor, begun[name]) for name, tensor in found.items())


@pytest.mark.parametrize("init", ["olora", "orthogonal"])
def test_verify_trains_the_same_alone(run, init):
    """The job alone, as `verify` has it: what is constant takes no part in norms and updates."""
    model, folder, starts = run
    job = next(job for job in model.jobs if job.name == init)

    alone = train_alone(
        job, plain_base(model.backbone), make_data([job])[init], starts[init], STEPS, masks=False
    )

    assert losses_of(folder, [job])[init] == pytest.approx(alone.losses, rel=2e-6)
    found = adapter_tensors(model.job_parameters(init))
    assert adapter_difference(found, alone.adapters) <= 1e-5


def test_what_is_constant_stays(run):
    """Both halves begin as opposites; the second one is bitwise so at the end."""
    model, _, starts = run
    for job in model.jobs:
        ends = adapter_tensors(model.job_parameters(job.name))
        for name, end in ends.items():
            named = name.replace(".weight", ".default.weight")
            constant = constant_part(job, named, end)
            assert (constant is not None) == job.changes_base
            if constant is not None:
                start = starts[job.name][name]
                begun = trained_part(job, named, start)
                assert torch.equal(constant, constant_part(job, named, start))
                assert torch.equal(constant, begun if ".lora_A." in name else -begun)


@pytest.mark.parametrize("init", [*JOBS, "pissa_niter_2"])
def test_the_start_is_that_of_peft(init):
    """On one layer in float32: A, B, and the weight that PEFT leaves."""
    torch.manual_seed(3)
    layer = torch.nn.Linear(24, 16)
    lora = {"r": 4, "lora_alpha": 6, "target_modules": ["site"], "init_lora_weights": init}
    job = Job(name="a", base={"model": "m"}, lora=lora, data={"path": "x"}, seed=5)
    rank, scaling = (8, 1.5) if job.changes_base else (4, 1.5)

    a, b = computed_start(job, layer, layer.weight.detach(), AdapterSite("site", rank, scaling, 0))

    holder: Any = torch.nn.Module()
    holder.site = copy.deepcopy(layer)
    with torch.random.fork_rng():
        torch.manual_seed((5 << 31) + site_id("site"))
        peft.inject_adapter_in_model(peft.LoraConfig(**lora), holder)
    down, up = (getattr(holder.site, f"lora_{half}")["default"].weight for half in "AB")
    left = holder.site.base_layer.weight
    assert torch.equal(a[:4], down)
    assert torch.equal(b[:, :4], up)
    if job.changes_base:
        torch.testing.assert_close(layer.weight - 1.5 * up @ down, left)
        assert torch.equal(a[4:], down)
        assert torch.equal(b[:, 4:], -up)
    else:
        assert torch.equal(left, layer.weight)


def test_an_optimizer_goes_on_with_its_half():
    """From a checkpoint, bitwise; what is constant keeps its values, and no gradients."""
    job = job_with(lora={"r": 1, "init_lora_weights": "olora"})
    params, again = start(), start()
    constant = {name: p.detach().clone() for name, p in params.items()}

    def step(optimizer, of):
        for param in of.values():
            if param.grad is not None:
                param.grad.add_(param.detach() + 1)
        optimizer.step()
        optimizer.zero_grad()

    whole = JobOptimizer(job, params, 5)
    step(whole, params)
    tensors, values = whole.state_tensors(), whole.state_values()
    for name, param in again.items():
        param.data.copy_(params[name])
    resumed = JobOptimizer(job, again, 5)
    resumed.load_state({name: value.clone() for name, value in tensors.items()}, values)
    step(whole, params)
    step(resumed, again)

    assert tensors["exp_avg/a.lora_A.weight"].shape == (1, 5)
    for name, param in params.items():
        assert torch.equal(param, again[name])
        part = constant_part(job, name, param)
        if part is not None:
            assert torch.equal(part, constant_part(job, name, constant[name]))
            assert not constant_part(job, name, param.grad).any()
            assert not torch.equal(param, constant[name])


def test_a_bias_beside_b_is_trained_whole():
    """A vector has no rank to cut."""
    job = job_with(lora={"r": 2, "lora_bias": True})
    bias = torch.nn.Parameter(torch.zeros(3))

    trained = trained_parameters(job, {"a.lora_B.default.bias": bias})

    assert trained == {"a.lora_B.default.bias": bias}


def test_a_bias_beside_b_is_drawn_where_b_is(base):
    """Uniform up to 1 / sqrt(rank), as PEFT leaves it where init_lora_weights is false."""
    lora = {"r": 4, "lora_bias": True, "init_lora_weights": False, "target_modules": "all-linear"}
    model = compile([make_job(base, "a", lora=lora)])
    model.materialize(base_tensors(model.backbone), "cpu")
    start_adapters(model)

    biases = [p for n, p in model.job_parameters("a").items() if n.endswith("lora_B.default.bias")]
    drawn = torch.cat(biases)
    assert float(drawn.abs().max()) <= 0.5
    assert float(drawn.std()) == pytest.approx(0.5 / 3**0.5, rel=0.1)


@pytest.mark.parametrize("init", list(JOBS))
def test_what_is_written_is_an_adapter_of_the_base_itself(run, init):
    """PEFT loads it; with the whole base it computes what it computes with the rest."""
    model, folder, starts = run
    job = next(job for job in model.jobs if job.name == init)
    loaded = peft.PeftModel.from_pretrained(plain_base(model.backbone), folder / init).eval()
    ids = torch.arange(1, 9)[None]
    if job.changes_base:
        expected = residual(model, job, starts[init])
        ends = adapter_tensors(model.job_parameters(init))
        sites = next(graph for graph in model.group.jobs if graph.name == init).sites
        for path, site in sites.items():
            a, b = (ends[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
            half = site.rank // 2
            change = site.scaling * b[:, :half].double() @ a[:half].double()
            expected.get_submodule(path).weight.data += change
        torch.testing.assert_close(
            loaded(ids).logits, expected.eval()(ids).logits, rtol=1e-6, atol=1e-6
        )
    kept = peft.get_peft_model_state_dict(loaded)
    ends = adapter_tensors(model.job_parameters(init))
    assert all(torch.equal(kept[name], tensor) for name, tensor in ends.items())
    assert loaded.peft_config["default"].init_lora_weights in (True, init)
    assert loaded.peft_config["default"].r == (2 if job.changes_base else 1) * job.lora["r"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bitwise(base, tmp_path):
    """The constant half comes from the checkpoint, the optimizer from its own half."""
    jobs = jobs_of(base)[:2]
    short = [
        job.model_copy(update={"max_steps": 2, "lr_scheduler_type": "constant"}) for job in jobs
    ]
    long = [job.model_copy(update={"lr_scheduler_type": "constant"}) for job in jobs]

    def train(these, folder, **options):
        compiled = compile(these)
        Trainer(compiled, output=folder, device="cpu", data=make_data(these), **options).run()
        return compiled

    whole = train(long, tmp_path / "whole")
    train(short, tmp_path / "cut")
    resumed = train(long, tmp_path / "cut", resume=True)
    for job in jobs:
        ends = adapter_tensors(whole.job_parameters(job.name))
        again = adapter_tensors(resumed.job_parameters(job.name))
        assert all(torch.equal(tensor, again[name]) for name, tensor in ends.items())


def test_what_does_not_go_together_is_told(base, tmp_path):
    """In one sentence, before anything is loaded."""
    for lora, said in (
        ({"init_lora_weights": "pissa", "lora_dropout": 0.1}, "'lora_dropout' exclude each other"),
        ({"init_lora_weights": "olora", "use_dora": True}, "'use_dora' exclude each other"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "needs even ranks"),
        ({"init_lora_weights": "pissa_niter_x"}, "'pissa_niter_x' is refused"),
        ({"init_lora_weights": "loftq"}, "LoftQ rounds the base"),
    ):
        with pytest.raises(JobError) as told:
            make_job(base, "a", lora=lora)
        assert said in str(told.value)
    job = make_job(
        base, "a", lora={"init_lora_weights": "pissa", "target_modules": ["embed_tokens"]}
    )
    with pytest.raises(UnknownTarget, match="'pissa' is of linear modules") as told:
        compile([job])
    assert told.value.facts["job"] == "a"
    halved = replace(Mesh.alone("cpu"), shape=MeshShape(tp=2))
    with pytest.raises(NotElementwise, match="made of whole matrices"):
        require_elementwise([make_job(base, "a", lora={"init_lora_weights": "pissa"})], halved)
    config = peft.LoraConfig(init_lora_weights="pissa", task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match="path_initial_model_for_weight_conversion"):
        Job(name="a", base=base, adapter=tmp_path, data={"path": "x"})


def test_a_folder_that_eva_started_is_an_adapter_like_any_other(tmp_path):
    """What started it is past; the ranks that it chose are read."""
    config = peft.LoraConfig(
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(),
        rank_pattern={"v_proj": 2},
        task_type="CAUSAL_LM",
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    fields = read_adapter_config(tmp_path)

    assert fields["rank_pattern"] == {"v_proj": 2}
    assert not {"init_lora_weights", "eva_config"} & set(fields)


@pytest.mark.slow
def test_an_eva_start_that_peft_saved_is_gone_on_with(base, tmp_path):
    """Its A, which are singular vectors, are the folder's; three steps are those of PEFT alone."""
    plain = plain_base(load_backbone(base))
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=1.0),
        task_type="CAUSAL_LM",
    )
    started: Any = peft.get_peft_model(plain, config)
    rows = torch.arange(1, 41).view(4, 10)
    batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    peft.initialize_lora_eva_weights(started, [batch] * 3, show_progress_bar=False)
    started.save_pretrained(tmp_path / "eva")
    job = Job(
        name="a",
        base=base,
        adapter=tmp_path / "eva",
        data={"path": "x"},
        max_steps=3,
        per_device_train_batch_size=2,
    )

    model = compile([job])
    Trainer(model, output=tmp_path / "run", device="cpu", data=make_data([job])).run()

    start = peft.get_peft_model_state_dict(started)
    alone = train_alone(
        job, plain_base(model.backbone), make_data([job])["a"], start, 3, masks=False
    )
    downs = [each for name, each in start.items() if "lora_A" in name]
    assert all(torch.allclose(a @ a.T, torch.eye(len(a), dtype=a.dtype), atol=1e-4) for a in downs)
    assert losses_of(tmp_path / "run", [job])["a"] == pytest.approx(alone.losses, rel=2e-6)
    assert adapter_difference(adapter_tensors(model.job_parameters("a")), alone.adapters) <= 1e-5
