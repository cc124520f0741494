"""The scheduling policies, one file each.

A policy is a dataclass: its options are its fields, its `name` is what the command line calls it.
`fused` says which kernels it stands for, `graphs` whether rows run as CUDA graphs (they do where
it says nothing): an estimator that it is replayed with should be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import yaml

from tlora_fx.config.plugins import Plugin, load_plugin, plugins_of
from tlora_fx.errors import PolicyOptionWrong, UnknownPolicy, did_you_mean
from tlora_fx.scheduler.state import Policy

_OURS = {
    "tlora": "tlora:Tlora",
    "tlora-paper": "paper:TloraPaper",
    "mlora-fifo": "baselines:MloraFifo",
    "mlora-memory": "baselines:MloraMemory",
    "megatron": "baselines:Megatron",
    "no-scheduler": "baselines:NoScheduler",
    "no-kernel-fuser": "baselines:NoKernelFuser",
    "no-graphs": "baselines:NoGraphs",
    "oracle": "oracle:Oracle",
}

#: What an option may be, by its annotation.
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "bool": ("true or false", bool),
    "int": ("a whole number", int),
    "float": ("a number", (int, float)),
}

#: Names of our policies; the default first.
POLICIES = tuple(_OURS)
ENTRY_POINTS = "tlora_fx.policies"


def find_policy(name: str, **options: Any) -> Policy:
    """A policy by name, with its options.

    raises    UnknownPolicy, PolicyOptionWrong; PluginBroken where another package's cannot be used
    """
    kind = _find(name)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for option in options:
        if option not in fields:
            raise PolicyOptionWrong(
                f"policy '{name}' has no option '{option}'",
                expected=", ".join(fields) or "no options",
                help=did_you_mean(option, fields, "leave it out"),
            )
    _require_kinds(name, {name: field.type for name, field in fields.items()}, options)
    try:
        return cast(Policy, kind(**options))
    except (TypeError, ValueError) as error:
        raise PolicyOptionWrong(
            f"an option of policy '{name}' cannot have this value",
            found=", ".join(f"{key}={value!r}" for key, value in options.items()),
            expected=error,
        ) from None


def policy_of(text: str) -> Policy:
    """A policy as the command line names it: `megatron`, or `megatron:backfill=true`.

    raises    as `find_policy`
    """
    name, _, options = text.partition(":")
    pairs = [pair.partition("=") for pair in options.split(":") if pair]
    try:
        values = {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
    except yaml.YAMLError:
        raise PolicyOptionWrong(
            f"the options of policy '{name}' cannot be read",
            expected="NAME:OPTION=VALUE, such as megatron:backfill=true",
            found=text,
        ) from None
    return find_policy(name, **values)


def _require_kinds(name: str, kinds: Mapping[str, object], options: Mapping[str, Any]) -> None:
    """Refuse values of another kind than their options have."""
    for option, value in options.items():
        kind = getattr(kinds[option], "__name__", str(kinds[option]))
        words, allowed = _KINDS.get(kind, ("", object))
        number = isinstance(value, bool) and kind != "bool"
        if words and (number or not isinstance(value, allowed) or value != value):  # noqa: PLR0124
            raise PolicyOptionWrong(
                f"option '{option}' of policy '{name}' cannot have this value",
                expected=words,
                found=repr(value),
            )


def _find(name: str) -> type[Any]:
    """The class of a policy; raises UnknownPolicy, PluginBroken."""
    if name in _OURS:
        module, _, kind = _OURS[name].partition(":")
        ours: type[Any] = getattr(import_module(f"{__name__}.{module}"), kind)
        return ours
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        plugin = load_policy(others[name])
        if plugin.found is None:
            raise plugin.error(f"policy '{name}'")
        theirs: type[Any] = plugin.found
        return theirs
    known = [*_OURS, *others]
    raise UnknownPolicy(
        f"there is no policy '{name}'",
        expected=", ".join(known),
        help=did_you_mean(name, known, "choose one of these"),
    )


def plugin_policies() -> list[Plugin]:
    """The policies of other packages, broken ones too, by name."""
    return plugins_of(ENTRY_POINTS, load_policy)


def load_policy(entry: EntryPoint) -> Plugin:
    """Import what an entry point names; never raises."""
    plugin = load_plugin(entry)
    if plugin.found is None:
        return plugin
    if not dataclasses.is_dataclass(plugin.found):
        why = f"{entry.value} is no dataclass"
    elif not callable(getattr(plugin.found, "decide", None)):
        why = f"{entry.value} has no method decide(state, *, explain)"
    else:
        return plugin
    return dataclasses.replace(plugin, found=None, broken=why)
