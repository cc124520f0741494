"""What the backend tells its user: once each, and as counters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from weakref import WeakSet

from torch import fx, nn
from torch._dynamo.utils import counters

from tlora_fx.backend.lora_regions import Left
from tlora_fx.backend.sites import running_modules

SHOWN = 3
_said: set[str] = set()
_with_branches: WeakSet[nn.Module] = WeakSet()


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
