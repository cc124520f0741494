"""Sites of a job's adapters: PEFT's own matching, asked for every module of the base.

The traced copy of a model holds a few layers only. PEFT wraps that copy; this file resolves the
same configuration for all layers, and checks that both say the same of the traced ones.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from tlora_fx.config.base_spec import HEADS
from tlora_fx.config.fields import parameters_exclude
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import other_kind
from tlora_fx.errors import AdapterMismatch, JobError, UnknownTarget, first_of, nearest
from tlora_fx.ir.graph import (
    ON_PARAMETERS,
    PEFT_PREFIX,
    AdapterSite,
    JobGraph,
    TensorRef,
    is_call,
    is_writing,
    output_of,
    under,
)
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.experts import is_experts, is_router, parameter_site
from tlora_fx.tracing.layers import layer_list

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


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
    start = job.start_config().init_lora_weights if job.is_lora else True
    modules = dict(backbone.model.named_modules())
    saved = list(config.modules_to_save or [])
    sites = {}
    tokens = set(trained_tokens(job, config, backbone))
    tokens |= {_tied_head(job, config, backbone, path) for path in tokens}
    for path, module in modules.items():
        if path and path in tokens:
            sites[path] = AdapterSite(path, 0, 0.0, 0.0, kind="tokens")
        elif any(path.endswith(name) for name in saved):
            sites[path] = AdapterSite(path, 0, 0.0, 0.0, kind="saved")
        elif path and check_target_module_exists(config, path):
            sites[path] = _site(job, path, module, config, start)
        elif getattr(config, "bias", "none") == "all" and getattr(module, "bias", None) is not None:
            sites[path] = AdapterSite(path, 0, 0.0, 0.0, kind="bias")
    _refuse_multihead_attention(job, modules, sites)
    sites |= _parameter_sites(job, config, modules)
    _refuse_unknown(job, config, modules, sites)
    embeddings = [path for path, site in sites.items() if site.kind == "embedding"]
    if embeddings and job.optim == "lorafa":
        raise UnknownTarget(
            f"job '{job.name}' freezes an embedding's A, which starts as zeros",
            job=job.name,
            found=first_of(embeddings, 1),
            help="leave the embedding out of target_modules, or take another optim than lorafa",
        )
    return sites


def _refuse_multihead_attention(
    job: Job, modules: dict[str, nn.Module], sites: dict[str, AdapterSite]
) -> None:
    """Refuse what a job adapts or trains inside nn.MultiheadAttention.

    It is one operator to the graph: it reads the tensors of its `out_proj`, which it never calls,
    and its results hold lines and tokens in another order than the row. PEFT adds adapters to its
    weights anew in each forward.
    An adapter on `out_proj` has no effect, with PEFT neither, and is noted later.

    raises    UnknownTarget
    """
    for path, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        inside = (path, f"{path}.out_proj")
        copied = [name for name in inside if name in sites and sites[name].kind == "saved"]
        if copied:
            found, field = copied[0], "modules_to_save"
        elif path in sites:
            found, field = path, "target_modules"
        elif (site := sites.get(inside[1])) is not None and site.kind == "bias":
            found, field = f"{inside[1]}.bias", "bias: all"
        else:
            continue
        raise UnknownTarget(
            f"job '{job.name}' trains a part of nn.MultiheadAttention, which cannot be adapted",
            job=job.name,
            found=f"{found}, by {field}",
            expected="linear modules that the base calls",
            help="adapt linears beside it, with bias: none or lora_only, or write the base's "
            "attention with linears",
        )


def _parameter_sites(
    job: Job, config: Any, modules: dict[str, nn.Module]
) -> dict[str, AdapterSite]:
    """The parameters that a job adapts by `target_parameters`: experts, routers, linears' weights.

    PEFT wraps a module once for each of its parameters, the first one innermost. Names that only
    PEFT added may fit nothing: not every mixture has a router with a weight of its own.
    """
    asked = sorted(_parameters(config))
    sites, fits = {}, set[str]()
    for path, module in modules.items():
        keys = {name: f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        adapted = [
            name for name, key in keys.items() if any(_names_parameter(t, key) for t in asked)
        ]
        for depth, name in enumerate(reversed(adapted)):
            placed = parameter_site(path, module, name)
            if placed is None:
                raise _unknown_parameter(job, keys[name], modules)
            site, kind = placed
            rank, scaling = _numbers(keys[name], config)
            sites[site] = AdapterSite(site, rank, scaling, 0.0, kind, depth)
            fits |= {target for target in asked if _names_parameter(target, keys[name])}
    for target in sorted(job.lora_fields.get("target_parameters") or ()):
        if target not in fits:
            raise _unknown_parameter(job, target, modules)
    return sites


def _names_parameter(target: str, key: str) -> bool:
    """Whether `target_parameters` names the parameter of this path, by PEFT's rule."""
    return f".{key}".endswith(f".{target}")


def _unknown_parameter(job: Job, target: str, modules: dict[str, nn.Module]) -> UnknownTarget:
    known = {
        f"{path.rpartition('.')[2]}.{name}"
        for path, module in modules.items()
        if is_experts(module) or is_router(module)
        for name, _ in module.named_parameters(recurse=False)
        if parameter_site(path, module, name) is not None
    }
    names = sorted(known)
    return UnknownTarget(
        f"job '{job.name}' adapts a parameter that is no weight of experts, a router or a linear",
        job=job.name,
        found=f"target_parameters: {target}",
        expected=", ".join(names) or "none: the base has no experts in 3-D parameters",
        nearest=nearest(target, names),
        help="name experts and routers by target_parameters, and linear modules by target_modules",
    )


def trained_tokens(job: Job, config: Any, backbone: Backbone) -> dict[str, list[int]]:
    """The token ids that a job trains one by one, by the path of their embedding.

    raises    UnknownTarget for an embedding that the base does not have, or that has no such token
    """
    asked = getattr(config, "trainable_token_indices", None)
    if not asked:
        return {}
    model: Any = backbone.model
    modules = {k: m for k, m in model.named_modules() if isinstance(m, nn.Embedding)}
    if not isinstance(asked, dict):
        mine = model.get_input_embeddings()
        asked = {path: asked for path, module in modules.items() if module is mine}
    sites = {path: ids for path in modules for name, ids in asked.items() if path.endswith(name)}
    unknown = [name for name in asked if not any(path.endswith(name) for path in modules)]
    for path, ids in sites.items():
        if max(ids) >= modules[path].num_embeddings:
            unknown.append(f"token {max(ids)} of {modules[path].num_embeddings} in {path}")
    if unknown or not sites:
        raise UnknownTarget(
            f"job '{job.name}' trains tokens that the base's embeddings do not have",
            job=job.name,
            found="; ".join(unknown) or "no embedding",
            expected=f"tokens of {', '.join(modules)}",
            help="correct trainable_token_indices, or train a copy by modules_to_save",
        )
    return sites


def _tied_head(job: Job, config: Any, backbone: Backbone, path: str) -> str:
    """The path of the head that shares an embedding's weight, "" where none does.

    raises    UnknownTarget where PEFT does not let it follow the embedding's tokens
    """
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import _get_module_names_tied_with_embedding

    model: Any = backbone.model
    embedding, head = model.get_submodule(path), _head(model)
    if head is None or head.weight is not embedding.weight:
        return ""
    name: str = next(name for name, module in model.named_modules() if module is head)
    saved = any(name.endswith(each) for each in config.modules_to_save or ())
    ties = getattr(backbone.config, "tie_word_embeddings", False)
    followers = _get_module_names_tied_with_embedding(model) if ties else []
    problems = {
        "it has a bias, which PEFT leaves out": getattr(head, "bias", None) is not None,
        "the job adapts it": saved or check_target_module_exists(config, name),
        "PEFT does not know of it": followers != [name]
        or embedding is not model.get_input_embeddings(),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnknownTarget(
                f"job '{job.name}' trains tokens of an embedding whose head cannot follow them",
                job=job.name,
                found=f"{name}, which shares the weight of {path}: {problem}",
                help="drop trainable_token_indices, or take a base with tie_word_embeddings: false",
            )
    return name


def config_with_targets(job: Job, backbone: Backbone) -> Any:
    """The job's LoraConfig with target_modules spelled out where PEFT derives them."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    config: Any = copy.deepcopy(job.lora_config())
    if config.target_modules is None:
        family = getattr(backbone.config, "model_type", "")
        known = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].target_module_mapping
        if family not in known and not getattr(config, "target_parameters", None):
            raise UnknownTarget(
                f"job '{job.name}' names no target_modules and PEFT knows none for this base",
                job=job.name,
                base=backbone.title,
                help="give lora.target_modules, for example all-linear",
            )
        config.target_modules = set(known.get(family, ()))
    _move_to_parameters(job, config, backbone)
    return _maybe_include_all_linear_layers(config, backbone.model)


def _move_to_parameters(job: Job, config: Any, backbone: Backbone) -> None:
    """Rewrite a job's targets as PEFT does for this base, before it wraps anything.

    Since transformers 5 the experts of many mixtures are stacked parameters. Where targets name the
    linears of before, or all linears, PEFT adapts these parameters and the router's weight instead,
    with ranks of its own.

    raises    UnknownTarget where PEFT cannot, JobError for fields that adapters on parameters
              exclude
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    asked = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(config, backbone.model, None)
    except ValueError as error:  # one of two matrices that are fused into one parameter
        stay = ", ".join(_linears_that_stay(asked, backbone))
        raise UnknownTarget(
            f"job '{job.name}' targets one of two matrices that this base keeps as one parameter",
            job=job.name,
            found=f"target_modules: {asked.target_modules}",
            expected=error,
            help=f"name both, or linear modules only: target_modules: [{stay}]",
        ) from error
    excluded = parameters_exclude(job.lora_fields)
    if excluded and _parameters(config) != _parameters(asked):
        stay = ", ".join(_linears_that_stay(asked, backbone))
        raise JobError(
            f"{excluded} and targets among a mixture's experts exclude each other: PEFT adapts "
            "these as parameters",
            job=job.name,
            found=f"target_modules: {asked.target_modules}",
            help=f"leave {excluded} out, or name linear modules only: target_modules: [{stay}]",
        )


def written_config(job: Job, backbone: Backbone) -> Any:
    """The PEFT config of a job's adapter folder, with the parameters that PEFT adapts there.

    raises    as `config_with_targets`
    """
    config: Any = job.lora_config()
    moved = copy.deepcopy(config)
    _move_to_parameters(job, moved, backbone)
    return config if _parameters(moved) == _parameters(config) else moved


def moved_targets(job: Job, backbone: Backbone, sites: dict[str, AdapterSite]) -> list[str]:
    """Note on a job whose targets PEFT takes as parameters of a mixture: one sentence."""
    parameters = [path for path, site in sites.items() if site.kind in ON_PARAMETERS]
    if not parameters or job.lora_fields.get("target_parameters"):
        return []
    config: Any = job.lora_config()
    asked, stay = config.target_modules, _linears_that_stay(config, backbone)
    left = [
        path
        for path, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not _head(backbone.model)
        and path not in sites
        and (name := path.rpartition(".")[2]) not in stay
        and (isinstance(asked, str) or name in asked)
    ]
    absent = [
        target
        for target in sorted(_parameters(written_config(job, backbone)))
        if not any(_names_parameter(target, site.pattern_path) for site in sites.values())
    ]
    note = f"job '{job.name}': PEFT adapts {first_of(parameters, 1)} as parameters"
    note += f", and leaves linears of these names: {first_of(left, 1)}" if left else ""
    return [note + (f"; the base has no parameter {', '.join(absent)}" if absent else "")]


def _parameters(config: Any) -> set[str]:
    return set(getattr(config, "target_parameters", None) or ())


def _linears_that_stay(config: Any, backbone: Backbone) -> list[str]:
    """Names of linears that are still modules where PEFT adapts a base's experts."""
    names = {
        path.rpartition(".")[2]
        for path, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear) and module is not _head(backbone.model)
    }
    alone = {name: copy.deepcopy(config) for name in sorted(names)}
    for name, single in alone.items():
        single.target_modules, single.target_parameters = {name}, None
    return [name for name, single in alone.items() if not _is_moved(single, backbone)]


def _is_moved(config: Any, backbone: Backbone) -> bool:
    """Whether PEFT adapts parameters of this base where a configuration targets modules."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    try:
        convert_peft_config_for_transformers(config, backbone.model, None)
    except ValueError:
        return True
    return bool(_parameters(config))


def _head(model: nn.Module) -> nn.Module | None:
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def idle_patterns(job: Job, sites: dict[str, AdapterSite]) -> list[str]:
    """Messages for the keys of rank_pattern and alpha_pattern that fit no adapted module."""
    if not any(job.lora_fields.get(field) for field in ("rank_pattern", "alpha_pattern")):
        return []
    from peft.utils.other import get_pattern_key

    config: Any = job.lora_config()
    adapted = [site.pattern_path for site in sites.values() if site.rank]
    notes = []
    for field in ("rank_pattern", "alpha_pattern"):
        keys: dict[str, Any] = getattr(config, field) or {}
        used = {get_pattern_key(list(keys), path) for path in adapted}
        notes += [
            f"job '{job.name}': '{key}' in {field} fits no adapted module, so it changes nothing"
            for key in keys
            if key not in used
        ]
    return notes


def _site(job: Job, path: str, module: nn.Module, config: Any, start: bool | str) -> AdapterSite:
    from peft import PeftType

    if config.peft_type != PeftType.LORA:
        # Such branches run as they are: PEFT's module has their numbers.
        kind = config.peft_type.lower()
        if kind == "adalora":
            rank, alpha = config.init_r, float(config.lora_alpha)
            return AdapterSite(path, rank, alpha, float(config.lora_dropout), kind)
        spec = other_kind(config.peft_type)
        rate = float(getattr(config, (spec and spec.dropout_field) or "", 0.0))
        return AdapterSite(path, getattr(config, "r", 0) or 1, 1.0, rate, kind)
    rank, scaling = _numbers(path, config)
    kind = "embedding" if isinstance(module, nn.Embedding) else "lora"
    if kind == "embedding" and isinstance(start, str) and start != "gaussian":
        raise UnknownTarget(
            f"a start by '{start}' is of linear modules",
            job=job.name,
            found=path,
            help="leave the embedding out of target_modules, or take another start",
        )
    if config.use_dora:
        kind = "dora"
    elif config.lora_bias:
        kind = "lora-bias"
    elif config.bias != "none" and getattr(module, "bias", None) is not None:
        kind = "lora, bias trained"
    return AdapterSite(path, rank, scaling, float(config.lora_dropout), kind)


def _numbers(path: str, config: Any) -> tuple[int, float]:
    """Rank and scaling of LoRA at a path, by PEFT's patterns."""
    from peft.utils.other import get_pattern_key

    r = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), config.r)
    alpha_key = get_pattern_key(config.alpha_pattern.keys(), path)
    alpha = config.alpha_pattern.get(alpha_key, config.lora_alpha)
    return int(r), float(alpha / math.sqrt(r) if config.use_rslora else alpha / r)


def _refuse_unknown(
    job: Job, config: Any, modules: dict[str, nn.Module], sites: dict[str, AdapterSite]
) -> None:
    names = sorted({path.rpartition(".")[2] for path in modules if path} | set(modules) - {""})
    # PEFT names the heads that classifiers usually have, of which a base has one.
    heads = HEADS if job.base.is_classifier else ()
    saved = [name for name in config.modules_to_save or [] if name not in heads]
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
        layers = config.layers_to_transform
        numbers = {int(n) for path in modules for n in path.split(".") if n.isdigit()}
        wanted = {layers} if isinstance(layers, int) else set(layers or ())
        if wanted and numbers and not numbers & wanted:
            raise UnknownTarget(
                f"job '{job.name}' adapts layers that the base does not have",
                job=job.name,
                found=f"layers_to_transform: {layers}",
                help=f"the base's layers are 0 to {max(numbers)}",
            )
        raise UnknownTarget(
            f"job '{job.name}' adapts no module of the base",
            job=job.name,
            found=f"target_modules: {config.target_modules}",
            help="the base's linear modules are " + ", ".join(_linear_names(modules)),
        )


def _linear_names(modules: dict[str, nn.Module]) -> list[str]:
    found = {p.rpartition(".")[2] for p, m in modules.items() if hasattr(m, "weight") and p}
    return sorted(name for name in found if not name.isdigit() and "norm" not in name)


def require_trained(job: Job, graph: JobGraph) -> list[str]:
    """Paths of adapters that the logits do not depend on; a job that has no other is refused.

    graph     of this job, as it was traced
    raises    UnknownTarget
    """
    trained = _trained_tensors(graph)
    paths = {prefix for name in trained for prefix in _prefixes(name)}
    plan = graph.plan
    left_out = set(plan.layers) - set(plan.traced()) if plan is not None else set()
    idle = [
        path
        for path, site in graph.sites.items()
        if site.rank and path not in paths and left_out.isdisjoint(_prefixes(path))
    ]
    if not trained:
        raise UnknownTarget(
            f"job '{job.name}' adapts nothing that its loss depends on",
            job=job.name,
            found=first_of(idle, 1) if idle else None,
            help="name modules on the way from the tokens to the logits",
        )
    return idle


def idle_adapters(job: Job, paths: Sequence[str]) -> str:
    """Message for a job's adapters that its loss does not depend on."""
    where = first_of(paths, 1)
    return f"job '{job.name}': the loss does not depend on adapters of {where}: they are not saved"


def _trained_tensors(graph: JobGraph) -> set[str]:
    """Names, without PEFT's prefix, of the job's tensors that get a gradient from the logits."""
    names: set[str] = set()
    seen: set[fx.Node] = set()
    # A write into memory that is read later hands its inputs on through no edge of the graph.
    stack: list[Any] = [output_of(graph.root).args[0], *filter(is_writing, graph.root.nodes)]
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if node in seen or is_call(node, torch.ops.aten.detach.default):
            continue
        seen.add(node)
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        ref = node.meta.get("tensor")
        if isinstance(ref, TensorRef) and ref.owner == "job":
            names.add(ref.name.removeprefix(PEFT_PREFIX))
        stack.extend(node.all_input_nodes)
    return names


def _prefixes(path: str) -> list[str]:
    """A path and the paths of all that it lies in."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def layer_signature(sites: dict[str, AdapterSite], layer: str, bias: str, exact: bool) -> Hashable:
    """Signature of a job's adapters on one layer, as far as they change the layer's code.

    exact    True: rank, scaling and dropout rate too, where branches run as they are
    """
    rows = []
    for path, site in sites.items():
        if not layer or under(path, layer):
            numbers = (site.rank, site.scaling, site.dropout) if exact else ()
            rows.append((path[len(layer) :], site.kind, numbers))
    return (bias, tuple(sorted(rows)))


def graph_structure(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], exact: bool
) -> Hashable:
    """Facts that two jobs must have in common to share one traced graph.

    exact     True: the numbers of the job's branches are in its graph
    """
    bias = trained_bias(job)
    names = ("trainable_token_indices",) if job.is_lora else sorted(job.lora_fields)
    fields = tuple((name, repr(job.lora_fields.get(name))) for name in names)
    parts = [layer_signature(sites, layer, bias, exact) for layer in layer_list(backbone.model)]
    return (exact, job.adapter_dtype, fields, layer_signature(sites, "", bias, exact), *parts)


def trained_bias(job: Job) -> str:
    """Which biases of the base a job trains, in PEFT's words; "none" by default."""
    if job.is_lora:  # to ask PEFT takes a second
        return str(job.lora_fields.get("bias", "none"))
    return str(getattr(job.lora_config(), "bias", "none"))


def check_wrapped(model: nn.Module, sites: dict[str, AdapterSite], job: Job) -> None:
    """Compare PEFT's own layers on the traced copy with what was resolved for them.

    raises    AdapterMismatch: PEFT decided otherwise than this file
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        name = path.removeprefix(PEFT_PREFIX)
        if isinstance(module, ParamWrapper):
            holder = name.replace(".base_layer", "")
            inner = module.get_base_layer()
            name = (parameter_site(holder, inner, module.parameter_name) or (name,))[0]
        site = sites.get(name)
        placed: tuple[int, float] | None = None
        if isinstance(module, LoraLayer):
            placed = (module.r["default"], module.scaling["default"])
        elif isinstance(module, BaseTunerLayer) and not name.endswith(".token_adapter"):
            placed = (0, 0.0) if site is None else (site.rank, site.scaling)
        planned = (site.rank, site.scaling) if site is not None and site.rank else None
        if placed != planned:
            raise AdapterMismatch(
                f"PEFT places another adapter for job '{job.name}' than the one planned",
                module=name,
                expected=site or "no adapter",
                found=f"rank {placed[0]}, scaling {placed[1]}" if placed else "no adapter",
                help="this is a defect of tlora-fx or a newer PEFT: please report it",
            )


def wrap_with_peft(model: nn.Module, config: PeftConfig, adapter_dtype: str) -> PeftModel:
    """A base with a job's adapters, by PEFT; the generator of random numbers stays as it is.

    AdaLoRA's `ranknum` is not trained: a divisor that PEFT trains where it casts it, and never
    saves.
    """
    from peft import get_peft_model

    if not hasattr(model, "prepare_inputs_for_generation"):
        config.task_type = None  # PEFT's class for language models wants to generate
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped: Any = get_peft_model(
            model, config, autocast_adapter_dtype=adapter_dtype == "float32"
        )
    for name, parameter in wrapped.named_parameters():
        if ".ranknum." in name:
            parameter.requires_grad_(False)
    return cast("PeftModel", wrapped)


def make_traceable(model: nn.Module) -> None:
    """Make PEFT's modules of kinds beside LoRA traceable on the meta device.

    Tables of sizes and seeds have no values there, so they are made again; a module that would
    draw whether it runs, at a rate of 0, runs; a product with a backward of its own is written out.

    model    wrapped by PEFT
    """
    from peft.tuners.adalora.layer import AdaLoraLayer
    from peft.tuners.loha.layer import LoHaLayer
    from peft.tuners.lycoris_utils import LycorisLayer
    from peft.tuners.oft.layer import OFTRotationModule
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.vera.layer import VeraLayer

    projections: dict[str, dict[str, Tensor]] = {}
    for module in list(model.modules()):
        if isinstance(module, LycorisLayer):
            module.training = False
        if isinstance(module, LoHaLayer):
            vars(module)["get_delta_weight"] = partial(_hadamard_weight, module)
        elif isinstance(module, TrainableTokensLayer) and module.tied_adapter is not None:
            # Modules in two places would get paths of another form.
            for name in ("trainable_tokens_delta", "trainable_tokens_original"):
                del module._modules[name]
            vars(module)["forward_adapters"] = partial(_tied_logits, module)
        elif isinstance(module, OFTRotationModule):
            size = module.block_size
            module.rows, module.cols = torch.triu_indices(size, size, 1)
        elif isinstance(module, AdaLoraLayer):
            # PEFT adds 1e-5 to the rank, in this dtype.
            ranks: Any = module._modules.pop("ranknum")
            count = float(module.r["default"])
            rounded = torch.tensor(count, dtype=ranks["default"].dtype) + 1e-5
            vars(module)["ranknum"] = {"default": float(rounded) - 1e-5}
        elif isinstance(module, VeraLayer):
            projections = projections or _projections(model)
            for name, drawn in projections.items():
                del module._modules[name]
                setattr(module, name, drawn)


def _hadamard_weight(layer: Any, adapter: str, *, apply_rank_dropout: bool = False) -> Tensor:
    """LoHa's change of a weight [out, in], as operators that torch derives."""
    assert not apply_rank_dropout
    first = layer.hada_w1_a[adapter] @ layer.hada_w1_b[adapter]
    second = layer.hada_w2_a[adapter] @ layer.hada_w2_b[adapter]
    change: Tensor = first * second * layer.scaling[adapter]
    return change.reshape(layer.get_base_layer().weight.shape)


def _tied_logits(layer: Any, hidden: Tensor, adapters: list[str]) -> Tensor:
    """Logits [..., V] of a head that follows an embedding, by the base's own product.

    PEFT copies the weight, writes the job's rows into the copy, and multiplies with that.
    """
    followed, weight = layer.tied_adapter, layer.base_layer.weight
    index = torch.tensor(followed.token_indices[adapters[0]]).to(weight.device)
    rows = followed.trainable_tokens_delta[adapters[0]].to(weight.dtype)
    logits: Tensor = layer.base_layer(hidden)
    return logits.index_copy(-1, index, nn.functional.linear(hidden, rows))


def _projections(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """VeRA's A and B on the CPU, by attribute and adapter, as PEFT draws them; off `model`."""
    from peft.tuners.vera.model import _kaiming_init

    tuner: Any = model.base_model
    key = torch.Generator().manual_seed(tuner.peft_config["default"].projection_prng_key)
    drawn = {}
    for name in ("vera_A", "vera_B"):
        empty = tuner._modules.pop(name)["default"]
        drawn[name] = {"default": _kaiming_init(tuple(empty.shape), key).to(empty.dtype)}
    return drawn
