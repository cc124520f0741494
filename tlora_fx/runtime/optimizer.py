"""One job's optimizer, learning rate schedule and gradient clipping.

Each job of a group has its own, and none of them reads anything of a neighbour. Parameters may be
views of storage that many jobs share, so nothing here replaces `.data` or `.grad`: gradients are
zeroed in place and updated in place.

A job has hundreds of small parameters, and on a GPU a launch for each costs more than its
arithmetic. So they are zeroed, measured and updated together, by lists of them that are made once
(`gradients`, `fused_adam`); every other optimizer does its own step.

A job's parameters are one group of its optimizer; with LoRA+ they are up to four, by their rates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tlora_fx.errors import OptimizerError, OptimizerStateError
from tlora_fx.runtime.starts import constant_part, trained_parameters

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


# The step of torch.optim's fused Adam and AdamW, over lists that are made once.
#
# `Optimizer.step` looks up every parameter's gradient, moments and counter and sorts them by dtype
# on each step: for hundreds of small parameters a few milliseconds of the host, while a GPU needs
# a tenth of one. The optimizer stays the owner of state and options; this holds its tensors in the
# lists that its kernel takes.

# What the kernels take; where a torch has others, its own step calls them.
_ARGUMENTS = (
    "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay eps "
    "amsgrad maximize grad_scale found_inf"
)
# Options that only torch's own step knows.
_OTHERS = ("amsgrad", "maximize", "capturable", "differentiable")


def fused_adam(optimizer: torch.optim.Optimizer, gradients: Gradients) -> Callable[[], None] | None:
    """The optimizer's step over lists, bitwise what its own `step` does; options may change.

    gradients   of the optimizer's parameters; the step reads these tensors for good
    returns     None where it is to be left to the optimizer: other optimizers, options and versions
                of torch, tensors of several dtypes or devices, and before the first step, which
                makes the state
    """
    if not (is_plain_adam(optimizer) and gradients.alike):
        return None
    tensor_of = dict(zip(gradients.params, gradients.tensors, strict=True))
    steps = [
        _fused_step(optimizer, options, [p for p in options["params"] if p in tensor_of], tensor_of)
        for options in optimizer.param_groups
    ]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None

    def step() -> None:
        for each in known:
            each()

    return step


def _fused_step(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    params: list[nn.Parameter],
    gradient_of: Mapping[nn.Parameter, Tensor],
) -> Callable[[], None] | None:
    """The step of those parameters of a group that have gradients; None as `fused_adam`."""
    if not params:
        return lambda: None
    states = [optimizer.state.get(param, {}) for param in params]
    if not (all(states) and _is_known(options)):
        return None
    moments = [[state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq")]
    lists: list[list[Tensor]] = [[*params], [gradient_of[param] for param in params], *moments]
    steps = [state["step"] for state in states]
    kinds = {(each.device, each.dtype) for each in chain(*lists)}
    if len(kinds) > 1 or {each.device for each in steps} != {device for device, _ in kinds}:
        return None
    kernel = getattr(torch, _kernel_of(options))

    @torch.no_grad()
    def step() -> None:
        beta1, beta2 = options["betas"]
        torch._foreach_add_(steps, 1)
        kernel(
            *lists,
            [],
            steps,
            amsgrad=False,
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    return step


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a fused Adam or AdamW with no option that only torch's own step knows."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        bool(options["fused"])
        and not any(options[name] for name in _OTHERS)
        and isinstance(options["lr"], float)
        for options in optimizer.param_groups
    )


def _kernel_of(options: dict[str, Any]) -> str:
    return "_fused_adamw_" if options["decoupled_weight_decay"] else "_fused_adam_"


def _is_known(options: dict[str, Any]) -> bool:
    """Whether this torch has the kernel, with the arguments that we give it."""
    name = _kernel_of(options)
    operator = getattr(torch.ops.aten, name, None)
    if operator is None or not hasattr(torch, name):
        return False
    arguments = operator.default._schema.arguments
    return " ".join(argument.name for argument in arguments) == _ARGUMENTS


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

    gradients          of its parameters
    firsts, seconds    their moments
    options            torch.optim's, of which the rates change, for each group of parameters
    groups             the index of each parameter's group
    max_norm           gradients are clipped to it; 0 for none
    """

    gradients: Gradients
    firsts: list[Tensor]
    seconds: list[Tensor]
    options: Sequence[Mapping[str, Any]]
    groups: list[int]
    max_norm: float


class JobOptimizer:
    """A job's torch.optim optimizer, its schedule, and clipping by the job's own norm.

    job      names the optimizer, its arguments, the schedule and the largest gradient norm
    params   the job's trained parameters by name; their order is the optimizer's order
    steps    optimizer steps of the whole job, from which the schedule takes its length
    updates  that were done, those before a resume included
    raises   OptimizerError when the job's arguments do not fit its optimizer or schedule
    """

    def __init__(self, job: Job, params: Mapping[str, torch.nn.Parameter], steps: int) -> None:
        self._params = trained_parameters(job, params)
        self._constant = [
            part
            for name, param in params.items()
            if param.grad is not None and (part := constant_part(job, name, param.grad)) is not None
        ]
        self._max_norm = job.max_grad_norm or 0.0
        #: What the optimizer knows of each: itself, or a copy in the layout that it needs.
        self._known = {name: _known_as(job, param) for name, param in self._params.items()}
        self._copies = [
            (param, self._known[name])
            for name, param in self._params.items()
            if self._known[name] is not param
        ]
        self._optimizer = _make_optimizer(job, _groups(job, self._known))
        self._schedule = _make_schedule(job, self._optimizer, steps)
        self._gradients = Gradients(self._params.values())
        self._fused: Callable[[], None] | None = None
        self.updates = 0
        # Those by `GroupUpdate` that the counters of torch.optim's state do not have yet.
        self._uncounted = 0

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def is_fused(self) -> bool:
        """Whether one kernel updates all parameters; it keeps its counters on the GPU."""
        return bool(self._optimizer.param_groups[0].get("fused"))

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
        """What `gradient_norm` returns, on the device: many jobs' need only one wait for it."""
        return self._held_gradients().norm()

    @torch.no_grad()
    def step(self, norm: float | None = None) -> float:
        """Clip, update the parameters, and advance the schedule.

        norm      what `gradient_norm` returned for these gradients; measured when left out
        returns   the norm before clipping
        """
        if norm is None:
            norm = self.gradient_norm()
        self._count()
        gradients = self._held_gradients()
        if self._max_norm > 0:
            gradients.clip(norm, self._max_norm)
        self._fused = self._fused or fused_adam(self._optimizer, gradients)
        for param, copy in self._copies:
            copy.copy_(param)
            copy.grad = None if param.grad is None else param.grad.contiguous()
        (self._fused or self._optimizer.step)()
        for param, copy in self._copies:
            param.copy_(copy)
        self.updates += 1
        self._schedule.step()
        return norm

    def adam(self) -> AdamState | None:
        """What a kernel needs that updates many jobs at once; None where torch.optim is to do it.

        Each update that such a kernel does is told by `noted`.
        """
        gradients = self._held_gradients()
        if not (gradients.tensors and gradients.alike and is_plain_adam(self._optimizer)):
            return None
        for param in gradients.params:
            if not self._optimizer.state[param]:
                # As torch.optim begins it.
                self._optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
                }
        states = [self._optimizer.state[param] for param in gradients.params]
        options = self._optimizer.param_groups
        group_of = {param: at for at, group in enumerate(options) for param in group["params"]}
        return AdamState(
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            options,
            [group_of[param] for param in gradients.params],
            self._max_norm,
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
        """What is not a tensor, JSON-able: the schedule's counters, and plain numbers by name."""
        values = {
            f"{kind}/{name}": value
            for name, param in self._known.items()
            for kind, value in self._optimizer.state.get(param, {}).items()
            if not isinstance(value, Tensor)
        }
        schedule = self._schedule.state_dict()
        kept = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        return {"state": values, "schedule": {key: schedule[key] for key in kept}}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `state_tensors` and `state_values` returned.

        The next step is then bitwise what it would have been without a stop, on the same kind of
        device.

        raises   OptimizerStateError when the state belongs to other parameters
        """
        entries = {**tensors, **values["state"]}
        states: dict[str, dict[str, Any]] = {}
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if name not in self._params:
                raise OptimizerStateError(
                    "the saved optimizer state belongs to other parameters",
                    expected=f"one of the job's {len(self._params)} trained parameters",
                    found=name,
                    help="resume with the job file that the checkpoint was made with",
                )
            states.setdefault(name, {})[kind] = self._restored(name, kind, value)
        for name, state in states.items():
            self._optimizer.state[self._known[name]] = state
        self._fused, self._uncounted = None, 0
        self.updates = max((int(v) for k, v in tensors.items() if k.startswith("step/")), default=0)
        groups = self._optimizer.param_groups
        # The schedule's functions come from the job file; only their counters are saved.
        schedule = {**values["schedule"], "lr_lambdas": [None] * len(groups)}
        self._schedule.load_state_dict(schedule)
        for group, rate in zip(groups, self._rates(values["schedule"]), strict=True):
            group["lr"] = rate

    def _rates(self, saved: Mapping[str, Any]) -> list[float]:
        """The rates to go on with: by the schedule as it is now, which may be longer than then."""
        functions = getattr(self._schedule, "lr_lambdas", None)
        if functions is None:
            return list(saved["_last_lr"])
        pairs = zip(saved["base_lrs"], functions, strict=True)
        return [base * function(saved["last_epoch"]) for base, function in pairs]

    def _restored(self, name: str, kind: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        param = self._known[name]
        if kind in HOST_SCALARS:
            return value.to(param.device if self.is_fused else "cpu", copy=True)
        if value.shape != param.shape:
            return value.to(param.device, copy=True)
        # The memory layout that the optimizer itself would give it: kernels that read several
        # tensors at once choose their arithmetic by layout.
        return torch.empty_like(param, dtype=value.dtype).copy_(value).detach()

    def _held_gradients(self) -> Gradients:
        """The gradients as they are; lists of tensors that somebody replaced are made anew."""
        if not self._gradients.holds():
            self._gradients, self._fused = Gradients(self._params.values()), None
        return self._gradients


# LoRA+: B learns at a multiple of A's rate (Hayou, Ghosh and Yu 2024). Groups and their options are
# those of PEFT's create_loraplus_optimizer, which is given the job's weight decay.

#: PEFT's rate of adapters on embeddings.
EMBEDDING_RATE = 1e-6
_Group = dict[str, Any]


def _groups(job: Job, params: Mapping[str, nn.Parameter]) -> list[_Group]:
    """A job's parameters by their rates; one group without LoRA+."""
    if job.loraplus_lr_ratio is None:
        return [{"params": list(params.values())}]
    rate, decay = job.learning_rate, job.weight_decay
    embedding_rate = job.loraplus_lr_embedding or EMBEDDING_RATE
    options: dict[str, _Group] = {
        "A": {"lr": rate, "weight_decay": decay},
        "embedding": {"lr": embedding_rate, "weight_decay": decay},
        "B": {"lr": rate * job.loraplus_lr_ratio, "weight_decay": decay},
        "bias": {"lr": rate * job.loraplus_lr_ratio, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in options}
    for name, param in params.items():
        members[_kind_of(name, param)].append(param)
    return [{"params": own, **options[kind]} for kind, own in members.items() if own]


def _kind_of(name: str, param: Tensor) -> str:
    if ".lora_embedding_" in name:
        return "embedding"
    if ".lora_B." in name or param.dim() == 1:
        return "bias" if "bias" in name else "B"
    return "A"


#: Optimizers that read memory as it lies, and replace what does not lie in rows.
_IN_ROWS = frozenset({"adamw_8bit"})


def _known_as(job: Job, param: nn.Parameter) -> nn.Parameter:
    """What an optimizer is given for a parameter: B is a transposed view of its bank."""
    if job.optim not in _IN_ROWS or param.is_contiguous():
        return param
    return nn.Parameter(param.detach().contiguous())


def _make_optimizer(job: Job, groups: list[_Group]) -> torch.optim.Optimizer:
    arguments, make = job.optimizer_arguments(), cast(Any, job.optimizer_class())
    made: torch.optim.Optimizer
    params = [param for group in groups for param in group["params"]]
    if _has_fused(make.__name__, params):
        # What it refuses, the plain class takes, or says what is wrong.
        with suppress(TypeError, ValueError, RuntimeError):
            made = make(groups, **arguments, fused=True)
            return made
    try:
        made = make(groups, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise OptimizerError(
            f"the optimizer '{job.optim}' does not take its arguments",
            job=job.name,
            found=arguments,
            reason=error,
            help="mend optim_args in the job file",
        ) from error
    return made


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


# Arguments that fail late are tried early: schedules are functions of the step, and optimizers do
# with four numbers what they do with millions.

#: Steps whose rates are tried, of a job that has more: the first, the last, and others between.
TRIED_STEPS = 100_000
#: Steps on the toy parameter; RAdam changes its formula at the sixth.
TOY_STEPS = 12
#: Counters of steps are float32, which counts no further.
_LARGEST_COUNT = 2**24
_WHAT_FAILS = (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError)


def require_trainable(job: Job, steps: int) -> None:
    """Try a job's optimizer and schedule before anything is trained.

    The schedule has to have a rate for every step; the optimizer does some steps on a toy
    parameter, at the first rates, the largest and the last, and its numbers have to stay finite.

    steps    optimizer steps of the whole job
    raises   OptimizerError
    """
    # After its last step a job asks for one more rate.
    rates = learning_rates(job, steps, _tried(steps))
    toy = nn.Parameter(torch.tensor([[1.0, 0.0], [-0.5, 0.0]], dtype=_dtype_of(job)))
    # B starts as zeros, so the first gradients of A are zeros; some of B may stay so.
    gradient = torch.tensor([[0.0, 1.0], [-0.5, 0.0]], dtype=toy.dtype)
    toy.grad = torch.zeros_like(toy)
    optimizer = JobOptimizer(job, {"toy.lora_B.weight": toy}, steps)
    inner, ratio = optimizer._optimizer, job.loraplus_lr_ratio or 1.0
    for number in range(min(steps, TOY_STEPS) + 2):
        if number == min(steps, TOY_STEPS):
            inner.param_groups[0]["lr"] = max(rates) * ratio
        elif number > TOY_STEPS:
            inner.param_groups[0]["lr"] = rates[-2] * ratio
            for value in inner.state[toy].values():
                if isinstance(value, Tensor) and not value.dim():
                    value.fill_(max(float(value), float(min(steps - 1, _LARGEST_COUNT))))
        toy.grad.copy_(gradient)
        rate = inner.param_groups[0]["lr"]
        try:
            optimizer.step()
            reason = "" if toy.isfinite().all() else f"a rate of {rate:g} leaves {toy.tolist()}"
        except _WHAT_FAILS as error:
            reason = f"a rate of {rate:g}: {type(error).__name__}: {error}"
        if reason:
            raise OptimizerError(
                f"the optimizer '{job.optim}' cannot train with its arguments",
                job=job.name,
                found=job.optimizer_arguments(),
                reason=reason,
                help="mend learning_rate, loraplus_lr_ratio, adam_epsilon, weight_decay or "
                "optim_args",
            )


def _tried(steps: int) -> list[int]:
    """Steps to try, in order, the last one and the one after it included."""
    if steps <= TRIED_STEPS:
        return list(range(steps + 1))
    part = TRIED_STEPS // 4
    spread = (steps * number // (2 * part) for number in range(2 * part))
    return sorted({*range(part), *spread, *range(steps + 1 - part, steps + 1)})


def _dtype_of(job: Job) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, job.adapter_dtype)
    return dtype


def learning_rates(job: Job, total: int, steps: Iterable[int]) -> list[float]:
    """The rates of some optimizer steps, counted from 0, where a job has `total` of them.

    raises   OptimizerError where the schedule has no rate for one
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=job.learning_rate)
    function = _make_schedule(job, optimizer, total).lr_lambdas[0]
    rates = []
    for step in steps:
        try:
            rate = job.learning_rate * function(step)
        except _WHAT_FAILS as error:
            raise _no_rate(job, step, total, f"{type(error).__name__}: {error}") from error
        if not isinstance(rate, float | int) or not 0 <= rate < math.inf:
            raise _no_rate(job, step, total, f"a rate of {rate}")
        rates.append(float(rate))
    return rates


def _no_rate(job: Job, step: int, total: int, reason: str) -> OptimizerError:
    return OptimizerError(
        f"the schedule '{job.lr_scheduler_type}' has no rate for a step",
        job=job.name,
        step=f"{step + 1} of {total}" if step < total else f"after the last of {total}",
        found=dict(job.lr_scheduler_kwargs) or f"{job.warmup(total)} steps of warmup",
        reason=reason,
        help="mend lr_scheduler_kwargs or the warmup in the job file",
    )


def _make_schedule(
    job: Job, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    from transformers import get_scheduler

    arguments = dict(job.lr_scheduler_kwargs)
    try:
        schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
            job.lr_scheduler_type, optimizer, job.warmup(steps), steps, arguments
        )
    except (ArithmeticError, TypeError, ValueError) as error:
        raise OptimizerError(
            f"the schedule '{job.lr_scheduler_type}' does not take its arguments",
            job=job.name,
            found=arguments,
            reason=error,
            help="mend lr_scheduler_kwargs in the job file",
        ) from error
    return schedule
