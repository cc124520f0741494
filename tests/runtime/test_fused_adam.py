"""A job's steps by fused Adam: the numbers, and the operators, of torch.optim's own step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_scheduler

from tests.runtime.parameters import job_with, start
from tlora_fx.config.job import Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class
from tlora_fx.runtime.optim import optimizer
from tlora_fx.runtime.optim.optimizer import JobOptimizer

STEPS = 6
# How a gradient gets to a boundary, one by one or together; and marks for profilers.
NO_ARITHMETIC = {
    "aten.clone.default",
    "aten.empty_like.default",
    "aten._foreach_copy_.default",
    "profiler._record_function_enter_new.default",
    "profiler._record_function_exit._RecordFunction",
}
Params = dict[str, nn.Parameter]


def of_kind(kind: str) -> Callable[[Job, list[nn.Parameter]], torch.optim.Optimizer]:
    """What makes a job's optimizer with `fused` or `foreach` also on the CPU."""

    def make(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        one: Any = optimizer_class(job)
        made: torch.optim.Optimizer = one(groups, **optimizer_arguments(job), **{kind: True})
        return made

    return make


@pytest.fixture(autouse=True)
def _fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "_make_optimizer", of_kind("fused"))


class ByTorch:
    """The end of a job's step as torch.nn.utils, torch.optim and transformers write it."""

    def __init__(self, job: Job, params: Params, kind: str = "fused") -> None:
        self.params, self.largest = params, job.max_grad_norm
        self.optimizer = of_kind(kind)(job, list(params.values()))
        self.schedule = get_scheduler(
            job.lr_scheduler_type, self.optimizer, job.warmup(STEPS), STEPS
        )

    def step(self) -> float:
        held = [param for param in self.params.values() if param.grad is not None]
        wide = [param.grad for param in held]
        # Where a view begins matters on a GPU, so what is measured is moved to a boundary.
        size = 4 * wide[0].element_size()
        wide = [g if g.data_ptr() % size == 0 else g.clone() for g in wide]
        norm = float(torch.nn.utils.get_total_norm(wide))
        if self.largest:
            total = torch.tensor(norm, dtype=held[0].dtype, device=held[0].device)
            torch.nn.utils.clip_grads_with_norm_(held, self.largest, total)
        self.optimizer.step()
        self.schedule.step()
        return norm


def give_gradients(params: Params, step: int) -> None:
    """Gradients in place that depend on the step and the parameters."""
    for index, param in enumerate(params.values()):
        if param.grad is not None:
            generator = torch.Generator().manual_seed(1000 * step + index)
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad.copy_(noise.to(param) + param.detach())


def differences(one: JobOptimizer, mine: Params, other: ByTorch) -> list[str]:
    """The names of what is not bitwise equal: parameters, gradients, state."""
    state = {
        f"{kind}/{name}": value
        for name, param in other.params.items()
        for kind, value in other.optimizer.state.get(param, {}).items()
    }
    mine_too = one.state_tensors()
    assert mine_too.keys() == state.keys()
    found = [name for name in state if not torch.equal(mine_too[name], state[name])]
    for name, param in other.params.items():
        pairs = ((mine[name], param), (mine[name].grad, param.grad))
        found += [name for a, b in pairs if a is not None and not torch.equal(a, b)]
    return found


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@examples(max_examples=40)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    width=st.integers(5, 19),
    optim=st.sampled_from(["adamw", "adam"]),
    options=st.sampled_from(
        [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}]
    ),
    decay=st.sampled_from([0.0, 0.01]),
    largest=st.sampled_from([None, 0.7, 1e6]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    stop=st.integers(0, STEPS),
    is_new=st.booleans(),
)
def test_steps_are_bitwise_those_of_torch_with_a_stop_between(
    kind, dtype, width, optim, options, decay, largest, schedule, stop, is_new
):
    """Norms, rates, parameters, gradients and state of all steps, whenever a job is resumed."""
    job = job_with(
        optim=optim,
        optim_args=options,
        weight_decay=decay,
        max_grad_norm=largest,
        lr_scheduler_type=schedule,
        warmup_steps=2,
    )
    mine, theirs = start(dtype, width=width), start(dtype, width=width)
    reference = ByTorch(job, theirs, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_make_optimizer", of_kind(kind))
        ours = JobOptimizer(job, mine, STEPS)
        for step in range(STEPS):
            if step == stop:
                tensors = {name: value.clone() for name, value in ours.state_tensors().items()}
                values = ours.state_values()
                ours = JobOptimizer(job, mine, STEPS) if is_new else ours
                ours.load_state(tensors, values)
            give_gradients(mine, step)
            give_gradients(theirs, step)
            assert ours.learning_rate == reference.optimizer.param_groups[0]["lr"]
            assert ours.step() == reference.step()
            assert differences(ours, mine, reference) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optim", ["adam", "adamw"])
def test_steps_on_a_gpu_are_bitwise_those_of_torch(optim, dtype):
    """The same claim for CUDA's kernels."""
    job = job_with(optim=optim, lr_scheduler_type="cosine")
    mine, theirs = (start(dtype, device="cuda", width=16) for _ in range(2))
    ours, reference = JobOptimizer(job, mine, STEPS), ByTorch(job, theirs)

    for step in range(STEPS):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        assert ours.step() == reference.step()
        assert differences(ours, mine, reference) == []


@dataclass
class Log(TorchDispatchMode):
    """The operators that torch runs, with what they get: known tensors by name, others by value."""

    names: dict[int, str]
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), self.told(args), self.told(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def told(self, given: Any) -> Any:
        """What was given, without an address."""
        if isinstance(given, Tensor):
            with torch.utils._python_dispatch._disable_current_modes():
                return self.names.get(id(given)) or ("made", given.dtype, given.tolist())
        if isinstance(given, dict):
            return {key: self.told(value) for key, value in given.items()}
        return [self.told(each) for each in given] if isinstance(given, list | tuple) else given


def named(params: Params, made: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    """Every tensor of a job's parameters and state, by its id."""
    for name, param in params.items():
        yield id(param), name
        yield id(param.grad), f"gradient/{name}"
        for kind, value in made.state.get(param, {}).items():
            yield id(value), f"{kind}/{name}"


@pytest.mark.parametrize("optim", ["adam", "adamw"])
@pytest.mark.parametrize("width", [5, 16])
def test_a_gpu_would_get_the_same_operators(optim, width):
    """Each operator of a step, from the norm on, with the same tensors in the same order."""
    job = job_with(optim=optim)
    mine, theirs = start(width=width), start(width=width)
    ours, reference = JobOptimizer(job, mine, STEPS), ByTorch(job, theirs)
    logs = []
    for params, one, made in (
        (mine, ours, ours._optimizer),
        (theirs, reference, reference.optimizer),
    ):
        give_gradients(params, 0)
        one.step()
        give_gradients(params, 1)
        with Log(dict(named(params, made))) as log:
            one.step()
        logs.append([call for call in log.calls if call[0] not in NO_ARITHMETIC])

    assert logs[0] == logs[1]
    assert [call[0] for call in logs[0]].count(f"aten._fused_{optim}_.default") == 1


def test_parameters_of_two_dtypes_train_as_by_torch():
    """A trained copy of a module may have the base's dtype, its adapters another."""
    params = start() | {f"{name}2": param for name, param in start(torch.float64).items()}
    theirs = start() | {f"{name}2": param for name, param in start(torch.float64).items()}
    ours = JobOptimizer(job_with(max_grad_norm=None), params, STEPS)
    reference = ByTorch(job_with(max_grad_norm=None), theirs)

    for step in range(4):
        give_gradients(params, step)
        give_gradients(theirs, step)
        ours.step()
        reference.step()
    assert differences(ours, params, reference) == []


def test_a_replaced_gradient_is_the_one_that_counts():
    """Whoever gives a parameter another gradient tensor, or its first, finds it used."""
    mine, theirs = start(), start()
    ours, reference = JobOptimizer(job_with(), mine, STEPS), ByTorch(job_with(), theirs)
    for step in range(4):
        if step == 2:
            for params in (mine, theirs):
                for param in params.values():
                    param.grad = torch.zeros_like(param)
        give_gradients(mine, step)
        give_gradients(theirs, step)
        assert ours.step() == reference.step()

    assert differences(ours, mine, reference) == []
    assert "exp_avg/a.never_used" in ours.state_tensors()
