"""A base in 4 or 8 bits as a model of transformers: for generating, merging and comparing.

Compiling says which matrices are stored, so that an adapter meets the numbers that it was trained
on. A linear stays a linear by its class, by which PEFT knows it, and multiplies as the fused graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.model.backbone import load_backbone
from tlora_fx.ops.quantized import FORMS
from tlora_fx.runtime.adapters.files import canonical_names, plain_base


class _Stored(nn.Module):
    """A linear whose matrix is stored in a form.

    form    its name
    dtype   of the matrix before
    shape   [out, in]
    """

    form: str
    dtype: torch.dtype
    shape: list[int]
    bias: Tensor | None

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that are stored of the matrix."""
        return [self.get_buffer(f"weight_{name}") for name in FORMS[self.form].parts]

    @property
    def weight(self) -> Tensor:
        """The matrix as its form restores it."""
        return FORMS[self.form].dequantise(self.parts, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """As the frozen linear of the fused graph."""
        run = torch.ops.tlora_fx.quantized_linear
        y: Tensor = run(x, self.parts, self.bias, self.form, self.shape)
        return y


class _StoredLinear(_Stored, nn.Linear):  # type: ignore[misc, override]
    """A linear of torch."""


class _StoredConv1D(_Stored, Conv1D):  # type: ignore[misc]
    """A linear of GPT-2, whose matrix is [in, out]."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return super().weight.t()


_KINDS: Mapping[type, type[_Stored]] = {nn.Linear: _StoredLinear, Conv1D: _StoredConv1D}


def trained_base(
    jobs: Sequence[Job],
    base: nn.Module | None = None,
    device: torch.device | str = "cpu",
    *,
    restored: bool = False,
) -> nn.Module:
    """The base that jobs train on, as plain transformers has it, on a device.

    base       the model, which changes; None: it is loaded
    restored   matrices that are stored in fewer bits stand in the base's dtype, rounded
    raises     BaseNotLoadable, MissingPackageError
    """
    job, copied = jobs[0], modules_copied(jobs)
    backbone = load_backbone(job.base)
    model = plain_base(backbone) if base is None else base
    stored = _stored_names(job) if job.base.quantize else ()
    canonical = canonical_names(backbone)
    for path, module in list(model.named_modules()) if stored else ():
        stays = restored or path.rpartition(".")[2] in copied
        for name, _ in list(module.named_parameters(recurse=False)):
            if canonical[f"{path}.{name}".strip(".")] in stored:
                _store(module, name, str(job.base.quantize), device, restored=stays)
    return model.to(device)


def modules_copied(jobs: Sequence[Job]) -> set[str]:
    """Last names of modules that PEFT copies for a job, which trains the copy's matrix."""
    return {name for job in jobs for name in job.lora_fields.get("modules_to_save") or ()}


def _store(
    module: nn.Module, name: str, form: str, device: torch.device | str, *, restored: bool
) -> None:
    """Store a module's matrix in a form, on a device."""
    matrix = module.get_parameter(name).detach().to(device)
    whole = matrix.t() if isinstance(module, Conv1D) else matrix
    hold_parts(module, name, form, FORMS[form].quantise(whole.contiguous()), restored=restored)


def hold_parts(
    module: nn.Module, name: str, form: str, parts: Sequence[Tensor], *, restored: bool
) -> None:
    """Make a module multiply with the parts of a form in place of its matrix.

    restored   its matrix is what the parts restore, as it is of a module that is no linear
    """
    turned, matrix = isinstance(module, Conv1D), module.get_parameter(name)
    shape = list(matrix.shape[::-1] if turned else matrix.shape)
    kind = _KINDS.get(type(module))
    if restored or kind is None:
        whole = FORMS[form].dequantise(parts, shape, matrix.dtype)
        numbers = whole.t().contiguous() if turned else whole
        module._parameters[name] = nn.Parameter(numbers, requires_grad=False)
        return
    del module._parameters[name]
    for part, tensor in zip(FORMS[form].parts, parts, strict=True):
        module.register_buffer(f"weight_{part}", tensor, persistent=False)
    vars(module).update(form=form, dtype=matrix.dtype, shape=shape)
    module.__class__ = kind


def _stored_names(job: Job) -> set[str]:
    """The base's tensors that are stored in fewer bits, by canonical name.

    They are the same for all jobs: a job that reads one of them otherwise is refused.
    """
    lora = {"r": 1, "target_modules": "all-linear"}
    plain = {"name": job.name, "base": job.base, "lora": lora, "data": {"path": "unused"}}
    return compile([Job(**plain)]).reformed_names()
