"""The graph of one job's model, or of the base alone."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tlora_fx.config.job import Job
from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import AdapterSite, Form, JobGraph, LayerPlan
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing import attention
from tlora_fx.tracing.adapters import check_wrapped, layer_signature
from tlora_fx.tracing.export import TracedRow, accepts_positions, export_row, import_graph
from tlora_fx.tracing.layers import plan_layers, pruned_copy

if TYPE_CHECKING:
    from peft import LoraConfig

# A graph that serves every dropout rate is traced with one, so that it has the dropouts.
SOME_RATE = 0.5


def trace_base(backbone: Backbone, form: Form, fold: bool = True) -> JobGraph:
    """Trace the base without adapters.

    fold      trace two layers of each structure instead of all
    raises    BaseNotTraceable, AttentionNotPackable
    """
    plan = plan_layers(backbone, fold=fold)
    return _trace(backbone, plan, form, "the base", None)


def trace_job(
    job: Job,
    backbone: Backbone,
    sites: dict[str, AdapterSite],
    form: Form,
    fold: bool = True,
    exact: bool = False,
) -> JobGraph:
    """Trace one job's model: the base wrapped by PEFT.

    sites     the job's adapters on all layers (resolve_sites)
    exact     the graph serves this job's ranks, scalings and rates only; False: any, and the
              numbers in the graph are placeholders
    """
    config = job.lora_config()

    def signature(layer: str) -> Hashable:
        return layer_signature(sites, layer, str(config.bias), exact)

    if not exact:
        config.lora_dropout = SOME_RATE
    plan = plan_layers(backbone, signature, fold)
    graph = _trace(backbone, plan, form, f"job '{job.name}'", job, sites, config)
    graph.sites = sites
    return graph


def _trace(
    backbone: Backbone,
    plan: LayerPlan,
    form: Form,
    subject: str,
    job: Job | None,
    sites: dict[str, AdapterSite] | None = None,
    config: LoraConfig | None = None,
) -> JobGraph:
    model, index_read = pruned_copy(backbone, plan)
    if form == "packed":
        _use_packed_attention(model, subject)
    if job is not None:
        model = _wrap(model, job, config or job.lora_config(), backbone)
        check_wrapped(model, sites or {}, job)
    row = TracedRow(model, form, keywords=backbone.config is not None)
    index_read.clear()
    module = export_row(row, subject)
    if index_read and set(plan.representative) != set(plan.representative.values()):
        plan = LayerPlan(plan.layers, {layer: layer for layer in plan.layers})
        graph = _trace(backbone, plan, form, subject, job, sites, config)
        graph.notes.append(("trace", "layers are not folded: their forward reads their index"))
        return graph
    root, constants = import_graph(module, row, backbone.names)
    name = job.name if job is not None else ""
    return JobGraph(name, root, form, plan, constants=constants)


def _use_packed_attention(model: nn.Module, subject: str) -> None:
    attention.register()
    if not accepts_positions(model):
        raise BaseNotTraceable(
            f"the model of {subject} takes no position_ids, so its rows cannot be packed",
            found=f"{type(model).__name__}.forward",
            help="set base.attention: batch",
        )
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention.IMPLEMENTATION


def _wrap(model: nn.Module, job: Job, config: LoraConfig, backbone: Backbone) -> nn.Module:
    """PEFT's own wrapping; what the job trains of the base itself becomes the job's own tensor."""
    from peft import get_peft_model

    if not hasattr(model, "prepare_inputs_for_generation"):
        config.task_type = None  # PEFT's class for language models wants to generate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(
            model,
            config,
            autocast_adapter_dtype=job.adapter_dtype == "float32",
        )
    wrapped.train()
    for module in wrapped.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in backbone.names:
                continue
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                own = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(own)
    return wrapped
