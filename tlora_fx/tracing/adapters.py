"""Where a job's adapters sit: PEFT's own matching, asked for every module of the base.

The traced copy of a model holds a few layers only. PEFT wraps that copy; this file resolves the
same configuration for all layers, and checks that both say the same of the traced ones.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Hashable
from typing import Any

from torch import nn

from tlora_fx.config.job import Job
from tlora_fx.errors import AdapterMismatch, UnknownTarget, nearest
from tlora_fx.ir.graph import AdapterSite, under
from tlora_fx.model.backbone import Backbone


def resolve_sites(job: Job, backbone: Backbone) -> dict[str, AdapterSite]:
    """All modules of the base that this job adapts or trains a copy of, by path.

    raises    UnknownTarget when a name of target_modules or modules_to_save matches nothing
    """
    try:
        return _resolve(job, backbone)
    except re.error as error:
        raise UnknownTarget(
            f"job '{job.name}' has a pattern that is no regular expression",
            job=job.name,
            found=f"{error.pattern!r}: {error.msg}",
            help="target_modules and exclude_modules as text, and the keys of rank_pattern and "
            "alpha_pattern, are regular expressions",
        ) from error


def _resolve(job: Job, backbone: Backbone) -> dict[str, AdapterSite]:
    from peft.tuners.tuners_utils import check_target_module_exists

    config = config_with_targets(job, backbone)
    modules = dict(backbone.model.named_modules())
    saved = list(config.modules_to_save or [])
    sites = {}
    for path, module in modules.items():
        if any(path.endswith(name) for name in saved):
            sites[path] = AdapterSite(path, 0, 0.0, 0.0, kind="saved")
        elif path and check_target_module_exists(config, path):
            sites[path] = _site(path, module, config)
        elif config.bias == "all" and getattr(module, "bias", None) is not None:
            sites[path] = AdapterSite(path, 0, 0.0, 0.0, kind="bias")
    _refuse_unknown(job, config, modules, sites)
    return sites


def config_with_targets(job: Job, backbone: Backbone) -> Any:
    """The job's LoraConfig with target_modules spelled out where PEFT derives them."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    config: Any = copy.deepcopy(job.lora_config())
    if config.target_modules is None:
        family = getattr(backbone.config, "model_type", None)
        if family not in KNOWN:
            raise UnknownTarget(
                f"job '{job.name}' names no target_modules and PEFT knows none for this base",
                job=job.name,
                base=backbone.title,
                help="give lora.target_modules, for example all-linear",
            )
        config.target_modules = set(KNOWN[family])
    return _maybe_include_all_linear_layers(config, backbone.model)


def idle_patterns(job: Job, sites: dict[str, AdapterSite]) -> list[str]:
    """What to tell of the keys of rank_pattern and alpha_pattern that fit no adapted module."""
    from peft.utils.other import get_pattern_key

    config: Any = job.lora_config()
    adapted = [path for path, site in sites.items() if site.rank]
    notes = []
    for field in ("rank_pattern", "alpha_pattern"):
        keys = getattr(config, field)
        used = {get_pattern_key(keys.keys(), path) for path in adapted}
        notes += [
            f"job '{job.name}': '{key}' in {field} fits no adapted module, so it changes nothing"
            for key in keys
            if key not in used
        ]
    return notes


def _site(path: str, module: nn.Module, config: Any) -> AdapterSite:
    from peft.utils.other import get_pattern_key

    r = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), config.r)
    alpha_key = get_pattern_key(config.alpha_pattern.keys(), path)
    alpha = config.alpha_pattern.get(alpha_key, config.lora_alpha)
    scaling = alpha / math.sqrt(r) if config.use_rslora else alpha / r
    kind = "embedding" if isinstance(module, nn.Embedding) else "lora"
    if config.use_dora:
        kind = "dora"
    elif config.lora_bias:
        kind = "lora-bias"
    elif config.bias != "none" and getattr(module, "bias", None) is not None:
        kind = "lora, bias trained"
    return AdapterSite(path, int(r), float(scaling), float(config.lora_dropout), kind)


def _refuse_unknown(
    job: Job, config: Any, modules: dict[str, nn.Module], sites: dict[str, AdapterSite]
) -> None:
    names = sorted({path.rpartition(".")[2] for path in modules if path} | set(modules) - {""})
    saved = list(config.modules_to_save or [])
    asked = [] if isinstance(config.target_modules, str) else sorted(config.target_modules)
    for name in [*asked, *saved]:
        tail = name if name in saved else f".{name}"
        if not any(path == name or path.endswith(tail) for path in modules):
            raise UnknownTarget(
                f"job '{job.name}' targets a module that the base does not have",
                job=job.name,
                found=name,
                nearest=nearest(name, names),
                help="the base's linear modules are " + ", ".join(_linear_names(modules)),
            )
    if not any(site.rank for site in sites.values()):
        raise UnknownTarget(
            f"job '{job.name}' adapts no module of the base",
            job=job.name,
            found=f"target_modules: {config.target_modules}",
            help="the base's linear modules are " + ", ".join(_linear_names(modules)),
        )


def _linear_names(modules: dict[str, nn.Module]) -> list[str]:
    found = {p.rpartition(".")[2] for p, m in modules.items() if hasattr(m, "weight") and p}
    return sorted(name for name in found if not name.isdigit() and "norm" not in name)


def layer_signature(sites: dict[str, AdapterSite], layer: str, bias: str, exact: bool) -> Hashable:
    """What a job puts on one layer, as far as it changes the layer's code.

    exact    True: rank, scaling and dropout rate too, where branches run as they are
    """
    rows = []
    for path, site in sites.items():
        if not layer or under(path, layer):
            numbers = (site.rank, site.scaling, site.dropout) if exact else ()
            rows.append((path[len(layer) :], site.kind, numbers))
    return (bias, tuple(sorted(rows)))


def check_wrapped(model: nn.Module, sites: dict[str, AdapterSite], job: Job) -> None:
    """Compare PEFT's own layers on the traced copy with what was resolved for them.

    raises    AdapterMismatch: PEFT decided otherwise than this file
    """
    from peft.tuners.lora import LoraLayer

    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = path.removeprefix("base_model.model.")
        site = sites.get(name)
        found = (module.r["default"], module.scaling["default"])
        if site is None or (site.rank, site.scaling) != found:
            raise AdapterMismatch(
                f"PEFT places another adapter for job '{job.name}' than the one planned",
                module=name,
                expected=site,
                found=f"rank {found[0]}, scaling {found[1]}",
                help="this is a defect of tlora-fx or a newer PEFT: please report it",
            )
