"""`torch.compile(model, backend="tlora-fx")`: LoRA branches lowered, all else by Inductor.

Dynamo records the model; its LoRA layers are brought to the vocabulary that tracing yields and
lowered by the pass that lowers fused jobs; what comes out goes to Inductor, whose caches serve it
like any graph. A branch that no pattern fits stays as it is.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._guards import CompileContext

from tlora_fx.backend.decompose import decompose_sites
from tlora_fx.backend.lora_regions import PASSES_BEFORE, Left, Lowered, lower_sites
from tlora_fx.backend.rewrite import SiteRewriter, declare_tables
from tlora_fx.backend.sites import (
    GraphRegion,
    has_active_branch,
    regions_of,
    running_layer,
    running_modules,
    sites_of,
    strays,
    value_of,
)
from tlora_fx.errors import BackendOptionError, BackendUnsupported, nearest
from tlora_fx.ops.torch_compile import mark_compile_caches
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import GroupPass, Pass, Pipeline, parse_pipeline
from tlora_fx.pipeline.text import checked

__all__ = ["BackendWarning", "compile_graph", "lower_graph"]

CUT = "a graph break cuts it out of its layer"
DORA = "it is DoRA, which scales the whole weight"
OUTSIDE = "its matrices are read outside a plain LoRA branch"
NOTHING = (
    "tlora-fx: a model has no active LoRA branch (no adapter, merged, or disabled), so Inductor "
    "compiles it as it is"
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
    mode             a mode of torch.compile, handed on to Inductor
    options          `strict`, `compute`, `passes`, and Inductor's own options
    returns          what runs the graph
    raises           BackendOptionError; BackendUnsupported when strict and a branch is left
    """
    from torch._inductor.compile_fx import compile_fx

    wanted = read_options(mode, options)
    mark_compile_caches()
    lower_graph(gm, wanted)
    decompose_sites(gm)
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
    lowered: list[str] = []
    left: list[Left] = []
    for region in regions_of(gm):
        done, rest = _lower_region(region, wanted)
        lowered += done
        left += rest
    declare_tables(gm)
    count_branches("branches_lowered", lowered)
    count_branches("branches_left", [item.path for item in left])
    if not (lowered or left or _is_piece(gm)):
        say(NOTHING)
    _tell(len(lowered), left, wanted)
    return len(lowered), len(left)


def _lower_region(region: GraphRegion, wanted: Options) -> tuple[list[str], list[Left]]:
    sites = [site for site in sites_of(region.module.graph) if site.active]
    rewriter = SiteRewriter(region.module)
    lowered: list[str] = []
    left = [_stray(name, user) for name, user in strays(region, sites).items()]
    refuse = partial(_unfit, wanted=wanted)
    for result in lower_sites(region, sites, wanted.compute, refuse, wanted.passes):
        if isinstance(result, Left):
            left.append(result)
        else:
            rewriter.replace(result)
            lowered.append(result.calls.path)
    if lowered:
        region.module.graph.lint()
        region.module.recompile()
    return lowered, left


def _stray(name: str, user: fx.Node) -> Left:
    """Why a call outside of all LoRA layers reads an adapter's matrix."""
    layer = running_layer()
    dora = "peft/tuners/lora/dora.py" in str(user.meta.get("stack_trace")).replace("\\", "/")
    return Left(layer or name, DORA) if dora else Left(layer or name, OUTSIDE if layer else CUT)


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
    why = reasons(left)
    if left and wanted.strict:
        raise BackendUnsupported(
            f"{len(left)} of {lowered + len(left)} LoRA branches cannot be lowered",
            found=why,
            help="leave `strict` out, and Inductor compiles them as they are",
        )
    if left:
        total = lowered + len(left)
        say(f"tlora-fx leaves {len(left)} of {total} LoRA branches to Inductor: {why}")


COMPUTE = ("float32", "base")
SHOWN = 3
_said: set[str] = set()


@dataclass(slots=True)
class BranchCounts:
    """Counts that stand in torch's counters: each branch of a model is counted once.

    Dynamo hands a graph over again for another shape, and when it has to start anew.

    counter   torch's; another one where somebody cleared its counters
    seen      paths of a model's branches, by the name of what counts them
    unowned   the same where a function is compiled, not a module: by the number of its frame
    """

    counter: Counter[str]
    seen: WeakKeyDictionary[nn.Module, set[tuple[str, str]]]
    unowned: dict[object, set[tuple[str, str]]]


_branch_counts = BranchCounts(Counter(), WeakKeyDictionary(), {})


def count_branches(name: str, paths: Iterable[str]) -> None:
    """Add the branches of a model that were not counted under this name."""
    counter = counters["tlora_fx"]
    if _branch_counts.counter is not counter:
        _branch_counts.counter = counter
        _branch_counts.seen.clear()
        _branch_counts.unowned.clear()
    seen = _seen()
    fresh = {(name, path) for path in paths} - seen
    counter[name] += len(fresh)
    seen |= fresh


def branches_of(model: nn.Module) -> tuple[int, int]:
    """Numbers of a model's branches that were lowered and that were left, each branch once."""
    seen = [name for name, _ in _branch_counts.seen.get(model, ())]
    return seen.count("branches_lowered"), seen.count("branches_left")


def _seen() -> set[tuple[str, str]]:
    outermost = running_modules()[-1:]
    if outermost:
        model = getattr(outermost[0], "_orig_mod", outermost[0])
        return _branch_counts.seen.setdefault(model, set())
    compiled = CompileContext.current_compile_id()
    return _branch_counts.unowned.setdefault(compiled and compiled.frame_id, set())


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `torch.compile(model, backend="tlora-fx", options=...)`.

    strict     raise BackendUnsupported where a LoRA branch cannot be lowered
    compute    "float32": adapters are multiplied in the dtype that PEFT gives them, which is
               float32 unless told otherwise; "base": in the base's dtype
    passes     group passes that run behind lower-adapters, as text or objects, or both in a list:
               what they make of the lowered sites is compiled
    inductor   options of Inductor, by Inductor's names
    """

    strict: bool = False
    compute: Literal["float32", "base"] = "float32"
    passes: Pipeline | None = None
    inductor: dict[str, Any] = field(default_factory=dict)


OWN = tuple(item.name for item in fields(Options) if item.name != "inductor")


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """The options of one compilation.

    mode      a mode of torch.compile, such as "max-autotune": Inductor's options under one name
    raises    BackendOptionError for what neither knows, and for values of a wrong type
    """
    own: dict[str, Any] = {}
    inductor = _of_mode(mode)
    for name, value in (options or {}).items():
        if name in OWN:
            own[name] = _checked(name, value)
        else:
            inductor[_inductor_name(name, value)] = value
    return Options(**own, inductor=inductor)


def _of_mode(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    modes = cast("dict[str, dict[str, Any]]", list_mode_options())
    if mode is None:
        return {}
    if mode not in modes:
        raise BackendOptionError(
            f"there is no mode '{mode}'",
            nearest=nearest(mode, modes),
            help="modes: " + ", ".join(modes),
        )
    return dict(modes[mode])


def _checked(name: str, value: Any) -> Any:
    if name == "strict" and not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    if name == "compute" and value not in COMPUTE:
        raise _wrong(name, " or ".join(COMPUTE), value)
    return _passes(value) if name == "passes" else value


def _passes(value: Any) -> Pipeline:
    """Passes by name, or as objects; raises PipelineError for names that nobody knows."""
    find_passes()
    found: list[Pass] = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        held = [*PASSES_BEFORE, *(each.name for each in found)]
        found += parse_pipeline(item, held).passes if isinstance(item, str) else [item]
    if wrong := [item for item in found if not isinstance(item, GroupPass)]:
        raise _wrong("passes", "group passes, as text or objects", wrong[0])
    return checked(found, PASSES_BEFORE)


def _inductor_name(name: str, value: Any) -> str:
    """An option of Inductor as Inductor spells it, its value checked."""
    from torch._inductor import config

    known: dict[str, Any] = config.get_config_copy()
    key = name.replace("-", "_")
    if key not in known:
        raise BackendOptionError(
            f"there is no option '{name}'",
            # One of our few options where it comes near, else one of Inductor's hundreds.
            nearest=nearest(name, OWN) or nearest(name, known),
            help=f"own options: {', '.join(OWN)}; all others are Inductor's, as "
            "torch._inductor.list_options() lists them",
        )
    usual = known[key]
    plain = isinstance(usual, (bool, int, float, str))
    if plain and not isinstance(value, type(usual)):
        raise _wrong(name, type(usual).__name__, value)
    return key


def _wrong(name: str, expected: str, value: Any) -> BackendOptionError:
    return BackendOptionError(
        f"wrong value of option '{name}'", expected=expected, found=repr(value)
    )


class BackendWarning(UserWarning):
    """The tlora-fx backend leaves something to Inductor as it is."""


def say(text: str) -> None:
    """Warn once a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, BackendWarning, stacklevel=2)


def forget() -> None:
    """Say everything again that was said before."""
    _said.clear()


def _is_piece(gm: fx.GraphModule) -> bool:
    """Whether a graph without branches is one of several of a model that may have them."""
    if getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False):
        return True
    return any(has_active_branch(model) for model in running_modules()[-1:])


def reasons(left: Iterable[Left]) -> str:
    """Each reason with the number of branches that it stops and the first of them."""
    places: dict[str, list[str]] = {}
    for item in left:
        places.setdefault(item.reason, []).append(item.path)
    number = Counter({reason: len(paths) for reason, paths in places.items()})
    return "; ".join(
        f"{reason} ({times}: {', '.join(places[reason][:SHOWN])}{', ...' * (times > SHOWN)})"
        for reason, times in number.most_common()
    )
