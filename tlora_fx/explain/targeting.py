"""Why a job does not target a module: PEFT's own matching is asked again, with less said."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from tlora_fx.config.job import Job
from tlora_fx.ir.graph import AdapterSite, under
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.adapters import config_with_targets


def copied_around(sites: dict[str, AdapterSite], module: str) -> str:
    """The module around this one of which the job trains a copy, "" for none."""
    saved = (path for path, site in sites.items() if site.kind == "saved")
    return next((path for path in saved if under(module, path) and path != module), "")


def why_not_targeted(job: Job, backbone: Backbone, module: str) -> str:
    """Which of the job's LoRA fields leaves a module out."""
    from peft.tuners.tuners_utils import check_target_module_exists

    config: Any = config_with_targets(job, backbone)
    for field in ("exclude_modules", "layers_to_transform", "modules_to_save"):
        given = getattr(config, field, None)
        if given is None:
            continue
        without = copy.deepcopy(config)
        setattr(without, field, None)
        if check_target_module_exists(without, module) is True:
            return f"{field} leaves it out: {_told(given)}"
    return f"target_modules: {_asked(job, config)}"


def _asked(job: Job, config: Any) -> str:
    """What the job file says; what PEFT makes of it where the file says nothing."""
    asked = job.lora_config().target_modules
    if asked is not None:
        return _told(asked)
    return f"{_told(config.target_modules)} (PEFT's for this base)"


def _told(given: Any) -> str:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return str(given)
    return ", ".join(sorted(map(str, given)))
