"""The step of torch.optim's fused Adam and AdamW, over lists that are made once.

`Optimizer.step` looks up every parameter's gradient, moments and counter and sorts them by dtype
on each step: for hundreds of small parameters a few milliseconds of the host, while a GPU needs a
tenth of one. The optimizer stays the owner of state and options; this holds its tensors in the
lists that its kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tlora_fx.runtime.gradients import Gradients

# What the kernels take; where a torch has others, its own step calls them.
_ARGUMENTS = (
    "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay eps "
    "amsgrad maximize grad_scale found_inf"
)
# Options that only torch's own step knows.
_OTHERS = ("amsgrad", "maximize", "capturable", "differentiable")


class FusedAdam:
    """One step of an optimizer, bitwise what its own `step` does; see `fused_adam`.

    lists   parameters, gradients, both moments, each of one length, dtype and device
    steps   the counters, as many, on the same device
    """

    def __init__(
        self, options: dict[str, Any], lists: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        self._options, self._lists, self._steps = options, lists, steps
        self._kernel = getattr(torch, _kernel_of(options))

    @torch.no_grad()
    def step(self) -> None:
        """Count, and update parameters and moments in place, with the options as they are now."""
        options = self._options
        beta1, beta2 = options["betas"]
        torch._foreach_add_(self._steps, 1)
        self._kernel(
            *self._lists,
            [],
            self._steps,
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


def fused_adam(optimizer: torch.optim.Optimizer, gradients: Gradients) -> FusedAdam | None:
    """The optimizer's step over lists, or None where it is to be left to the optimizer.

    gradients   of the optimizer's parameters; the step reads these tensors for good
    returns     None for other optimizers, options and versions of torch, for tensors of several
                dtypes or devices, and before the first step, which makes the state
    """
    options = optimizer.param_groups[0]
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not options["fused"]:
        return None
    if len(optimizer.param_groups) > 1 or any(options[name] for name in _OTHERS):
        return None
    if not (gradients.alike and isinstance(options["lr"], float) and _is_known(options)):
        return None
    params = gradients.params
    states = [optimizer.state.get(param, {}) for param in params]
    if not all(states):
        return None
    moments = [[state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq")]
    lists: list[list[Tensor]] = [[*params], gradients.tensors, *moments]
    steps = [state["step"] for state in states]
    kinds = {(each.device, each.dtype) for each in chain(*lists)}
    if len(kinds) > 1 or {each.device for each in steps} != {device for device, _ in kinds}:
        return None
    return FusedAdam(options, lists, steps)


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
