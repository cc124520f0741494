"""A loop of one's own: jobs step when they want, each as it would alone."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.runtime.elastic import SLOTS, coming_jobs
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import (
    DeviceUnknown,
    NotFinite,
    OptimizerError,
    StepMisuse,
    SuperModelMisuse,
    TloraError,
)
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.group_step import Batch, GroupStep
from tlora_fx.runtime.trainer import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_base(folder)
    return BaseSpec(config=folder, dtype="float64", seed=7)


@pytest.fixture(scope="module")
def jobs(base):
    """Four jobs that differ in ranks, sites, dropout, accumulation and optimizer."""
    return coming_jobs(base)


@pytest.fixture(scope="module")
def data(jobs):
    return make_data(list(jobs.values()))


def group_of(*jobs, **how):
    return GroupStep(compile(list(jobs), **how), device="cpu")


def adapter(group, name):
    return group.member(name).final_adapter()


def train_alone(job, data, steps=None):
    """A job's losses and its adapter, by a step of its own."""
    group = group_of(job)
    losses = [one_step(group, {job.name: data.step(n)})[job.name] for n in range(steps or 4)]
    return losses, adapter(group, job.name)


def one_step(group, batches, options=MappingProxyType({})):
    outputs = group.accumulate(batches)
    group.apply(dict.fromkeys(batches, options))
    return {name: output.loss for name, output in outputs.items()}


def assert_same(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


def test_a_loop_of_steps_is_what_the_trainer_does(tmp_path, jobs, data):
    """Bit by bit: losses and adapters of all jobs."""
    named = {name: jobs[name] for name in "abcd"}
    Trainer(compile(list(named.values())), output=tmp_path, device="cpu", data=data).run()
    group = group_of(*named.values())

    losses = {name: [] for name in named}
    for step in range(5):
        running = {name: data[name].step(step) for name in named if step < data[name].steps}
        for name, loss in one_step(group, running).items():
            losses[name].append(loss)

    assert losses == losses_of(tmp_path, list(named.values()))
    for name in named:
        assert_same(adapter(group, name), load_file(tmp_path / name / "adapter_model.safetensors"))


MODES = [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_trains_in_any_mode_of_its_caller(jobs, data, mode):
    """Without gradients a loop would go on, and train nothing."""
    expected = train_alone(jobs["a"], data["a"], 2)

    with mode():
        found = train_alone(jobs["a"], data["a"], 2)

    assert found[0] == expected[0]
    assert_same(found[1], expected[1], 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_jobs_come_and_wait_in_any_mode_of_the_caller(jobs, data, mode):
    """Also where the banks grow for them."""
    with mode():
        group = GroupStep(compile([jobs["a"]], open=ONE_SLOT), device="cpu")
        one_step(group, {"a": data["a"].step(0)})
        assert group.admit(jobs["d"])[1].grown
        one_step(group, {"a": data["a"].step(1), "d": data["d"].step(0)})
        group.park("a")
        group.restore(jobs["a"])
        state = group.release("d")
        one_step(group, {"a": data["a"].step(2)})

    assert_same(adapter(group, "a"), train_alone(jobs["a"], data["a"], 3)[1], 1e-9)
    assert_same(state.adapter, train_alone(jobs["d"], data["d"], 1)[1], 1e-9)


def test_a_step_under_autocast_is_refused(jobs, data):
    """Operators compute in the types that were traced; the base's dtype is what is meant."""
    group = group_of(jobs["a"])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(StepMisuse, match=r"autocast of 'cpu' to torch.bfloat16"),
    ):
        group.accumulate({"a": data["a"].step(0)})


#: So many that the next job to come makes banks grow.
ONE_SLOT = OpenSlots(rows=16, jobs=1, rank=16)
ROUNDS = st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=6)
SEARCHED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=2, **SEARCHED)
@given(ROUNDS)
def test_jobs_step_when_they_want(jobs, data, rounds):
    """Whoever shares a row with a job, its losses and its adapter are those that it has alone."""
    require_as_alone(jobs, data, rounds)


@pytest.mark.slow
@settings(max_examples=20, **SEARCHED)
@given(ROUNDS)
def test_jobs_step_when_they_want_in_many_orders(jobs, data, rounds):
    """The same, searched longer."""
    require_as_alone(jobs, data, rounds)


def require_as_alone(jobs, data, rounds):
    """Losses and adapters after such rounds are those that each job has alone."""
    group = group_of(*jobs.values())
    losses: dict[str, list[float]] = {}
    for names in rounds:
        steps = {name: len(losses.get(name, [])) for name in sorted(names)}
        steps = {name: step for name, step in steps.items() if step < data[name].steps}
        if steps:
            batches = {name: data[name].step(step) for name, step in steps.items()}
            for name, loss in one_step(group, batches).items():
                losses.setdefault(name, []).append(loss)

    for name, own in losses.items():
        expected, tensors = train_alone(jobs[name], data[name], len(own))
        assert own == pytest.approx(expected, rel=1e-9)
        assert_same(adapter(group, name), tensors, 1e-9)


def test_gradients_add_up_over_calls(jobs, data):
    """Two calls with one normalizer are one call with both micro-batches; others step meanwhile."""
    job, micro = jobs["b"], data["b"].step(0)
    assert len(micro) == 2
    whole = group_of(job)
    loss = one_step(whole, {"b": micro})["b"]
    terms = whole.accumulate({"b": micro})["b"].terms
    group = group_of(job, jobs["a"])

    first = group.accumulate({"b": Batch(micro[:1], terms), "a": data["a"].step(0)})
    group.apply({"a": {}})
    second = group.accumulate({"b": Batch(micro[1:], terms)})
    update = group.apply({"b": {}})["b"]

    assert first["b"].loss + second["b"].loss == pytest.approx(loss, rel=1e-12)
    assert (update.step, update.updated) == (1, True)
    alone = group_of(job)
    one_step(alone, {"b": micro})
    assert_same(adapter(group, "b"), adapter(alone, "b"))


def failing(group, sick):
    """Let rows fail that hold targets of one job."""
    plain, index = group.runner.run, group.member(sick).index

    def run(rows, weights):
        ends = [row.target_segments.tolist() for row in rows]
        if any(each[index + 1] > each[index] for each in ends):
            raise ValueError("this row is broken")
        return plain(rows, weights)

    group.runner.run = run
    return plain


def test_a_row_that_fails_costs_nobody_gathered_gradients(jobs, data):
    """The job at fault and its neighbours go on as if the failed batch had not been sent."""
    group, undisturbed = (group_of(jobs["a"], jobs["d"]) for _ in range(2))
    first = {name: data[name].step(0) for name in "ad"}
    later = {name: data[name].step(1) for name in "ad"}
    group.accumulate(first)
    plain = failing(group, "a")

    outputs = group.accumulate(later)

    assert isinstance(outputs["a"].error, ValueError)
    assert math.isnan(outputs["a"].loss)
    assert outputs["d"].error is None
    group.runner.run = plain
    updates = group.apply({"a": {}, "d": {}})
    undisturbed.accumulate(first)
    undisturbed.accumulate({"d": later["d"]})
    assert updates == undisturbed.apply({"a": {}, "d": {}})
    for name in "ad":
        assert_same(adapter(group, name), adapter(undisturbed, name), 0)


def test_a_job_that_fails_alone_has_the_error_in_its_output(jobs, data):
    """As it has beside neighbours; its gradients are as before."""
    group = group_of(jobs["a"])
    group.accumulate({"a": data["a"].step(0)})
    before = [each.grad.clone() for each in group.member("a").optimizer.trained.values()]
    failing(group, "a")

    output = group.accumulate({"a": data["a"].step(1)})["a"]

    assert str(output.error) == "this row is broken"
    assert math.isnan(output.loss)
    after = [each.grad for each in group.member("a").optimizer.trained.values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_loss_that_is_not_finite_fails_its_batch_alone(jobs, data):
    """Its job keeps what it had gathered, and may go on; the other's output stands."""
    group = group_of(jobs["a"], jobs["d"])
    with torch.no_grad():
        sound = {n: p.clone() for n, p in group_parameters(group, "a").items()}
        for parameter in group_parameters(group, "a").values():
            parameter.fill_(math.nan)

    outputs = group.accumulate({name: data[name].step(0) for name in "ad"})

    assert isinstance(outputs["a"].error, NotFinite)
    assert math.isfinite(outputs["d"].loss)
    with pytest.raises(StepMisuse, match="gathered no gradients"):
        group.apply({"a": {}})
    with torch.no_grad():
        for name, parameter in group_parameters(group, "a").items():
            parameter.copy_(sound[name])
    loss = one_step(group, {"a": data["a"].step(0)})["a"]
    assert loss == pytest.approx(train_alone(jobs["a"], data["a"], 1)[0][0], rel=1e-12)


def group_parameters(group, name):
    group._ready()
    return group.member(name).parameters


def test_gradients_that_are_not_finite_are_dropped(jobs, data):
    """The update says so, the adapter stays, and the next step is the first one."""
    group = group_of(jobs["a"])
    group.accumulate({"a": data["a"].step(0)})
    before = adapter(group, "a")
    next(iter(group.member("a").optimizer.trained.values())).grad.fill_(math.nan)

    update = group.apply({"a": {"lr": 0.5}})["a"]

    assert (update.step, update.updated) == (0, False)
    assert_same(adapter(group, "a"), before, 0)
    one_step(group, {"a": data["a"].step(0)})
    assert_same(adapter(group, "a"), train_alone(jobs["a"], data["a"], 1)[1])


@pytest.mark.parametrize("name", "ac")
def test_a_rate_holds_for_one_step(jobs, data, name):
    """The step is that of a job with this rate; the next one has the schedule's again."""
    job = jobs[name]
    group = group_of(job)
    group.accumulate({name: data[name].step(0)})
    scheduled = group.member(name).optimizer.learning_rate
    update = group.apply({name: {"lr": 3e-3}})[name]

    other = job.model_copy(update={"learning_rate": 3e-3, "lr_scheduler_type": "constant"})
    assert update.learning_rate == 3e-3 != scheduled
    assert_same(adapter(group, name), train_alone(other, data[name], 1)[1])
    after = group_of(job)
    one_step(after, {name: data[name].step(0)})
    assert group.member(name).optimizer.learning_rate == after.member(name).optimizer.learning_rate


def test_hyperparameters_that_an_optimizer_does_not_have_are_refused(jobs, data):
    """Before any job is changed."""
    group = group_of(jobs["a"], jobs["c"])
    group.accumulate({name: data[name].step(0) for name in "ac"})
    before = adapter(group, "a")

    for wrong in ({"lr": -1.0}, {"lr": math.nan}, {"momentum": 0.9}, {"betas": 0.9}):
        with pytest.raises(OptimizerError):
            group.apply({"a": {}, "c": wrong})
    assert_same(adapter(group, "a"), before, 0)
    assert group.apply({"a": {}, "c": {}})["c"].updated


def test_all_that_adam_takes_may_change_from_step_to_step(jobs, data):
    """As a torch.optim.AdamW whose options are set before each step, and clipping beside it."""
    group = group_of(jobs["a"])
    group.prepare()
    parameters = [each.detach().clone() for each in group.member("a").optimizer.trained.values()]
    plain = torch.optim.AdamW(parameters, lr=1.0)
    for step, options in enumerate(
        (
            {"lr": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "max_grad_norm": 0.0},
            {"lr": 0.2, "beta1": 0.8, "weight_decay": 0.1, "max_grad_norm": 0.3},
            {"lr": 0.05, "beta2": 0.9},
        )
    ):
        group.accumulate({"a": data["a"].step(step)})
        trained = group.member("a").optimizer.trained.values()
        for own, each in zip(parameters, trained, strict=True):
            own.grad = each.grad.clone()
        [known] = plain.param_groups
        known |= {name: options[name] for name in ("lr", "eps", "weight_decay") if name in options}
        if not step:
            known["weight_decay"] = jobs["a"].weight_decay
        betas = zip(("beta1", "beta2"), known["betas"], strict=True)
        known["betas"] = tuple(options.get(name, beta) for name, beta in betas)
        if step:
            torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        plain.step()
        group.apply({"a": options})
        for own, each in zip(parameters, trained, strict=True):
            torch.testing.assert_close(own, each.detach(), rtol=1e-12, atol=1e-12)


def test_a_job_goes_back_to_what_it_had_gathered(jobs, data):
    """And has nothing where it had nothing; its neighbour keeps all."""
    group, straight = (group_of(jobs["a"], jobs["b"]) for _ in range(2))
    group.prepare()
    nothing = group.gathered("a")
    both = {name: data[name].step(0) for name in "ab"}
    group.accumulate(both)
    had = group.gathered("a")
    group.accumulate(both)
    group.put_back("a", had)
    straight.accumulate(both)
    straight.accumulate({"b": both["b"]})
    assert group.apply({"a": {}, "b": {}}) == straight.apply({"a": {}, "b": {}})

    group.accumulate(both)
    group.put_back("a", nothing)
    assert not group.has_gathered("a")
    assert group.has_gathered("b")
    with pytest.raises(StepMisuse):
        group.apply({"a": {}})


def test_jobs_join_leave_and_wait_in_memory(jobs, data):
    """One that was parked goes on as if it had stayed; one that was released leaves its state."""
    group = GroupStep(compile([jobs["a"]], open=SLOTS), device="cpu")
    losses = {name: [] for name in "abd"}

    def step(*names):
        batches = {name: data[name].step(len(losses[name])) for name in names}
        for name, loss in one_step(group, batches).items():
            losses[name].append(loss)

    step("a")
    group.admit(jobs["b"])
    step("a", "b")
    group.park("a")
    assert [member.job.name for member in group.members.values()] == ["b"]
    group.admit(jobs["d"])
    step("b", "d")
    group.restore(jobs["a"])
    step("a", "d")
    state = group.release("d")
    step("a", "b")

    assert state.step == 2
    for name in "ab":
        expected, tensors = train_alone(jobs[name], data[name], len(losses[name]))
        assert losses[name] == pytest.approx(expected, rel=1e-9)
        assert_same(adapter(group, name), tensors, 1e-9)
    expected, tensors = train_alone(jobs["d"], data["d"], 2)
    assert losses["d"] == pytest.approx(expected, rel=1e-9)
    assert_same(state.adapter, tensors, 1e-9)


#: Hyperparameters for a step and those after it, of which "lr" is for the step alone.
FROM_NOW_ON = {
    "lr": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.3, "max_grad_norm": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("event", ["a neighbour comes", "a neighbour comes later", "parked"])
def test_hyperparameters_hold_whatever_happens_in_between(jobs, data, event):
    """Also where banks grow for a neighbour, and for a job that waits in memory."""

    def trained(event):
        group = GroupStep(compile([jobs["a"]], open=ONE_SLOT), device="cpu")
        one_step(group, {"a": data["a"].step(0)}, FROM_NOW_ON)
        if event == "parked":
            group.park("a")
            group.restore(jobs["a"])
        if event == "a neighbour comes":
            assert group.admit(jobs["d"])[1].grown
        group.accumulate({"a": data["a"].step(1)})
        if event == "a neighbour comes later":
            assert group.admit(jobs["d"])[1].grown
        group.apply({"a": {}})
        return adapter(group, "a")

    assert_same(trained(event), trained(""))


def test_an_adapter_can_be_read_before_the_first_step(jobs):
    """A loop may compare where a job began; nobody has gathered then."""
    group = group_of(jobs["a"])

    assert not group.has_gathered("a")
    assert adapter(group, "a")


def test_jobs_are_compiled_first(jobs):
    """A step takes a model; a list of jobs is told what makes one of it."""
    with pytest.raises(SuperModelMisuse, match=r"what tlora_fx.compile\(jobs\) returned"):
        GroupStep(jobs)


def test_what_a_group_cannot_do_says_what_to_do(jobs, data):
    """Unknown jobs, steps without gradients, parked gradients, schedules without an end."""
    group = GroupStep(compile([jobs["a"]], open=SLOTS), device="cpu")
    with pytest.raises(StepMisuse, match="no such job trains"):
        group.accumulate({"z": data["a"].step(0)})
    with pytest.raises(StepMisuse, match="a dict by the jobs' names"):
        group.accumulate(data["a"].step(0))
    with pytest.raises(StepMisuse, match="a dict by the jobs' names"):
        group.apply(["a"])
    with pytest.raises(StepMisuse, match="gathered no gradients"):
        group.apply({"a": {}})
    group.accumulate({"a": data["a"].step(0)})
    with pytest.raises(StepMisuse, match="cannot be parked"):
        group.park("a")
    with pytest.raises(StepMisuse, match="parked"):
        group.restore(jobs["b"])
    endless = jobs["b"].model_copy(update={"max_steps": None})
    with pytest.raises(StepMisuse, match="how many steps"):
        group.admit(endless)
    group.steps = {"b": 4}
    assert group.admit(endless)[0].optimizer.learning_rate > 0


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ([], "no sample"),
        ([[Sample((), ())]], "no sample"),
        ([[Sample((1, 999), (1, 999))]], "does not know"),
        ([[Sample((1, -3), (1, 1))]], "does not know"),
        ([[Sample((1, 2), (1, 999))]], "no token of the base"),
        ([[Sample((1, 2), (1, -5))]], "no token of the base"),
        ([[Sample((1, 2, 3), (1, 2))]], "3 labels, one for each token"),
        ([[Sample((1, 2), (-100, 2.5))]], "labels of sample 0 are no list of whole numbers"),
        ([[Sample(torch.tensor([1, 2]), (1, 2))]], "of a tensor or an array, give .tolist"),
        ([Sample((1, 2), (1, 2))], "in no micro-batch"),
        (Sample((1, 2), (1, 2)), "in no micro-batch"),
        ([[{"input_ids": (1, 2), "labels": (1, 2)}]], "dict in place of a sample"),
        ([{"input_ids": (1, 2), "labels": (1, 2)}], "dict in place of a list"),
        (["text"], "str in place of a list"),
        (5, "int in place of a list"),
        (Batch([[Sample((1, 2), (1, 2))]], normalizer=0.0), "divided"),
        (Batch([[Sample((1, 2), (1, 2))]], normalizer=math.nan), "divided"),
    ],
)
def test_a_batch_that_teaches_nothing_is_refused_before_it_runs(jobs, data, batch, told):
    """Nobody's gradients change, and the job has still gathered nothing."""
    group = group_of(jobs["a"], jobs["b"])

    with pytest.raises(StepMisuse, match=told):
        group.accumulate({"b": data["b"].step(0), "a": batch})
    with pytest.raises(StepMisuse, match="gathered no gradients"):
        group.apply({"b": {}})


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_is_not_copied(jobs, copied):
    """The optimizers of a copy would hold tensors that its model does not read."""
    group = group_of(jobs["a"])

    with pytest.raises(StepMisuse, match="step\\.model"):
        copied(group)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(jobs):
    """As a command with --device refuses it."""
    with pytest.raises(DeviceUnknown, match="no device 'cuda'"):
        GroupStep(compile([jobs["a"]]), device="cuda")


def test_a_job_whose_state_is_not_its_own_is_not_admitted(jobs, data):
    """Its slot is free again."""
    group = GroupStep(compile([jobs["a"], jobs["b"]], open=SLOTS), device="cpu")
    group.accumulate({name: data[name].step(0) for name in "ab"})
    state = replace(group.release("b"), adapter={})

    with pytest.raises(TloraError):
        group.admit(jobs["b"], state)
    assert [member.job.name for member in group.members.values()] == ["a"]
    group.admit(jobs["b"])


def test_a_job_whose_optimizer_cannot_be_made_is_not_admitted(jobs, data):
    """Its slot is free again, and so is its name."""
    group = GroupStep(compile([jobs["a"]], open=SLOTS), device="cpu")
    wrong = jobs["b"].model_copy(update={"optim": "adafactor", "optim_args": {"d": 0.5}})

    with pytest.raises(OptimizerError):
        group.admit(wrong)
    assert [member.job.name for member in group.members.values()] == ["a"]
    group.admit(jobs["b"])


def test_groups_of_an_optimizer_keep_their_ratio_where_the_schedule_is_at_0(base, data):
    """LoRA+ while it warms up."""
    job = make_job(base, "w", loraplus_lr_ratio=16.0, warmup_steps=5, max_steps=9)
    group = group_of(job)
    group.prepare()
    optimizer = group.member("w").optimizer

    optimizer.override({"lr": 1e-3})

    rates = {group["lr"] for group in optimizer._optimizer.param_groups}
    assert rates == {1e-3, 1.6e-2}


def test_a_row_without_memory_frees_captured_rows_and_runs_again(jobs, data, caplog, monkeypatch):
    """All jobs run together still, and later rows are as long as they were."""
    together = list(jobs.values())[:2]
    batches = [{job.name: data[job.name].step(n) for job in together} for n in range(2)]
    plain, group = group_of(*together), group_of(*together)
    expected = [one_step(plain, each) for each in batches]
    found = [one_step(group, batches[0])]
    keys, row_tokens, run_rows = ["a captured row"], group.row_tokens, group.run_rows

    def without_memory(*given):
        if keys:
            run_rows(*given)  # what it has gathered is thrown away
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_rows(*given)

    graphs = SimpleNamespace(keys=keys, clear=keys.clear)
    monkeypatch.setattr(GroupStep, "graphs", graphs)
    monkeypatch.setattr(group, "run_rows", without_memory)
    found.append(one_step(group, batches[1]))

    assert found == expected
    assert group.row_tokens == row_tokens
    assert "captured rows are freed" in caplog.text
    for job in together:
        assert_same(adapter(group, job.name), adapter(plain, job.name))
