"""Which processes stand behind the names that tensor-parallel graphs use for their groups.

A graph is the same in every process: it says "tp". Each process says once which group that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.errors import TensorGroupMissing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The name that graphs use for the processes that hold pieces of one matrix.
GROUP = "tp"


@dataclass(frozen=True, slots=True)
class GroupRank:
    """This process in a group.

    name   torch's name of the group
    rank   of this process in it
    size   how many processes it has
    """

    name: str
    rank: int
    size: int


_places: dict[str, GroupRank | None] = {}


def use_group(name: str, group: ProcessGroup | None) -> None:
    """Let a name in graphs stand for a group of processes.

    Compiled code holds the group that was in use when it was compiled.

    group   None, or a group of one process: there is nobody to sum with
    """
    place = None
    if group is not None and group.size() > 1:
        place = GroupRank(str(group.group_name), group.rank(), group.size())
    _places[name] = place


def forget_groups() -> None:
    """Let no name stand for a group any more."""
    _places.clear()


def facts() -> tuple[object, ...]:
    """What compiled code depends on."""
    return tuple(sorted((name, repr(place)) for name, place in _places.items()))


def place_of(name: str, x: Tensor) -> GroupRank | None:
    """This process's place in a group; None where it is alone, and where only shapes count.

    x        what is to be summed
    raises   TensorGroupMissing for real tensors, and for code that is compiled, where nobody said
             which group the name stands for
    """
    if name in _places:
        return _places[name]
    if TracingContext.try_get() is None and (isinstance(x, FakeTensor) or x.is_meta):
        return None
    raise TensorGroupMissing(
        f"no process group stands behind the name '{name}'",
        expected="tlora_fx.ops.use_group before the first step",
        found="a graph whose matrices are cut into pieces",
        help="run the model by a plan (tlora_fx.planners), which names its groups",
    )


def all_reduced(x: Tensor, place: GroupRank, how: str = "sum") -> Tensor:
    """A tensor summed over a group, or its largest values ("max").

    Two operators, so that a compiler may put others between the start and the wait.
    """
    started = torch.ops._c10d_functional.all_reduce.default(x, how, place.name)
    done: Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return done
