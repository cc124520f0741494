"""A job's optimizer: its updates, its clipping, and its way through a checkpoint."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import get_scheduler

from tests.runtime.parameters import job_with, params_of, start
from tlora_fx.config.fields import OPTIMIZER_ALIASES, OPTIMIZERS, SCHEDULE_ARGUMENTS
from tlora_fx.config.job import Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class
from tlora_fx.errors import JobError, OptimizerError, OptimizerStateError
from tlora_fx.runtime.optim import optimizer as optimizers
from tlora_fx.runtime.optim.optimizer import JobOptimizer
from tlora_fx.runtime.optim.schedules import rate_groups
from tlora_fx.runtime.optim.trainable import learning_rates, require_trainable
from tlora_fx.runtime.verification import solo

STEPS = 9
#: What LoRA-FA divides by.
SCALINGS = {"a.lora_A.weight": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"optim": name} for name in OPTIMIZERS},
    "sgd-momentum": {"optim": "sgd", "optim_args": {"momentum": 0.9, "nesterov": True}},
    "adamw-amsgrad": {"optim": "adamw", "optim_args": {"amsgrad": True}},
    "rmsprop-centered": {"optim": "rmsprop", "optim_args": {"centered": True, "momentum": 0.5}},
    "cosine": {"lr_scheduler_type": "cosine_with_restarts", "warmup_ratio": 0.3},
    "polynomial": {"lr_scheduler_type": "polynomial", "warmup_steps": 2},
    "lora+": {"loraplus_lr_ratio": 4.0},
    "lora+ of lion": {"loraplus_lr_ratio": 0.5, "optim": "lion"},
    "stable": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 3},
    },
}
FUSED = pytest.mark.parametrize(
    "variant",
    [
        {"optim": "adamw"},
        {"optim": "adamw", "optim_args": {"amsgrad": True, "maximize": True}},
        {"optim": "adam"},
        {"optim": "sgd", "optim_args": {"momentum": 0.9, "nesterov": True}},
    ],
    ids=lambda variant: "-".join([variant["optim"], *variant.get("optim_args", ())]),
)


def train(
    optimizer: JobOptimizer, params: dict[str, nn.Parameter], first: int, last: int
) -> list[float]:
    """Run the steps first to last - 1, whose gradients depend on step and parameters."""
    norms = []
    for step in range(first, last):
        optimizer.zero_grad()
        for index, param in enumerate(params.values()):
            if param.grad is not None:
                generator = torch.Generator().manual_seed(1000 * step + index)
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad.add_(noise.to(param) + param.detach())
        norms.append(optimizer.step())
    return norms


def starter(job: Job) -> Callable[..., dict[str, nn.Parameter]]:
    """What makes parameters that a job's optimizer can take: Muon has no vectors."""

    def matrices(*args: Any) -> dict[str, nn.Parameter]:
        made = start(*args)
        return {name: param for name, param in made.items() if param.dim() > 1}

    def wide(*args: Any) -> dict[str, nn.Parameter]:
        return start(*args, width=2400)

    def pairs(*args: Any) -> dict[str, nn.Parameter]:
        made = start(*args)
        up = made["a.lora_B.weight"]
        made["a.lora_B.weight"] = nn.Parameter(up.detach()[:, :2])
        made["a.lora_B.weight"].grad = up.grad[:, :2]
        return made

    return {"muon": matrices, "adamw_8bit": wide, "lorafa": pairs}.get(job.optim, start)


def plain_optimizer(job: Job, plain: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The library's own, on parameters that lie in rows."""
    make: Any = optimizer_class(job)
    arguments, ratio = optimizer_arguments(job), job.loraplus_lr_ratio
    if ratio is None:
        return make(plain.values(), **arguments)
    slow = [param for name, param in plain.items() if name == "a.lora_A.weight"]
    fast = [param for name, param in plain.items() if name != "a.lora_A.weight"]
    rate = job.learning_rate
    return make([{"params": slow}, {"params": fast, "lr": rate * ratio}], **arguments)


def through_files(
    optimizer: JobOptimizer, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's state after a way through safetensors and JSON."""
    tensors = {
        name: value.clone().contiguous() for name, value in optimizer.state_tensors().items()
    }
    safetensors.torch.save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(optimizer.state_values()))
    return (
        safetensors.torch.load_file(folder / "state.safetensors"),
        json.loads((folder / "state.json").read_text()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop", [0, 4])
def test_resuming_is_bitwise_as_never_having_stopped(variant, stop, dtype, tmp_path):
    """Steps before and after a checkpoint equal the same steps in one go, in all state."""
    job = job_with(**VARIANTS[variant])
    if job.optim == "adamw_8bit" and dtype == torch.float64:
        return  # adapters are float32 or bfloat16, and the library has no other
    start = starter(job)
    whole_params = start(dtype)
    whole = JobOptimizer(job, whole_params, STEPS, SCALINGS)
    norms = train(whole, whole_params, 0, STEPS)

    params = start(dtype)
    before = JobOptimizer(job, params, STEPS, SCALINGS)
    norms_before = train(before, params, 0, stop)
    tensors, values = through_files(before, tmp_path)
    resumed_params = start(dtype)
    with torch.no_grad():
        for name, param in resumed_params.items():
            param.copy_(params[name])
    resumed = JobOptimizer(job, resumed_params, STEPS, SCALINGS)
    resumed.load_state(tensors, values)
    rate = resumed.learning_rate
    norms_after = train(resumed, resumed_params, stop, STEPS)

    assert rate == before.learning_rate
    assert norms == norms_before + norms_after
    assert all(torch.equal(whole_params[name], resumed_params[name]) for name in whole_params)
    left, right = whole.state_tensors(), resumed.state_tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(left[name].stride() == right[name].stride() for name in left)
    assert whole.state_values() == resumed.state_values()


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"lorafa"}))
def test_steps_are_those_of_torch_and_transformers(variant):
    """Optimizer, clipping and schedule give what their libraries give on plain parameters."""
    job = job_with(**VARIANTS[variant])
    start = starter(job)
    params = start()
    norms = train(ours := JobOptimizer(job, params, STEPS), params, 0, STEPS)

    plain = {name: nn.Parameter(param.detach().clone()) for name, param in start().items()}
    optimizer: Any = plain_optimizer(job, plain)
    schedule = get_scheduler(
        job.lr_scheduler_type, optimizer, job.warmup(STEPS), STEPS, dict(job.lr_scheduler_kwargs)
    )
    for step in range(STEPS):
        used = [param for name, param in plain.items() if "never" not in name]
        for index, param in enumerate(used):
            generator = torch.Generator().manual_seed(1000 * step + index)
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = noise.float() + param.detach()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.7)
        optimizer.step()
        schedule.step()
        assert norms[step] == pytest.approx(norm.item(), rel=1e-6)

    for name, param in plain.items():
        torch.testing.assert_close(params[name], param)
    assert ours.learning_rate == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_biases_and_norms_do_not_decay(decay):
    """As by transformers' Trainer; also where a step has another weight decay."""
    names = [
        "q.lora_A.weight", "q.lora_B.weight", "q.lora_B.bias", "q.base_layer.bias",
        "q.lora_magnitude_vector.weight", "h.0.ln_1.modules_to_save.default.weight",
        "norm.modules_to_save.default.weight", "head.modules_to_save.default.weight",
        "h.0.ln_1.modules_to_save.default.bias", "attn.modules_to_save.default.sinks",
    ]  # fmt: skip
    params = {name: nn.Parameter(torch.ones(2)) for name in names}
    params["head.modules_to_save.default.weight"] = nn.Parameter(torch.ones(2, 2))
    optimizer = JobOptimizer(job_with(weight_decay=decay), params, STEPS)

    def decays():
        name_of = {id(param): name for name, param in params.items()}
        groups = optimizer._optimizer.param_groups
        return {name_of[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}

    spared = {*names[2:4], *names[5:7], names[8]}
    assert decays() == {name: 0.0 if name in spared else decay for name in names}
    if decay:
        optimizer.override({"weight_decay": 0.3})
        assert decays() == {name: 0.0 if name in spared else 0.3 for name in names}


def test_loraplus_lets_biases_and_layer_norms_be_without_decay():
    """As PEFT, which knows nn.LayerNorm by its class, and no other norm."""
    names = [
        "q.lora_A.weight", "q.lora_B.weight", "q.lora_B.bias",
        "ln.modules_to_save.default.weight", "ln.modules_to_save.default.bias",
        "norm.modules_to_save.default.weight",
    ]  # fmt: skip
    params = {name: nn.Parameter(torch.ones(2, 2)) for name in names[:2]}
    params |= {name: nn.Parameter(torch.ones(2)) for name in names[2:]}
    groups = rate_groups(job_with(weight_decay=0.1, loraplus_lr_ratio=4.0), params)
    decays = {id(param): group["weight_decay"] for group in groups for param in group["params"]}

    assert [decays[id(params[name])] for name in names] == [0.1, 0.1, 0.0, 0.0, 0.0, 0.1]


class Small(nn.Module):
    """An embedding, a linear with a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.q, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids."""
        logits: torch.Tensor = self.head(self.q(self.tokens(ids)))
        return logits


@pytest.mark.parametrize("optim", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("rates", [{}, {"loraplus_lr_embedding": 1e-3}], ids=["", "embedding"])
def test_lora_plus_is_that_of_peft(optim, rates):
    """Every parameter has the rate and the decay that PEFT gives it, and updates equal its."""
    lora = {"r": 2, "target_modules": ["tokens", "q"], "use_dora": True, "bias": "lora_only"}
    job = job_with(optim=optim, loraplus_lr_ratio=8.0, lora=lora, weight_decay=0.1, **rates)
    torch.manual_seed(0)
    config = peft.LoraConfig(**job.lora_fields)
    theirs = peft.get_peft_model(Small(), config)
    mine = copy.deepcopy(theirs)
    plain: Any = solo._loraplus(job, theirs, optimizer_class(job), optimizer_arguments(job))
    params = {n: p for n, p in mine.named_parameters() if p.requires_grad}
    ours = JobOptimizer(job, params, STEPS)

    def of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[float, float]]:
        names = {param: name for name, param in model.named_parameters()}
        return {
            names[param]: (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for param in group["params"]
        }

    assert of(ours._optimizer, mine) == of(plain, theirs)
    assert len(ours._optimizer.param_groups) == 4
    for param, other in zip(params.values(), of_trained(theirs), strict=True):
        param.grad = torch.full_like(param, 0.01)
        other.grad = torch.full_like(other, 0.01)
    ours.step()
    plain.step()
    assert all(map(torch.equal, params.values(), of_trained(theirs)))


def of_trained(model: nn.Module) -> list[nn.Parameter]:
    """What a model trains."""
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("alias", OPTIMIZER_ALIASES)
def test_names_of_transformers_mean_the_same_optimizer(alias):
    """A run with one goes on with the other."""
    assert job_with(optim=alias) == job_with(optim=OPTIMIZER_ALIASES[alias])


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    """Before anything is trained, with what to install."""
    monkeypatch.setitem(sys.modules, "lion_pytorch.foreach", None)

    with pytest.raises(JobError, match="lion") as told:
        require_trainable(job_with(optim="lion"), STEPS)
    assert "tlora-fx[optimizers]" in told.value.help


def test_storage_stays_where_it_is():
    """Parameters and gradients remain views of the shared storage, neighbours untouched."""
    bank = torch.ones(8, 5)
    params = params_of(bank)
    places = {
        name: (p.data_ptr(), p.grad is None or p.grad.data_ptr()) for name, p in params.items()
    }

    train(JobOptimizer(job_with(), params, STEPS), params, 0, 3)

    assert places == {
        name: (p.data_ptr(), p.grad is None or p.grad.data_ptr()) for name, p in params.items()
    }
    assert torch.equal(bank[0], torch.ones(5))
    assert torch.equal(bank[6, 0], torch.ones(()))
    assert not torch.equal(bank[1:3], torch.ones(2, 5))
    assert torch.equal(bank[7], torch.ones(5))


def test_gradients_are_zeroed_in_place():
    """After zero_grad the gradient is the same tensor, full of zeros."""
    params = start()
    gradient = params["a.lora_B.weight"].grad
    assert gradient is not None
    gradient.fill_(3.0)

    JobOptimizer(job_with(), params, STEPS).zero_grad()

    assert params["a.lora_B.weight"].grad is gradient
    assert not gradient.any()


@pytest.mark.parametrize("limit", [None, 0.0])
def test_no_limit_is_no_clipping(limit):
    """With max_grad_norm null or 0 the gradients reach the optimizer as they are."""
    params = start()
    optimizer = JobOptimizer(job_with(max_grad_norm=limit), params, STEPS)
    gradient = params["a.lora_A.weight"].grad
    assert gradient is not None
    gradient.fill_(100.0)

    assert optimizer.step() == pytest.approx(100 * 10**0.5)
    assert (gradient == 100).all()


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    """A sum that bfloat16 could not hold is right to float32."""
    params = start(torch.bfloat16)
    for param in params.values():
        if param.grad is not None:
            param.grad.fill_(1.0)

    norm = JobOptimizer(job_with(), params, STEPS).gradient_norm()

    assert norm == pytest.approx(29**0.5, rel=1e-6)


def test_a_norm_that_is_no_number_is_handed_back():
    """Whether the job goes on is for the caller to decide."""
    params = start()
    gradient = params["a.lora_A.weight"].grad
    assert gradient is not None
    gradient[0, 0] = float("nan")

    norm = JobOptimizer(job_with(), params, STEPS).gradient_norm()

    assert math.isnan(norm)


def test_a_known_norm_is_not_measured_again():
    """A norm that was handed in clips as the one that would be measured."""
    left, right = start(), start()
    one, two = (JobOptimizer(job_with(), params, STEPS) for params in (left, right))
    for params in (left, right):
        gradient = params["a.lora_A.weight"].grad
        assert gradient is not None
        gradient.fill_(1.3)

    one.step()
    two.step(two.gradient_norm())

    assert all(torch.equal(left[name], right[name]) for name in left)


def test_state_of_other_parameters_is_refused():
    """A checkpoint of other target modules is no silent fresh start."""
    params = start()
    optimizer = JobOptimizer(job_with(), params, STEPS)
    train(optimizer, params, 0, 1)
    tensors, values = optimizer.state_tensors(), optimizer.state_values()
    tensors["exp_avg/b.lora_A.weight"] = torch.zeros(2, 5)

    with pytest.raises(OptimizerStateError, match=r"b\.lora_A\.weight"):
        optimizer.load_state(tensors, values)


def test_arguments_that_exclude_each_other_are_our_error():
    """What torch.optim finds wrong is said with the job's name."""
    job = job_with(optim="sgd", optim_args={"nesterov": True})

    with pytest.raises(OptimizerError, match="job") as caught:
        JobOptimizer(job, start(), STEPS)

    assert "momentum" in str(caught.value)


@pytest.fixture
def plain(monkeypatch):
    """Make an optimizer that updates parameters one by one, or by torch's default."""

    def make(*args: Any) -> JobOptimizer:
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "FUSED", {})
            return JobOptimizer(*args)

    return make


@pytest.mark.gpu
@FUSED
def test_one_kernel_updates_as_many_do(variant, plain):
    """Norms and five steps on a GPU are the same to float32."""
    job, one, other = (
        job_with(**variant),
        start(device="cuda", width=16),
        start(device="cuda", width=16),
    )
    fused = JobOptimizer(job, one, STEPS)

    norms = train(fused, one, 0, 5)

    assert fused.is_fused
    assert norms == pytest.approx(train(plain(job, other, STEPS), other, 0, 5), rel=1e-5)
    for name, param in one.items():
        torch.testing.assert_close(param, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["fused", "plain", "cpu"])
@FUSED
def test_a_checkpoint_goes_on_in_another_kind_of_optimizer(variant, first, plain, tmp_path):
    """Counters lie on the GPU for fused kernels and on the host for all others."""
    job, params = job_with(**variant), start(device="cpu" if first == "cpu" else "cuda", width=16)
    made = (plain if first == "plain" else JobOptimizer)(job, params, STEPS)
    train(made, params, 0, 3)
    tensors, values = through_files(made, tmp_path)
    rest = {name: param.detach().cpu().clone() for name, param in params.items()}
    train(made, params, 3, 6)

    for make, device in ((JobOptimizer, "cuda"), (plain, "cuda"), (JobOptimizer, "cpu")):
        again = start(device=device, width=16)
        with torch.no_grad():
            for name, param in again.items():
                param.copy_(rest[name])
        resumed = make(job, again, STEPS)
        resumed.load_state(tensors, values)
        train(resumed, again, 3, 6)
        for name, param in again.items():
            torch.testing.assert_close(param.cpu(), params[name].cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@FUSED
def test_where_a_view_begins_changes_no_bit_on_a_gpu(variant, dtype):
    """The neighbours' ranks decide it; kernels read several numbers at once where they can."""
    found = []
    for first in range(0, 32, 8):
        values, grads = torch.zeros(2, 1 << 17, device="cuda", dtype=dtype)
        draw = torch.Generator().manual_seed(1)
        params = {}
        for name, size in (("a", 1 << 16), ("b", 4000), ("c", 336)):
            drawn = torch.randn(size, generator=draw).to(values)
            params[name] = nn.Parameter(values[first:].narrow(0, 0, size))
            params[name].data.copy_(drawn)
            params[name].grad = grads[first:].narrow(0, 0, size)
            values, grads = values[first + size :], grads[first + size :]
        optimizer = JobOptimizer(job_with(**variant), params, STEPS)
        found.append((train(optimizer, params, 0, 5), *(p.detach() for p in params.values())))

    for norms, *rest in found[1:]:
        assert norms == found[0][0]
        assert all(torch.equal(one, two) for one, two in zip(rest, found[0][1:], strict=True))


NEEDED = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}
BAD: dict[str, dict[str, Any]] = {
    "power": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": -1.0}},
    "cycles": {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": "two"},
    },
    "infinite": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": math.inf}},
    "timescale": {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": -5}},
    "none": {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": "0"}},
    "negative": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": -1.0}},
    "epsilon": {"adam_epsilon": 0.0},
    "rate": {"learning_rate": 3e38},
    "decay": {"optim": "adafactor", "optim_args": {"beta2_decay": 0.8}},
    "eps": {"optim": "rmsprop", "optim_args": {"eps": 0.0}},
}


@pytest.mark.parametrize("variant", BAD)
def test_arguments_that_fail_at_any_step_are_refused_before_the_first(variant):
    """The job is named, and what raised or what the rate was."""
    with pytest.raises(OptimizerError) as told:
        require_trainable(job_with(**BAD[variant]), STEPS)
    assert told.value.facts["job"] == "job"
    assert "reason" in told.value.facts


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_that_train_are_not_refused(variant):
    """However many steps a job has, in either dtype of adapters."""
    job = job_with(**VARIANTS[variant])
    is_long = job.optim == "adamw" and job.loraplus_lr_ratio is None
    for steps in (1, STEPS, 10**30) if is_long else (1, STEPS):
        for dtype in ("float32", "bfloat16"):
            require_trainable(job_with(**VARIANTS[variant], adapter_dtype=dtype), steps)


def test_the_tried_rates_are_those_of_training():
    """Step by step, for every schedule that a job may name."""
    for name in SCHEDULE_ARGUMENTS:
        kwargs = NEEDED.get(name, {})
        job = job_with(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=2)
        optimizer = JobOptimizer(job, start(), STEPS)
        trained = []
        for _ in range(STEPS):
            trained.append(optimizer.learning_rate)
            optimizer.step()
        assert learning_rates(job, STEPS, range(STEPS)) == trained
