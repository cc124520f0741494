"""The lowered sites of a graph, whether each has an operator of its own or shares one.

`multi_lora_linear` serves one site, and its node is the site's result. `multi_lora_linears` serves
sites that read one input, and each site's result is an `operator.getitem` of it. `multi_lora_add`
serves one site whose frozen operator is a node of its own. Each result carries the site's tags:
role, jobs, site, path, branches. Who looks for sites asks here, so that all forms look alike.

An operator of another package that was registered with banks (`ops/job_operator.py`) serves one
site, as `multi_lora_add` does.

`multi_lora_experts` serves a mixture's experts. Its adapters are the jobs' own tensors and lie in
no bank: such a node is lowered and carries the same tags, but it is no `LoweredSite`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import tlora_fx.ops  # noqa: F401  (registers the operators that are named here)
from tlora_fx.ir.graph import arguments_of, is_call
from tlora_fx.ops.job_operator import find_operator

ONE = torch.ops.tlora_fx.multi_lora_linear.default
SEVERAL = torch.ops.tlora_fx.multi_lora_linears.default
ADD = torch.ops.tlora_fx.multi_lora_add.default
EXPERTS = torch.ops.tlora_fx.multi_lora_experts.default
#: Behind a site's result it scales the columns of DoRA's jobs; it takes each job's rows by
#: themselves, and is no site.
SCALE = torch.ops.tlora_fx.dora_scale.default
# What multi_lora_linears takes as lists, an item a site, and what it calls some of them.
LISTED = ("weight", "bias", "a", "b", "ranks", "scales", "rates", "site")
SINGULAR = {"weights": "weight", "biases": "bias", "sites": "site"}


@dataclass(frozen=True, slots=True)
class BranchNumbers:
    """Numbers that compute the branch of one job at a site; its tensors are in the site's bank."""

    rank: int
    scaling: float
    dropout: float


@dataclass(frozen=True, slots=True)
class LoweredSite:
    """One frozen operator with the adapters of its jobs.

    result       the node that holds the site's result
    call         the operator that computes it
    arguments    what multi_lora_linear takes for this site, by name and in its order; of
                 another operator that serves one site, what that takes
    """

    result: fx.Node
    call: fx.Node
    arguments: Mapping[str, Any]

    @property
    def operator(self) -> Any:
        """Operator of a site like this alone: multi_lora_linear where several share one."""
        return ONE if serves_several(self.call) else self.call.target

    @property
    def path(self) -> str:
        """Path of the frozen module; inside a block relative to the layer."""
        return str(self.result.meta["site"])

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that have an adapter here."""
        return tuple(self.result.meta["jobs"])

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the operator reads for this site."""
        return [value for value in self.arguments.values() if isinstance(value, fx.Node)]

    @property
    def branches(self) -> Mapping[str, BranchNumbers]:
        """The branches that the operator stands for, by job."""
        branches: Mapping[str, BranchNumbers] = self.result.meta.get("branches") or {}
        return branches


def lowered_sites(graph: fx.Graph) -> Iterator[LoweredSite]:
    """The lowered sites of a graph, in the order of their results."""
    return (site for node in graph.nodes if (site := lowered_site(node)) is not None)


def lowered_site(node: fx.Node) -> LoweredSite | None:
    """The site whose result a node holds, None where it holds none."""
    registered = find_operator(node.target)
    if is_call(node, ONE, ADD) or (registered is not None and registered.banks):
        return LoweredSite(node, node, lowered_arguments(node))
    if not is_call(node, operator.getitem):
        return None
    call, index = node.args
    if not isinstance(call, fx.Node) or not serves_several(call):
        return None
    shared = lowered_arguments(call)
    own = {name: value[index] if name in LISTED else value for name, value in shared.items()}
    return LoweredSite(node, call, own)


def serves_several(node: fx.Node) -> bool:
    """Whether a node is the operator that several sites share."""
    return is_call(node, SEVERAL)


def is_lowered(node: fx.Node) -> bool:
    """Whether a node takes each job's rows by themselves, or holds the result of such a one."""
    joins = is_call(node, SCALE) or find_operator(node.target) is not None
    return joins or serves_several(node) or is_adapted(node)


def is_adapted(node: fx.Node) -> bool:
    """Whether a node holds a module's result with the lowered adapters on it."""
    return is_call(node, EXPERTS) or lowered_site(node) is not None


def lowered_arguments(call: fx.Node) -> dict[str, Any]:
    """Arguments of an operator of lowered sites, by multi_lora_linear's names, defaults too."""
    given = arguments_of(call)
    return {SINGULAR.get(name, name): value for name, value in given.items()}
