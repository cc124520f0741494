"""The options of the backend: its own few, and Inductor's by their own names."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast
from weakref import WeakSet

from torch import fx, nn
from torch._dynamo.utils import counters

from tlora_fx.backend.lora_regions import Left
from tlora_fx.backend.sites import running_modules
from tlora_fx.errors import BackendOptionError, nearest

COMPUTE = ("float32", "base")
SHOWN = 3
_said: set[str] = set()
_with_branches: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class Options:
    """What `torch.compile(model, backend="tlora-fx", options=...)` may say.

    strict     raise BackendUnsupported where a LoRA branch cannot be lowered
    compute    "float32": adapters are multiplied in the dtype that PEFT gives them, which is
               float32 unless told otherwise; "base": in the base's dtype
    inductor   options of Inductor, by Inductor's names
    """

    strict: bool = False
    compute: Literal["float32", "base"] = "float32"
    inductor: dict[str, Any] = field(default_factory=dict)


OWN = tuple(item.name for item in fields(Options) if item.name != "inductor")


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """The options of one compilation.

    mode      a mode of torch.compile, such as "max-autotune": Inductor's options under one name
    options   our own options and Inductor's
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
    return value


def _inductor_name(name: str, value: Any) -> str:
    """An option of Inductor as Inductor spells it, its value checked."""
    from torch._inductor import config

    known: dict[str, Any] = config.get_config_copy()
    key = name.replace("-", "_")
    if key not in known:
        raise BackendOptionError(
            f"there is no option '{name}'",
            nearest=_nearest_option(name, known),
            help=f"own options: {', '.join(OWN)}; all others are Inductor's, as "
            "torch._inductor.list_options() lists them",
        )
    usual = known[key]
    plain = isinstance(usual, (bool, int, float, str))
    if plain and not isinstance(value, type(usual)):
        raise _wrong(name, type(usual).__name__, value)
    return key


def _nearest_option(name: str, known: Iterable[str]) -> str | None:
    """One of our few options where it comes near, else one of Inductor's hundreds."""
    return nearest(name, OWN) or nearest(name, known)


def _wrong(name: str, expected: str, value: Any) -> BackendOptionError:
    return BackendOptionError(
        f"wrong value of option '{name}'",
        expected=expected,
        found=repr(value),
    )


# What the backend tells its user: once each, and as counters.


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
    _with_branches.clear()


def belongs_to_branches(gm: fx.GraphModule, found: int) -> bool:
    """Whether the model of a graph has branches, or may have them after the graph break.

    found   branches in this graph
    """
    outermost = running_modules()[-1:]
    if found:
        _with_branches.update(outermost)
    cut = getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False)
    return cut or any(model in _with_branches for model in outermost)


def count(lowered: int, left: int) -> None:
    """Add to `torch._dynamo.utils.counters["tlora_fx"]`."""
    counters["tlora_fx"]["branches_lowered"] += lowered
    counters["tlora_fx"]["branches_left"] += left


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
