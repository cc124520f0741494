"""Calls of our operators that read tables of jobs on the host of a GPU.

A CUDA graph would keep for all rows what a table says while it is captured, so `check_table`
refuses to be captured, and a model with one such call runs no row as a graph. This says so of a
call that nobody runs: for what is predicted, and before anything is captured. Every operator whose
code can come to `check_table` stands here; a test compares this with the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tlora_fx.host.environment import kernel_mode
from tlora_fx.ops.attention import has_row_kernel
from tlora_fx.ops.attention_rule import AttentionRule
from tlora_fx.ops.dora import has_kernels
from tlora_fx.ops.expert_lora import Call, why_no_kernel
from tlora_fx.ops.kernels import support
from tlora_fx.ops.tables import SiteGroup

#: What a group of sites has an item of for each, by the singular name.
LISTS = {"weight": "weights", "site": "sites"} | {
    name: name for name in ("a", "b", "ranks", "scales", "rates")
}
SHARED = ("segments", "keys", "token_index", "compute_dtype", "max_rank", "drops")
#: Whether a call reads a table, of its arguments by the schema's names; tensors may be fake.
Rule = Callable[[Mapping[str, Any]], bool]


def reads_on_host(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `tlora_fx::name` on a GPU reads a table of jobs on the host.

    arguments   by the schema's names; a tensor may be fake and on any device, for its dtype,
                sizes and strides are all that counts
    """
    rule = RULES.get(name)
    return rule is not None and rule(arguments)


def _always(_: Mapping[str, Any]) -> bool:
    """What takes a row apart by jobs needs sizes."""
    return True


def _never(_: Mapping[str, Any]) -> bool:
    """On CUDA it reads its offsets on the device."""
    return False


def _written_out(arguments: Mapping[str, Any]) -> bool:
    """Attention without a kernel for whole rows goes from sequence to sequence."""
    rule = AttentionRule(**{each.name: arguments[each.name] for each in fields(AttentionRule)})
    return not has_row_kernel(arguments["q"], arguments["v"], arguments["sinks"], rule)


def _one_by_one(arguments: Mapping[str, Any]) -> bool:
    """Adapters without kernels run job by job."""
    asked = kernel_mode()
    if asked == "off":
        return True
    x = arguments["gate"] if "gate" in arguments else arguments["x"]
    lists: dict[str, Any] = {name: _list(arguments, singular) for singular, name in LISTS.items()}
    group = SiteGroup(**lists, **{name: arguments[name] for name in SHARED})
    return bool(support.why_no_kernel(x, group, "on" if asked == "on" else "auto"))


def _without_kernels(arguments: Mapping[str, Any]) -> bool:
    """Adapters of experts without kernels run job by job, too."""
    asked = kernel_mode()
    call = Call(**{field.name: arguments[field.name] for field in fields(Call)})
    return asked == "off" or bool(why_no_kernel(call, "auto"))


def _list(arguments: Mapping[str, Any], name: str) -> list[Any]:
    """An item a site, whether the operator serves one, several, or one without its weight."""
    items = arguments.get(name, arguments.get(f"{name}s", []))
    return list(items) if isinstance(items, list | tuple) else [items]


def _scaled_by_torch(arguments: Mapping[str, Any]) -> bool:
    """DoRA's columns without kernels are scaled job by job."""
    like, others = arguments["y"], (arguments["weight"], arguments["a"])
    return not support.has_triton() or not has_kernels(like.dtype, *(each.dtype for each in others))


RULES: Mapping[str, Rule] = {
    "segment_read": _always,
    "segment_write": _always,
    "segment_switch": _always,
    "keyed_dropout": _always,
    "embedding_noise": _always,
    "nano_tables": _always,
    "packed_attention": _written_out,
    "multi_lora_linear": _one_by_one,
    "multi_lora_linears": _one_by_one,
    "multi_lora_gated_linear": _one_by_one,
    "multi_lora_add": _one_by_one,
    "multi_lora_experts": _without_kernels,
    "dora_scale": _scaled_by_torch,
    "segment_sum": _never,
    "segment_spread": _never,
}
