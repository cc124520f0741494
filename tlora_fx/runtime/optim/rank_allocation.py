"""AdaLoRA: ranks move between the modules of a job while it trains, by PEFT's own allocator.

A branch is B (E * A), with a number in E for each rank. PEFT scores all ranks of a job by its
parameters and gradients after each step, and sets E to zero where a budget that shrinks has none
left. Tensors keep their shapes, and every number of this is the job's own.

source   Zhang and others 2023; PEFT's AdaLoraModel and RankAllocator
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of

#: What the allocator keeps of each tensor between steps; a job's checkpoint has it.
_AVERAGES = ("exp_avg_ipt", "exp_avg_unc")
#: And, once ranks move no more, which of E stay: bool [r, 1].
_KEPT = "kept"
_REGULARISED = (".lora_A.", ".lora_B.")
State = dict[str, Any]


class RankAllocation:
    """PEFT's allocator over one job's tensors.

    job      job with AdaLoRA
    params   its trained parameters by PEFT's names, with their gradients
    """

    def __init__(self, job: Job, params: Mapping[str, nn.Parameter]) -> None:
        from peft.tuners.adalora.layer import RankAllocator

        self._config: Any = copy.deepcopy(job.lora_config())
        self._trained = {name: param for name, param in params.items() if param.grad is not None}
        model = SimpleNamespace(named_parameters=self._trained.items)
        make: Any = RankAllocator
        self._allocator = make(model, self._config, "default")
        self._tuner = SimpleNamespace(
            model=model,
            peft_config={"default": self._config},
            trainable_adapter_name="default",
            rankallocator=self._allocator,
        )

    @staticmethod
    def of(job: Job, params: Mapping[str, nn.Parameter]) -> RankAllocation | None:
        """The allocation of a job whose ranks move; None for others."""
        return RankAllocation(job, params) if any(".lora_E." in name for name in params) else None

    def load(self, states: Mapping[str, State]) -> None:
        """Go on from what `update` left in the optimizer's state, by the parameters' names."""
        for kind in _AVERAGES:
            known = {name: state[kind] for name, state in states.items() if kind in state}
            setattr(self._allocator, kind, known)
        self._allocator.ipt = dict(self._allocator.exp_avg_ipt)
        kept = {name: state[_KEPT] for name, state in states.items() if _KEPT in state}
        self._config.rank_pattern = {k: mask.view(-1).tolist() for k, mask in kept.items()} or None

    @torch.no_grad()
    def update(self, step: int, states: Mapping[str, State]) -> None:
        """Score the ranks after an optimizer step, and zero those that the budget has no place for.

        step     counted from 0
        states   the optimizer's, by the parameters' names; takes what the next step needs
        """
        from peft import AdaLoraModel

        allocate: Any = AdaLoraModel.update_and_allocate
        allocate(self._tuner, step)
        ends = step >= self._config.total_step - self._config.tfinal
        for name, state in states.items():
            for kind in _AVERAGES:
                averages = getattr(self._allocator, kind)
                if name in averages:
                    state[kind] = averages[name]
                else:
                    state.pop(kind, None)
            if ends and _KEPT not in state and name in self._config.rank_pattern:
                mask = torch.tensor(self._config.rank_pattern[name]).unsqueeze(1)
                state[_KEPT] = mask.to(self._trained[name].device)


def regularise(job: Job, params: Mapping[str, nn.Parameter]) -> None:
    """Add the gradient of PEFT's regulariser to a job's, once a step; for jobs of AdaLoRA.

    params   parameters of a job, by PEFT's names; A [r, in], B [out, r]
    """
    if kind_of(job.lora_fields) != "ADALORA":
        return
    mine = [
        (name, param)
        for name, param in params.items()
        if param.grad is not None and any(part in name for part in _REGULARISED)
    ]
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    with torch.enable_grad():
        for name, param in mine:
            rows = param if _REGULARISED[0] in name else param.mT
            alike.setdefault(tuple(rows.shape), []).append(rows)
        distance = torch.zeros(())
        for some in alike.values():
            rows = torch.stack(some)
            apart = rows @ rows.mT - torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
            distance = distance.to(apart) + torch.linalg.matrix_norm(apart).sum()
        weight = job.lora_fields.get("orth_reg_weight", 0.5) / max(len(mine), 1)
        if not (mine and weight):
            return
        gradients = torch.autograd.grad(weight * distance, [param for _, param in mine])
    for (_, param), gradient in zip(mine, gradients, strict=True):
        assert param.grad is not None
        param.grad.add_(gradient)
