"""Store the frozen base in 4 or 8 bits, and multiply with it through the library of the form.

Reads   linears with a frozen matrix, and lowered sites.
Writes  a quantized_linear for each, of what is stored instead of the matrix, or with products in
        float8 a float8_linear, and one float8_rows for all that read one value; behind that of a
        lowered site the multi_lora_add of its adapters, which reads what was there before.
Keeps   shapes and dtypes, not numbers: the base is rounded, so losses are others. Adapters multiply
        as before, and so does every matrix that stays: embeddings, the head, small matrices, and
        those that something else reads too, such as a DoRA branch.

It may stand before lower-adapters or anywhere behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import fx

from tlora_fx.errors import BaseRefused, PipelineError
from tlora_fx.ir.graph import GroupGraph, TensorRef, is_call
from tlora_fx.ir.lora_sites import ADD, ONE, LoweredSite, lowered_site, serves_several
from tlora_fx.ir.storage import stored_as
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.ops.float8 import Backward, no_product, product_parts
from tlora_fx.ops.quantized import misfit, require_package, stored_parts
from tlora_fx.passes.lower_adapters import FROZEN
from tlora_fx.pipeline import GroupPass, Numerics, register, rewrite_allowed
from tlora_fx.rewriting import Maker, Match, Rewriter, nearest_match

QUANTIZED = torch.ops.tlora_fx.quantized_linear.default
ROWS = torch.ops.tlora_fx.float8_rows.default
IN_FLOAT8 = torch.ops.tlora_fx.float8_linear.default
TURN = torch.ops.aten.t.default


@register
@dataclass(frozen=True, slots=True)
class QuantizeBase(GroupPass):
    """Store frozen matrices in 4 or 8 bits.

    to         form in which to store matrices: nf4 (bitsandbytes), int8 or float8 (torchao,
               weight-only)
    at_least   smallest matrix to quantise, in elements; smaller ones stay as they are
    products   with to=float8, also multiply in float8: round activations and gradients too, with
               one scale per token
    required   refuse a job whose branch reads a matrix that would be stored, such as DoRA's, not
               leave the matrix as it is for all jobs
    backward   with products=true, how the backward gets the transposed matrix: copy keeps it too,
               one byte more per element; turn transposes it for each product; restore restores the
               matrix and multiplies in the dtype of the activations
    """

    name: ClassVar[str] = "quantize-base"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "no"

    to: Literal["nf4", "int8", "float8"] = "nf4"
    at_least: int = 4096
    products: bool = False
    required: bool = False
    backward: Backward = "copy"

    def run(self, group: GroupGraph) -> None:
        if self.products and self.to != "float8":
            raise PipelineError(
                f"quantize-base{{to={self.to}}} has no products of its own",
                expected="to=float8 with products=true",
                found=f"to={self.to} with products=true",
                help="write to=float8, or leave products out: the library of the form multiplies",
            )
        if not self.products:
            require_package(self.to)
        for where, graph in named_graphs(group):
            # In the graph's order: what the first linear makes of x, those behind it read too.
            candidates = list(_products(graph))[::-1]
            inside = {node for product in candidates for node in product.nodes}
            rounded: dict[fx.Node, list[fx.Node]] = {}
            calls: dict[fx.Node, list[Product]] = {}
            for product in candidates:
                if self._fits(group, where, product, inside):
                    calls.setdefault(product.call, []).append(product)
            for call, products in calls.items():
                paths = ", ".join(f"{where}.{product.path}".strip(".") for product in products)
                if rewrite_allowed(f"{self.to} at {paths}"):
                    self._rewrite(graph, call, products, rounded)
            Rewriter(graph).erase_dead()

    def _fits(self, group: GroupGraph, where: str, product: Product, inside: set[fx.Node]) -> bool:
        """Whether a matrix is stored in the form; a reason that nobody would guess is noted."""
        outer, inner = product.shape
        if outer * inner < self.at_least or outer == group.vocabulary:
            return False
        others = [user for user in product.weight.users if user not in inside]
        form, dtype = (outer, inner), product.ref.dtype
        reason = no_product(form, dtype) if self.products else misfit(self.to, form, dtype)
        path = f"{where}.{product.path}".strip(".")
        if others and self.required and not reason:
            jobs = {job for user in others for job in user.meta["jobs"]}
            raise BaseRefused(
                f"a job reads a matrix of the base that is stored in {self.to}",
                job=", ".join(sorted(jobs)) or None,
                found=f"{', '.join(user.name for user in others)} at {path}",
                help="leave out what reads it, such as use_dora, or leave out quantize",
            )
        if others:
            reason = f"{', '.join(user.name for user in others)} reads its matrix too"
        if reason:
            group.notes.append((self.name, f"{path} is not stored in {self.to}: {reason}"))
        return not reason

    def _rewrite(
        self,
        graph: fx.Graph,
        call: fx.Node,
        products: Sequence[Product],
        rounded: dict[fx.Node, list[fx.Node]],
    ) -> None:
        for product in products:
            _replace(graph, product.result, partial(self._quantised, product, rounded))
        # A site whose matrix stays gets an operator of its own, where it shared one.
        for result in list(call.users) if serves_several(call) else ():
            site = lowered_site(result)
            if site is not None:
                _replace(graph, result, partial(_alone, site))

    def _quantised(
        self, product: Product, rounded: dict[fx.Node, list[fx.Node]], make: Maker
    ) -> fx.Node:
        """What stands in place of a product.

        rounded   by x, its codes and scale, where there are any yet
        """
        weight = product.weight
        shared = make.tagged(**{tag: weight.meta[tag] for tag in ("role", "jobs")}, site="")
        turned = product.turned
        forms = (
            product_parts(self.backward, turned) if self.products else stored_parts(self.to, turned)
        )
        parts = [
            shared.tensor(stored_as(product.ref, form), f"{weight.target}_{self.to}_{name}")
            for name, form in forms
        ]
        maker = make if product.site is None else shared
        if self.products:
            if product.x not in rounded:
                both = shared(ROWS, product.x)
                rounded[product.x] = [shared(operator.getitem, both, index) for index in (0, 1)]
            made = maker(
                IN_FLOAT8, product.x, *rounded[product.x], parts, product.bias, self.backward
            )
        else:
            made = maker(QUANTIZED, product.x, parts, product.bias, self.to, list(product.shape))
        if product.site is None:
            return made
        if "axis" in product.result.meta:
            made.meta["axis"] = product.result.meta["axis"]
        given = dict(product.site.arguments)
        for name in ("x", "weight", "bias"):
            del given[name]
        return make(ADD, made, product.x, *given.values())


@dataclass(frozen=True, slots=True)
class Product:
    """x Wᵀ + bias with a frozen matrix, alone or with the adapters of a lowered site.

    result   the node that holds it
    call     the operator that computes it, which may compute others too
    nodes    all that it is made of
    turned   the matrix is stored [in, out], as GPT-2's Conv1D has it
    """

    result: fx.Node
    call: fx.Node
    nodes: frozenset[fx.Node]
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool
    site: LoweredSite | None = None

    @property
    def ref(self) -> TensorRef:
        """The matrix as the base has it."""
        ref: TensorRef = self.weight.meta["tensor"]
        return ref

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        first, second = self.ref.shape
        return (second, first) if self.turned else (first, second)

    @property
    def path(self) -> str:
        """The module that computes it."""
        return str(self.result.meta.get("path") or "")


def _products(graph: fx.Graph) -> Iterator[Product]:
    """All products of a graph; one that is part of another, larger one is not told apart."""
    inside: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not node.users or node in inside:
            continue
        product = _lowered_product(node) or _plain_product(node)
        if product is not None and _is_frozen(product):
            inside |= product.nodes
            yield product


def _lowered_product(node: fx.Node) -> Product | None:
    site = lowered_site(node)
    if site is None or is_call(node, ADD):
        return None
    x, weight, bias = (site.arguments[name] for name in ("x", "weight", "bias"))
    turned = is_call(weight, TURN)
    whole = weight.args[0] if turned else weight
    nodes = frozenset({node, site.call, weight})
    return Product(node, site.call, nodes, x, whole, bias, turned, site)


def _plain_product(node: fx.Node) -> Product | None:
    matched = nearest_match(list(FROZEN.values()), node)
    if not isinstance(matched, Match):
        return None
    turned = matched.pattern is FROZEN["Conv1D"]
    bias = matched.captures.get("bias")
    return Product(
        node, node, frozenset(matched.nodes), matched["x"], matched["weight"], bias, turned
    )


def _is_frozen(product: Product) -> bool:
    """Whether matrix and bias are the base's, as it has them."""
    refs = [node.meta.get("tensor") for node in (product.weight, product.bias) if node is not None]
    return all(
        isinstance(ref, TensorRef) and ref.owner == "base" and not ref.originals for ref in refs
    )


def _alone(site: LoweredSite, make: Maker) -> fx.Node:
    return make(ONE, *site.arguments.values())


def _replace(graph: fx.Graph, old: fx.Node, build: Callable[[Maker], fx.Node]) -> None:
    new = build(Rewriter(graph).at(old))
    for tag in ("axis", "branches"):
        if tag in old.meta:
            new.meta[tag] = old.meta[tag]
    old.replace_all_uses_with(new)
    graph.erase_node(old)
