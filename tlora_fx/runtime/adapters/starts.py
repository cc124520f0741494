"""Starts that PEFT computes from the base's weights, and those that take a part of them away.

PiSSA and OLoRA give a job A0 and B0 made of a weight W, and train beside W - s B0 A0. The base is
shared, so it stays as it is, and the job has a constant branch in place of the change:

    (W - s B0 A0) x + s B A x  =  W x + s [B, -B0] [A; A0] x

The bank holds both branches as one adapter of twice the rank, which is also what PEFT saves for
such a job with `path_initial_model_for_weight_conversion`. The second half is never updated.

source   Meng, Wang and Zhang 2024 (PiSSA); Büyükakyüz 2024 (OLoRA); PEFT's own code computes both
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.config.fields import DATA_STARTS
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import is_frozen
from tlora_fx.ir.graph import AdapterSite
from tlora_fx.ops import site_id

#: The dtypes whose matrices PEFT decomposes.
_DECOMPOSED = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Optimizers that leave A as it starts.
FREEZES_A = frozenset({"lorafa"})


def needs_data(job: Job) -> bool:
    """Whether a job's start is made of its own samples."""
    return job.lora is not None and job.lora.get("init_lora_weights") in DATA_STARTS


def trained_part(job: Job, name: str, tensor: Tensor) -> Tensor:
    """Updated part of one of a job's tensors: all, the first half of its rank, or nothing.

    name     PEFT's
    tensor   A [r, in], B [out, r], or another; the result is a view
    """
    return _split(job, name, tensor)[0]


def constant_part(job: Job, name: str, tensor: Tensor) -> Tensor | None:
    """The rest of what `trained_part` leaves, a view; None where nothing is left."""
    return _split(job, name, tensor)[1]


def _split(job: Job, name: str, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    dimension = 0 if ".lora_A." in name else 1 if ".lora_B." in name else None
    if dimension is None and is_frozen(job.lora_fields, name):
        return tensor.narrow(0, 0, 0), tensor
    if dimension is None or tensor.dim() == 1:  # `lora_bias` trains a vector beside B.
        return tensor, None
    size = tensor.shape[dimension]
    trained = size // 2 if job.changes_base else size
    if dimension == 0 and job.optim in FREEZES_A:
        trained = 0
    rest = size - trained
    if not rest:
        return tensor, None
    return tensor.narrow(dimension, 0, trained), tensor.narrow(dimension, trained, rest)


def trained_parameters(job: Job, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters that an optimizer updates, or views of parts that have views of gradients."""
    trained = {}
    for name, parameter in parameters.items():
        part = trained_part(job, name, parameter.data)
        if part.shape == parameter.shape:
            trained[name] = parameter
        elif part.numel():
            trained[name] = nn.Parameter(part)
            if parameter.grad is not None:
                trained[name].grad = trained_part(job, name, parameter.grad)
    return trained


@torch.no_grad()
def start_of_kind(job: Job, config: Any, layer: nn.Module, path: str) -> dict[str, Tensor]:
    """Start values of PEFT's module of a kind beside LoRA on one module, by names in a model.

    config   the job's, with its target modules spelled out
    layer    the module of the base, of which only the class and shape count
    path     of that module, which PEFT's patterns are matched with
    returns  on the CPU, bitwise a function of the path, the config and the job's seed; what is
             frozen too
    """
    from peft import get_peft_model

    root: Any = nn.Module()
    holder = root
    *parts, last = path.split(".")
    for part in parts:
        child = nn.Module()
        holder.add_module(part, child)
        holder = child
    holder.add_module(last, _hollow(layer))
    alone = copy.deepcopy(config)
    alone.modules_to_save = alone.task_type = None
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed((job.seed << 31) + site_id(path))
        wrapped = get_peft_model(root, alone)
    return {
        name: parameter.detach()
        for name, parameter in wrapped.named_parameters()
        if ".base_layer." not in name
    }


def _hollow(layer: nn.Module) -> nn.Module:
    """A module of this class and these shapes on the CPU, whose frozen numbers take no memory."""
    hollow = copy.deepcopy(layer)
    for name, parameter in hollow._parameters.items():
        if parameter is not None:
            one = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            hollow._parameters[name] = nn.Parameter(one, requires_grad=False)
    return hollow


@torch.no_grad()
def computed_start(
    job: Job, layer: nn.Module, weight: Tensor, site: AdapterSite, eigens: Any = None
) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] as PEFT starts them, with the constant half behind where it is one.

    layer    the module of the base, of which only the class and shape count
    weight   its whole weight, as the layer stores it
    eigens   of CorDA alone: what PEFT's `preprocess_corda` leaves at the layer
    returns  on the weight's device; bitwise a function of weight, site and the job's seed
    """
    from peft import inject_adapter_in_model

    config: Any = job.start_config()
    rank = site.rank // 2 if job.changes_base else site.rank
    config.target_modules, config.exclude_modules = {"site"}, None
    config.layers_to_transform = config.layers_pattern = config.modules_to_save = None
    config.rank_pattern, config.alpha_pattern, config.bias = {}, {}, "none"
    config.r, config.lora_alpha, config.use_rslora = rank, site.scaling * rank, False
    holder: Any = nn.Module()
    holder.site = copy.deepcopy(layer)
    frozen = weight if weight.dtype in _DECOMPOSED else weight.float()
    holder.site.weight = nn.Parameter(frozen.clone(), requires_grad=False)
    if eigens is not None:
        holder.site.eigens = eigens
    devices = [weight.device] if weight.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed((job.seed << 31) + site_id(site.path))
        inject_adapter_in_model(config, holder)
    a, b = (getattr(holder.site, half)["default"].weight.detach() for half in ("lora_A", "lora_B"))
    if not job.changes_base:
        return a, b
    return torch.cat([a, a]), torch.cat([b, -b], dim=1)
