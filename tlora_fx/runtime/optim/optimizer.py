"""One job's optimizer, learning rate schedule and gradient clipping.

Each job of a group has its own, and none of them reads anything of a neighbour. Parameters may be
views of storage that many jobs share, so nothing here replaces `.data` or `.grad`: gradients are
zeroed in place and updated in place.

A job has hundreds of small parameters, and on a GPU a launch for each costs more than its
arithmetic. So they are zeroed and measured together, by a list that is made once (`Gradients`), and
torch.optim does the step. Jobs with Adam on a GPU are updated all at once (`group_update`).

A job's parameters are one group of its optimizer; with LoRA+ they are up to four, by their rates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class, own_schedule
from tlora_fx.errors import JobError, OptimizerError, OptimizerStateError
from tlora_fx.runtime.adapters.starts import (
    FREEZES_A,
    constant_part,
    trained_parameters,
)
from tlora_fx.runtime.optim.rank_allocation import RankAllocation
from tlora_fx.runtime.optim.schedules import RecordedSchedule, lr_schedule, rate_groups

if TYPE_CHECKING:
    from tlora_fx.config.job import Job


# The gradients of a job's parameters, zeroed, measured and clipped together.
#
# torch.nn.utils looks every gradient up and sorts all by dtype at each call, which for hundreds of
# small ones costs the host more than the kernels cost a GPU. Here their list is made once; what
# the operators get, and in which order, is the same.

# CUDA's reductions read so many numbers at once where their address allows it.
_VECTOR = 4
# Where torch.nn.utils hands whole lists to an operator.
_LISTED = frozenset({"cpu", "cuda"})


class Gradients:
    """A list of gradients that holds as long as each parameter keeps its tensor (`holds`).

    params    parameters in the optimizer's order; those without a gradient are left out
    tensors   their gradients, the parameters' own tensors
    alike     all are plain tensors of one dtype on one device, so that an operator takes the list
              as it is; other lists are left to torch.nn.utils
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._all = list(params)
        self._found = [param.grad for param in self._all]
        self.params = [param for param in self._all if param.grad is not None]
        self.tensors = [gradient for gradient in self._found if gradient is not None]
        kinds = {(type(each), each.device, each.dtype) for each in self.tensors}
        self.alike = len(kinds) == 1 and all(
            kind is Tensor and device.type in _LISTED for kind, device, _ in kinds
        )
        # Which are measured in a copy, and in which dtype.
        self._moved = {
            place: _wide_dtype(each)
            for place, each in enumerate(self.tensors)
            if not _is_in_place(each)
        }
        self._dtype = torch.float32
        for each in self.tensors:
            self._dtype = torch.promote_types(self._dtype, each.dtype)

    def holds(self) -> bool:
        """Whether every parameter still has the gradient tensor that it had, or none."""
        return all(map(operator.is_, [param.grad for param in self._all], self._found))

    @torch.no_grad()
    def zero(self) -> None:
        """Fill every gradient with zeros, in place."""
        if self.tensors:
            torch._foreach_zero_(self.tensors)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm over all gradients, in float32 or the widest gradient's dtype.

        returns   [], on the gradients' device; nobody has waited for it
        """
        if not self.alike:
            return torch.nn.utils.get_total_norm(self._wide())
        norms = torch._foreach_norm(self._wide(), 2.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return total

    @torch.no_grad()
    def clip(self, norm: float, largest: float) -> None:
        """Scale all gradients by `largest / norm` where that is below 1."""
        if not self.tensors:
            return
        total = torch.tensor(norm, dtype=self._dtype, device=self.tensors[0].device)
        if not self.alike:
            torch.nn.utils.clip_grads_with_norm_(self.params, largest, total)
            return
        # The arithmetic of clip_grads_with_norm_, on the device and in the norm's dtype.
        scale = torch.clamp(largest / (total + 1e-6), max=1.0)
        torch._foreach_mul_(self.tensors, scale)

    def _wide(self) -> list[Tensor]:
        """The gradients in float32 at least, each where a vector may begin; copied together."""
        wide = list(self.tensors)
        for place, dtype in self._moved.items():
            wide[place] = torch.empty_like(wide[place], dtype=dtype)
        if self._moved:
            places = [wide[place] for place in self._moved]
            torch._foreach_copy_(places, [self.tensors[place] for place in self._moved])
        return wide


def _is_in_place(gradient: Tensor) -> bool:
    """Whether a gradient is measured where it lies, not in a copy.

    Where a job's view begins depends on its neighbours' ranks, and CUDA's reductions sum in
    another order on another alignment.
    """
    wide = _wide_dtype(gradient)
    return gradient.dtype == wide and gradient.data_ptr() % (_VECTOR * wide.itemsize) == 0


def _wide_dtype(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


# What one step may have otherwise than the job says.
OVERRIDABLE = ("lr", "weight_decay", "eps", "beta1", "beta2", "max_grad_norm")
_BETAS = ("beta1", "beta2")
# Options that only torch's own step knows.
_OTHERS = ("amsgrad", "maximize", "capturable", "differentiable")


# Counters that torch.optim keeps on the host, wherever the parameters are.
HOST_SCALARS = frozenset({"step", "mu_product"})
# Kernels that update all parameters at once, by the class that has them.
FUSED = {
    "Adam": "aten::_fused_adam_",
    "AdamW": "aten::_fused_adamw_",
    "SGD": "aten::_fused_sgd_",
}
# Rows of so many numbers begin where vectors may, whatever stands before them in a bank.
_ROW = 8


@dataclass(frozen=True, slots=True)
class AdamState:
    """One job's Adam, laid open.

    gradients          gradients of its parameters
    firsts, seconds    their moments
    options            torch.optim's, of which the rates change, for each group of parameters
    groups             the index of each parameter's group
    """

    gradients: Gradients
    firsts: list[Tensor]
    seconds: list[Tensor]
    options: Sequence[Mapping[str, Any]]
    groups: list[int]


class JobOptimizer:
    """A job's torch.optim optimizer, its schedule, and clipping by the job's own norm.

    job        names the optimizer, its arguments, the schedule and the largest gradient norm
    params     the job's trained parameters by name; their order is the optimizer's order
    steps      optimizer steps of the whole job, from which the schedule takes its length
    scalings   what each branch is multiplied with, by the name of its A; LoRA-FA reads them
    updates    that were done, those before a resume included
    raises     OptimizerError when the job's arguments do not fit its optimizer or schedule
    """

    def __init__(
        self,
        job: Job,
        params: Mapping[str, torch.nn.Parameter],
        steps: int,
        scalings: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._params = trained_parameters(job, params)
        self._constant = [
            part
            for name, param in params.items()
            if param.grad is not None and (part := constant_part(job, name, param.grad)) is not None
        ]
        #: Gradients are clipped to it; 0 for none.
        self.max_norm = job.max_grad_norm or 0.0
        #: What the optimizer knows of each: itself, or a copy in the layout that it needs.
        self._known = {name: _known_as(job, param) for name, param in self._params.items()}
        self._copies = [
            (param, self._known[name])
            for name, param in self._params.items()
            if self._known[name] is not param
        ]
        self._optimizer = _make_optimizer(job, rate_groups(job, self._known))
        #: Of a class of the user's own nothing is known but what torch.optim promises.
        self._is_own = isinstance(job.optim, UserFunction)
        self._first_options = [dict(group) for group in self._optimizer.param_groups]
        #: What `override` has set for all steps from then on.
        self._overridden: dict[str, float] = {}
        #: Groups that do not decay are biases and norms then.
        self._decays = job.weight_decay > 0
        if isinstance(self._optimizer, LoraFA):
            self._optimizer.down_of = self._down_of(params, scalings)
        self._allocation = RankAllocation.of(job, self._params)
        self._schedule = make_schedule(job, self._optimizer, steps)
        self._gradients = Gradients(self._params.values())
        self.updates = 0
        # Those by `GroupUpdate` that the counters of torch.optim's state do not have yet.
        self._uncounted = 0

    def _down_of(
        self, params: Mapping[str, nn.Parameter], scalings: Mapping[str, float]
    ) -> ProjectionOfB:
        """The A and the scaling of each B."""
        downs = {
            name: name.replace(".lora_B.", ".lora_A.") for name in params if ".lora_B." in name
        }
        return {
            self._known[up]: (params[down], scalings[down])
            for up, down in downs.items()
            if down in params
        }

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Parameters that it updates, by name."""
        return self._params

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def is_fused(self) -> bool:
        """Whether one kernel updates all parameters; it keeps its counters on the GPU."""
        return bool(self._optimizer.param_groups[0].get("fused"))

    def require_options(self, options: Mapping[str, float]) -> None:
        """Refuse what `override` cannot set.

        raises   OptimizerError
        """
        own = {*self._optimizer.param_groups[0], "max_grad_norm"}
        own |= set(_BETAS) if "betas" in own else set()
        known = [name for name in OVERRIDABLE if name in own]
        for name, value in options.items():
            limit = 1 if name in _BETAS else math.inf
            if name not in known or not 0 <= value < limit:
                raise OptimizerError(
                    "the optimizer does not take this for a step",
                    found=f"{name}={value}",
                    expected=f"finite and not negative, betas below 1: {', '.join(known)}",
                    help="other arguments are fixed when the optimizer is made: see optim_args",
                )

    def override(self, options: Mapping[str, float]) -> None:
        """Use other hyperparameters: `lr` for the next step alone, others from now on.

        options   checked by `require_options`. Groups with rates of their own, as LoRA+ has, keep
                  their ratio to the first
        """
        self._overridden |= {name: float(options[name]) for name in options if name != "lr"}
        groups = self._optimizer.param_groups
        # Of the schedule's rates, which may be 0 now.
        first = groups[0]["initial_lr"]
        ratios = [group["initial_lr"] / first if first else 1.0 for group in groups]
        self.max_norm = float(options.get("max_grad_norm", self.max_norm))
        plain = {k: float(v) for k, v in options.items() if k not in (*_BETAS, "max_grad_norm")}
        spared = {key: value for key, value in plain.items() if key != "weight_decay"}
        for group, ratio, first_options in zip(groups, ratios, self._first_options, strict=True):
            decays = first_options.get("weight_decay") or not self._decays
            group.update(plain if decays else spared)
            if not options.keys().isdisjoint(_BETAS):
                betas = zip(_BETAS, group["betas"], strict=True)
                group["betas"] = tuple(float(options.get(name, own)) for name, own in betas)
            if "lr" in options:
                group["lr"] = float(options["lr"]) * ratio

    def keep_to_schedule(self) -> None:
        """Forget the rate of a step that was not done: the next one has the schedule's."""
        rates = self._rates(self._schedule.last_epoch)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def zero_grad(self) -> None:
        """Fill every gradient with zeros, in place."""
        self._held_gradients().zero()
        self._forget_constant()

    @torch.no_grad()
    def _forget_constant(self) -> None:
        """Zero the gradients of what the job does not update."""
        if self._constant:
            torch._foreach_zero_(self._constant)

    def gradient_norm(self) -> float:
        """The 2-norm over all gradients of the job, in float32 or the widest gradient's dtype.

        It may be NaN or infinite: whoever calls decides what becomes of the job.
        """
        return float(self.measured_norm())

    def measured_norm(self) -> Tensor:
        """Result of `gradient_norm`, on the device: many jobs' need only one wait for it."""
        return self._held_gradients().norm()

    @torch.no_grad()
    def step(self, norm: float | None = None) -> float:
        """Clip, update the parameters, and advance the schedule.

        norm      result of `gradient_norm` for these gradients; measured when left out
        returns   the norm before clipping
        """
        if norm is None:
            norm = self.gradient_norm()
        self._count()
        gradients = self._held_gradients()
        if self.max_norm > 0:
            gradients.clip(norm, self.max_norm)
        for param, copy in self._copies:
            copy.copy_(param)
            copy.grad = None if param.grad is None else param.grad.contiguous()
        self._optimizer.step()
        for param, copy in self._copies:
            param.copy_(copy)
        if self._allocation is not None:
            self._allocation.update(self._schedule.last_epoch, self._states())
        self.updates += 1
        self._schedule.step()
        return norm

    @property
    def is_plain_adam(self) -> bool:
        """Whether a kernel that updates many jobs at once may be given this one's state."""
        if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        return (
            self._allocation is None
            and not self._is_own
            and all(
                bool(options["fused"])
                and not any(options[name] for name in _OTHERS)
                and isinstance(options["lr"], float)
                for options in self._optimizer.param_groups
            )
        )

    def adam(self) -> AdamState | None:
        """State for a kernel that updates many jobs at once; None where torch.optim is to do it.

        Each update that such a kernel does is told by `noted`.
        """
        gradients = self._held_gradients()
        if not (gradients.tensors and gradients.alike and self.is_plain_adam):
            return None
        fresh = []
        for param in gradients.params:
            if not self._optimizer.state[param]:
                # As torch.optim begins it.
                self._optimizer.state[param] = {
                    "step": torch.empty((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.empty_like(param, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.empty_like(param, memory_format=torch.preserve_format),
                }
                fresh += self._optimizer.state[param].values()
        if fresh:
            torch._foreach_zero_(fresh)
        states = [self._optimizer.state[param] for param in gradients.params]
        options = self._optimizer.param_groups
        group_of = {param: at for at, group in enumerate(options) for param in group["params"]}
        return AdamState(
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            options,
            [group_of[param] for param in gradients.params],
        )

    def noted(self, updates: int = 1) -> None:
        """Count updates that were done from outside, and take the schedule on; or back."""
        self._uncounted += updates
        self._forget_constant()
        self.updates += updates
        if updates > 0:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedules warn
            self._schedule.step()
        else:
            self._schedule.last_epoch += updates
            self._schedule._step_count += updates

    def _count(self) -> None:
        """Let the counters of torch.optim's state have all updates."""
        if self._uncounted:
            steps = [state["step"] for state in self._optimizer.state.values() if state]
            torch._foreach_add_(steps, self._uncounted)
            self._uncounted = 0

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `kind/parameter name`, such as `exp_avg/….lora_A.weight`."""
        self._count()
        return {
            f"{kind}/{name}": value
            for name, param in self._known.items()
            for kind, value in self._optimizer.state.get(param, {}).items()
            if isinstance(value, Tensor)
        }

    def state_values(self) -> dict[str, Any]:
        """State that is no tensor, JSON-able: counters, numbers by name, overrides."""
        values = {
            f"{kind}/{name}": value
            for name, param in self._known.items()
            for kind, value in self._optimizer.state.get(param, {}).items()
            if not isinstance(value, Tensor)
        }
        schedule = self._schedule.state_dict()
        kept = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        more: dict[str, Any] = {"groups": self._changed_options()} if self._is_own else {}
        if self._overridden:
            more["overridden"] = dict(self._overridden)
        return {"state": values, "schedule": {key: schedule[key] for key in kept}, **more}

    def _changed_options(self) -> list[dict[str, Any]]:
        """What an optimizer of the user's own has noted in its groups since it was made."""
        pairs = zip(self._optimizer.param_groups, self._first_options, strict=True)
        known = ("params", "lr", "initial_lr")
        return [
            {k: v for k, v in group.items() if k not in known and (k not in first or v != first[k])}
            for group, first in pairs
        ]

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `state_tensors` and `state_values` returned.

        The next step is then bitwise what it would have been without a stop, on the same kind of
        device.

        raises   OptimizerStateError when the state belongs to other parameters
        """
        entries = {**tensors, **values["state"]}
        states: dict[str, dict[str, Any]] = {}
        copies: list[Tensor] = []
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if name not in self._params:
                raise OptimizerStateError(
                    "the saved optimizer state belongs to other parameters",
                    expected=f"one of the job's {len(self._params)} trained parameters",
                    found=name,
                    help="resume with the jobs that the checkpoint was made with",
                )
            if isinstance(value, Tensor):
                copies.append(self._like(name, kind, value))
            states.setdefault(name, {})[kind] = copies[-1] if isinstance(value, Tensor) else value
        if copies:
            torch._foreach_copy_(copies, list(tensors.values()))
        for name, state in states.items():
            self._optimizer.state[self._known[name]] = state
        self._uncounted = 0
        if isinstance(self._optimizer, LoraFA):
            self._optimizer.forget()
        if self._allocation is not None:
            self._allocation.load(self._states())
        steps = [value.flatten() for key, value in tensors.items() if key.startswith("step/")]
        self.updates = int(torch.cat(steps).max()) if steps else 0
        groups = self._optimizer.param_groups
        for group, noted in zip(groups, values.get("groups", ()), strict=False):
            group.update(noted)
        self.override(values.get("overridden", {}))
        # The schedule's functions and rates come from the job file; only its counters are loaded.
        saved, own = values["schedule"], isinstance(self._schedule, RecordedSchedule)
        rates = self._rates(saved["last_epoch"])
        counters = {"last_epoch": saved["last_epoch"], "_step_count": saved["_step_count"]}
        functions = {} if own else {"lr_lambdas": [None] * len(groups)}
        self._schedule.load_state_dict({**counters, **functions, "_last_lr": rates})
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _states(self) -> dict[str, dict[str, Any]]:
        return {name: self._optimizer.state[param] for name, param in self._known.items()}

    def _rates(self, epoch: int) -> list[float]:
        """The rates of a step by the schedule as it is now, which may be longer than it was."""
        if isinstance(self._schedule, RecordedSchedule):
            return self._schedule.rates(epoch)
        pairs = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        return [float(base) * function(epoch) for base, function in pairs]

    def _like(self, name: str, kind: str, value: Tensor) -> Tensor:
        """An empty tensor for saved state of a parameter."""
        param = self._known[name]
        if kind in HOST_SCALARS:
            return torch.empty_like(value, device=param.device if self.is_fused else "cpu")
        if value.shape != param.shape:
            return torch.empty_like(value, device=param.device)
        # The memory layout that the optimizer itself would give it: kernels that read several
        # tensors at once choose their arithmetic by layout.
        return torch.empty_like(param, dtype=value.dtype).detach()

    def _held_gradients(self) -> Gradients:
        """The gradients as they are; lists of tensors that somebody replaced are made anew."""
        if not self._gradients.holds():
            self._gradients = Gradients(self._params.values())
        return self._gradients


# LoRA-FA: A stays as it starts, and B's gradient is projected so that W changes as near as it can
# to what W's own gradient asks for (Zhang and others 2023).

ProjectionOfB = Mapping[Tensor, tuple[Tensor, float]]
#: What PEFT adds to the diagonal of A A^T.
_RIDGE = 1e-8


class LoraFA(torch.optim.Optimizer):
    """The arithmetic of PEFT's LoraFAOptimizer, of which B's alone rounds to bfloat16.

    params    B of each pair, and what is no pair
    down_of   A [r, in] and the scaling of each B [out, r]
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        correct_bias: bool = True,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "correct_bias": correct_bias, **options})
        self.down_of: ProjectionOfB = {}
        self._projections: dict[Tensor, Tensor] = {}

    def forget(self) -> None:
        """A has other values now."""
        self._projections = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each group; `closure` is not called."""
        if not self._projections:
            self._projections = _projections(self.down_of)
        for group in self.param_groups:
            params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)

    def _update(self, params: list[Tensor], options: Mapping[str, Any]) -> None:
        grads: list[Tensor] = []
        for param in params:
            grad, projection = param.grad, self._projections.get(param)
            assert grad is not None
            grads.append(
                grad if projection is None else (grad.to(projection) @ projection).to(grad)
            )
            if not self.state[param]:
                self.state[param] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        states = [self.state[param] for param in params]
        firsts, seconds = ([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1)
        (beta1, beta2), rate = options["betas"], float(options["lr"])
        torch._foreach_mul_(firsts, beta1)
        torch._foreach_add_(firsts, grads, alpha=1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(seconds)
        torch._foreach_add_(roots, options["eps"])
        size, number = rate, int(states[0]["step"])
        if options["correct_bias"]:
            size *= math.sqrt(1 - beta2**number) / (1 - beta1**number)
        torch._foreach_addcdiv_(params, firsts, roots, -size)
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * options["weight_decay"])


def _projections(down_of: ProjectionOfB) -> dict[Tensor, Tensor]:
    """(A A^T)^-1 / s^2 for each B, [r, r], in float32 at least; those of one shape together."""
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    for up, (down, _) in down_of.items():
        alike.setdefault(tuple(down.shape), []).append(up)
    made: dict[Tensor, Tensor] = {}
    for (rank, _), ups in alike.items():
        stacked = torch.stack([down_of[up][0] for up in ups])
        wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        squares = wide @ wide.mT + _RIDGE * torch.eye(rank, dtype=wide.dtype, device=wide.device)
        inverses = torch.linalg.pinv(squares)
        made |= {
            up: inverse / down_of[up][1] ** 2 for up, inverse in zip(ups, inverses, strict=True)
        }
    return made


#: Optimizers that read memory as it lies, and replace what does not lie in rows.
_IN_ROWS = frozenset({"adamw_8bit"})


def _known_as(job: Job, param: nn.Parameter) -> nn.Parameter:
    """What an optimizer is given for a parameter: B is a transposed view of its bank.

    One of the user's own may replace its parameters, so it has copies.
    """
    if isinstance(job.optim, UserFunction):
        return nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    if job.optim not in _IN_ROWS or param.is_contiguous():
        return param
    return nn.Parameter(param.detach().contiguous())


def _make_optimizer(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    arguments = optimizer_arguments(job)
    make = cast(Any, LoraFA if job.optim in FREEZES_A else optimizer_class(job))
    made: torch.optim.Optimizer
    params = [param for group in groups for param in group["params"]]
    if isinstance(job.optim, UserFunction):
        return _own_optimizer(job, make, groups, params)
    if _has_fused(make.__name__, params):
        # What it refuses, the plain class takes, or says what is wrong.
        with suppress(TypeError, ValueError, RuntimeError):
            made = make(groups, **arguments, fused=True)
            return made
    with _refused(job, f"the optimizer '{job.optim}'", arguments, "optim_args"):
        made = make(groups, **arguments)
    return made


def _own_optimizer(
    job: Job, make: Callable[..., Any], groups: list[dict[str, Any]], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """What a class or a function of the user's makes; raises OptimizerError."""
    arguments, what = optimizer_arguments(job), f"the optimizer '{job.optim}'"
    with _refused(job, what, arguments, "optim_args", everything=True):
        made = make(groups, **arguments)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it made {type(made).__name__}, no torch.optim.Optimizer")
        held = {id(param) for group in made.param_groups for param in group["params"]}
        if held != {id(param) for param in params}:
            raise ValueError("it does not hold the parameters that it was given")
    return made


@contextmanager
def _refused(
    job: Job, what: str, arguments: Mapping[str, Any], field: str, *, everything: bool = False
) -> Iterator[None]:
    """Arguments that a library refuses are the job's mistake; raises OptimizerError.

    everything    the user's own code may raise anything
    """
    known = (ArithmeticError, AssertionError, TypeError, ValueError)
    try:
        yield
    except (JobError, OptimizerError):
        raise
    except Exception as error:
        if not (everything or isinstance(error, known)):
            raise
        raise OptimizerError(
            f"{what} does not take its arguments",
            job=job.name,
            found=arguments,
            reason=error,
            help=f"mend the job's {field}",
        ) from error


def _has_fused(name: str, params: list[torch.nn.Parameter]) -> bool:
    """Whether this torch has a kernel for all of these parameters; never on the CPU.

    The kernels' arithmetic depends on whether a view begins on a vector's boundary, which
    neighbours' ranks decide where rows are no multiple of vectors.
    """
    kernel = FUSED.get(name)
    return (
        kernel is not None
        and torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CUDA")
        and all(param.is_cuda and param.is_floating_point() for param in params)
        and all(_row_of(param) % _ROW == 0 for param in params)
    )


def _row_of(param: Tensor) -> int:
    """How many numbers of a parameter lie in a run that is never parted."""
    runs = [n for n, step in zip(param.shape, param.stride(), strict=True) if step == 1]
    return max(runs, default=1)


def make_schedule(
    job: Job, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR | RecordedSchedule:
    """A job's schedule, over all of its steps.

    raises   OptimizerError when the job's arguments do not fit it
    """
    arguments = dict(job.lr_scheduler_kwargs)
    title = f"the schedule '{job.lr_scheduler_type}'"
    if isinstance(job.lr_scheduler_type, UserFunction):
        with _refused(job, title, arguments, "lr_scheduler_kwargs", everything=True):
            return RecordedSchedule(optimizer, lambda own: own_schedule(job, own, steps))
    with _refused(job, title, arguments, "lr_scheduler_kwargs"):
        return lr_schedule(job.lr_scheduler_type, optimizer, job.warmup(steps), steps, arguments)
