"""`torch.compile(model, backend="tlora-fx")`: LoRA branches lowered, all else by Inductor.

Dynamo records the model; its LoRA layers are brought to the vocabulary that tracing yields and
lowered by the pass that lowers fused jobs; what comes out goes to Inductor, whose caches serve it
like any graph. A branch that no pattern fits stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from tlora_fx.backend import options as notices
from tlora_fx.backend.lora_regions import Left, Lowered, lower_sites
from tlora_fx.backend.options import BackendWarning, Options, read_options
from tlora_fx.backend.rewrite import SiteRewriter, declare_tables
from tlora_fx.backend.sites import (
    GraphRegion,
    regions_of,
    running_layer,
    sites_of,
    strays,
    value_of,
)
from tlora_fx.errors import BackendUnsupported
from tlora_fx.ops.torch_compile import mark_compile_caches

__all__ = ["BackendWarning", "compile_graph", "lower_graph"]

CUT = "a graph break cuts it out of its layer"
DORA = "it is DoRA, which scales the whole weight"
OUTSIDE = "its matrices are read outside a plain LoRA branch"
NOTHING = (
    "tlora-fx: a graph has no active LoRA branch (no adapter, merged, disabled, or cut off by a "
    "graph break), so Inductor compiles it as it is"
)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo recorded.

    gm               rewritten in place
    example_inputs   fake or real inputs of the graph
    mode             a mode of torch.compile, handed on to Inductor
    options          `strict`, `compute`, and Inductor's own options
    returns          what runs the graph
    raises           BackendOptionError; BackendUnsupported when strict and a branch is left
    """
    from torch._inductor.compile_fx import compile_fx

    wanted = read_options(mode, options)
    mark_compile_caches()
    lower_graph(gm, wanted)
    inputs: Any = list(example_inputs)
    compiled: Any = compile_fx(gm, inputs, config_patches=wanted.inductor or None)
    return cast("Callable[..., Any]", compiled)


def lower_graph(gm: fx.GraphModule, wanted: Options | None = None) -> tuple[int, int]:
    """Replace the LoRA branches of a graph that Dynamo recorded, in place.

    returns   how many branches were lowered, and how many were left
    raises    BackendUnsupported when strict and a branch is left
    warns     BackendWarning, once for each reason
    """
    wanted = wanted or Options()
    lowered = 0
    left: list[Left] = []
    for region in regions_of(gm):
        done, rest = _lower_region(region, wanted)
        lowered += done
        left += rest
    declare_tables(gm)
    notices.count(lowered, len(left))
    if not notices.belongs_to_branches(gm, lowered + len(left)):
        notices.say(NOTHING)
    _tell(lowered, left, wanted)
    return lowered, len(left)


def _lower_region(region: GraphRegion, wanted: Options) -> tuple[int, list[Left]]:
    sites = [site for site in sites_of(region.module.graph) if site.active]
    rewriter = SiteRewriter(region.module)
    lowered = 0
    left = [_stray(name, user) for name, user in strays(region, sites).items()]
    for result in lower_sites(region, sites, wanted.compute):
        if isinstance(result, Left):
            left.append(result)
        elif reason := _unfit(result, wanted):
            left.append(Left(result.calls.path, reason))
        else:
            rewriter.replace(result)
            lowered += 1
    if lowered:
        region.module.graph.lint()
        region.module.recompile()
    return lowered, left


def _stray(name: str, user: fx.Node) -> Left:
    """Why a call outside of all LoRA layers reads an adapter's matrix."""
    layer = running_layer()
    dora = "peft/tuners/lora/dora.py" in str(user.meta.get("stack_trace")).replace("\\", "/")
    if dora:
        return Left(layer or name, DORA)
    return Left(layer or name, OUTSIDE if layer else CUT)


def _unfit(site: Lowered, wanted: Options) -> str:
    """Why the operator may not draw the masks of a branch, or ""."""
    rate = value_of(site.dropout) if isinstance(site.dropout, fx.Node) else site.dropout
    if rate >= 1:  # a guard where the rate is an input, so that 1 compiles again
        return "it drops everything"
    fallback = torch._inductor.config.fallback_random
    if site.dropout != 0 and wanted.inductor.get("fallback_random", fallback):
        return "fallback_random asks for the masks of eager mode"
    return ""


def _tell(lowered: int, left: list[Left], wanted: Options) -> None:
    why = notices.reasons(left)
    if left and wanted.strict:
        raise BackendUnsupported(
            f"{len(left)} of {lowered + len(left)} LoRA branches cannot be lowered",
            found=why,
            help="leave `strict` out, and Inductor compiles them as they are",
        )
    if left:
        total = lowered + len(left)
        notices.say(f"tlora-fx leaves {len(left)} of {total} LoRA branches to Inductor: {why}")
