"""The scheduling policies, one file each.

A policy is a dataclass: its options are its fields, its `name` is what the command line calls it.
`fused` says which kernels it stands for: an estimator that it is replayed with should be told.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from tlora_fx.errors import PolicyOptionWrong, UnknownPolicy, nearest
from tlora_fx.scheduler.state import Policy

_OURS = {
    "tlora": "tlora:Tlora",
    "tlora-paper": "tlora_paper:TloraPaper",
    "mlora-fifo": "mlora_fifo:MloraFifo",
    "mlora-memory": "mlora_memory:MloraMemory",
    "megatron": "megatron:Megatron",
    "no-scheduler": "no_scheduler:NoScheduler",
    "no-kernel-fuser": "no_kernel_fuser:NoKernelFuser",
    "oracle": "oracle:Oracle",
}

#: Names of our policies; the default first.
POLICIES = tuple(_OURS)
ENTRY_POINTS = "tlora_fx.policies"


def find_policy(name: str, **options: Any) -> Policy:
    """A policy by name, with its options.

    raises   UnknownPolicy, PolicyOptionWrong
    """
    kind = _find(name)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for option in options:
        if option not in fields:
            near = nearest(option, fields)
            raise PolicyOptionWrong(
                f"policy '{name}' has no option '{option}'",
                expected=", ".join(fields) or "no options",
                help=f"did you mean '{near}'?" if near else "leave it out",
            )
    try:
        return cast(Policy, kind(**options))
    except (TypeError, ValueError) as error:
        raise PolicyOptionWrong(
            f"an option of policy '{name}' cannot have this value",
            found=", ".join(f"{key}={value!r}" for key, value in options.items()),
            expected=error,
        ) from None


def _find(name: str) -> Any:
    """The class of a policy, ours or another's."""
    if name in _OURS:
        module, _, kind = _OURS[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), kind)
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        return others[name].load()
    known = [*_OURS, *others]
    near = nearest(name, known)
    raise UnknownPolicy(
        f"there is no policy '{name}'",
        expected=", ".join(known),
        help=f"did you mean '{near}'?" if near else "choose one of these",
    )
