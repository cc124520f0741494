"""Put a lowered site back into Dynamo's graph, with the tables that the operator reads.

Tables are buffers of the graph module, or inputs where Dynamo made a scaling or rate one, so that a
compiled graph serves every scaling and rate. Their names carry a hash of the operators' sources, so
that no cache hands out what an older version compiled. Segments of one unit cover any number of
tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.backend.lora_regions import Lowered, Program
from tlora_fx.backend.sites import tensor_of
from tlora_fx.host.sources import own_source
from tlora_fx.ops import site_id

aten = torch.ops.aten
ops = torch.ops.tlora_fx
SOURCES = ("ops", "codegen")
WORDS = 2**32
PREFIX = "tlora_fx_"


def declare_tables(root: fx.GraphModule) -> None:
    """Tell torch where the tables of a graph and of its regions come from: from us.

    AOTAutograd wants a source for every tensor that a graph of Dynamo holds, to find tensors that
    come in twice.
    """
    known: dict[str, Any] | None = getattr(root, "_param_name_to_source", None)
    if known is None:
        return
    from torch._dynamo.source import ConstantSource

    for name, _ in root.named_buffers():
        if name.rpartition(".")[2].startswith(PREFIX):
            known.setdefault(name, ConstantSource(name))


class SiteRewriter:
    """Lowers sites of one graph module, in the order in which they run."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.made: dict[Any, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[str, dict[str, fx.Node | None]] = {}

    def replace(self, site: Lowered) -> None:
        """Replace a site's calls by one operator, or by what passes made of it."""
        with self.graph.inserting_before(site.result):
            if site.program is None:
                args = (*self._inputs(site).values(), site.compute, *_rank_and_drops(site))
                lowered = self.graph.call_function(ops.multi_lora_linear.default, args)
            else:
                lowered = self._copied(site.program.result, site.program)
        lowered.meta = dict(site.result.meta)
        site.result.replace_all_uses_with(lowered)
        numbers = [n for n in (site.scaling, site.dropout) if isinstance(n, fx.Node)]
        for node in dict.fromkeys([*reversed(site.calls.nodes), *numbers]):
            if not node.users:
                self.graph.erase_node(node)

    def _inputs(self, site: Lowered) -> dict[str, fx.Node | None]:
        """What the operator reads, by its names and in its order."""
        x, weight = (self._cast(node, site.autocast) for node in (site.x, site.weight))
        bias = site.bias and self._cast(site.bias, site.autocast)
        weight = self._transposed(weight) if site.transposed else weight
        adapters = {"a": site.a, "b": self._transposed(site.b)}
        names = ("ranks", "scales", "rates", "segments", "keys", "token_index", "site")
        tables = dict(zip(names, self._tables(site), strict=True))
        return {"x": x, "weight": weight, "bias": bias, **adapters, **tables}

    def _copied(self, node: fx.Node, program: Program) -> fx.Node:
        """A node that passes made, in this graph; what sites share is copied once."""
        if node not in self.copies:
            if node in program.inputs:
                name, site = program.inputs[node]
                copy = self._inputs_once(site)[name]
                assert copy is not None
            else:
                copy = self.graph.node_copy(node, lambda read: self._copied(read, program))
                copy.meta = {"example_value": node.meta["val"]}
            self.copies[node] = copy
        return self.copies[node]

    def _inputs_once(self, site: Lowered) -> dict[str, fx.Node | None]:
        if site.calls.path not in self.inputs:
            self.inputs[site.calls.path] = self._inputs(site)
        return self.inputs[site.calls.path]

    def _tables(self, site: Lowered) -> list[fx.Node]:
        """The operator's tables, from ranks to site, in the order in which it takes them."""
        small = torch.int32
        rank, drops = _rank_and_drops(site)
        number = site_id(site.calls.path) if drops else 0
        return [
            self._table("ranks", torch.tensor([0, rank], dtype=small)),
            self._number("scales", site.scaling),
            self._number("rates", site.dropout),
            self._table("segments", torch.tensor([0, 1], dtype=small)),
            self._keys() if drops else self._table("keys", torch.zeros(1, 2, dtype=torch.int64)),
            self._token_index(tensor_of(site.x), site.x)
            if drops
            else self._table("token_index", torch.zeros(0, dtype=small)),
            self._table("site", torch.tensor(number, dtype=torch.int64)),
        ]

    def _number(self, name: str, number: float | fx.Node) -> fx.Node:
        """A table of one number, float64 [1]: a buffer, or an input of Dynamo's graph."""
        if not isinstance(number, fx.Node):
            return self._table(name, torch.tensor([number], dtype=torch.float64))
        source: Any = number.args[0]
        return self._call(torch.reshape, (source, (1,)), tensor_of(source).reshape(1))

    def _call(self, target: Any, args: tuple[Any, ...], value: Any, **kwargs: Any) -> fx.Node:
        """A call of a function, or of a method by its name, with the value that it gives."""
        op = "call_method" if isinstance(target, str) else "call_function"
        call = self.graph.create_node(op, target, args, kwargs)
        call.meta["example_value"] = value
        return call

    def _once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _table(self, name: str, value: Tensor) -> fx.Node:
        """A buffer that holds a table; equal tables are one."""

        def make() -> fx.Node:
            attribute = f"{PREFIX}{own_source(*SOURCES)[:12]}_{name}_{len(self.made)}"
            # Persistent, because AOTAutograd's cache key holds the set of names that are not, whose
            # order differs in every process.
            self.module.register_buffer(attribute, value, persistent=True)
            first = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(first):
                table = self.graph.get_attr(attribute)
            table.meta["example_value"] = value
            return table

        return self._once((name, tuple(value.flatten().tolist())), make)

    def _keys(self) -> fx.Node:
        """One draw of torch's generator a forward, from which all masks follow."""
        value = torch.empty(1, 2, dtype=torch.int64, device="meta")
        return self._once("keys", lambda: self._call(torch.randint, (0, WORDS, (1, 2)), value))

    def _token_index(self, value: Tensor, x: fx.Node) -> fx.Node:
        """The number of each token, int32 [tokens]."""
        leading = value.shape[:-1]

        def make() -> fx.Node:
            count: Any = 1
            for dimension, size in enumerate(leading):
                known = size
                if not isinstance(size, int):
                    known = self._call("size", (x, dimension), size)
                count = self._product(count, known)
            index = value.new_empty(leading.numel(), dtype=torch.int32)
            kind: Any = {"dtype": torch.int32, "device": value.device}
            return self._call(torch.arange, (count,), index, **kind)

        return self._once(("token_index", str(leading), value.device), make)

    def _product(self, left: Any, right: Any) -> Any:
        if not isinstance(left, fx.Node) and not isinstance(right, fx.Node):
            return left * right
        if not isinstance(left, fx.Node) and left == 1:
            return right
        one, other = (
            item.meta["example_value"] if isinstance(item, fx.Node) else item
            for item in (left, right)
        )
        return self._call(operator.mul, (left, right), one * other)

    def _cast(self, value: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """A value as autocast hands it to a product."""
        tensor = tensor_of(value)
        if dtype is None or tensor.dtype == dtype:
            return value
        key = ("cast", value, dtype)
        return self._once(key, lambda: self._call("to", (value, dtype), tensor.to(dtype)))

    def _transposed(self, matrix: fx.Node) -> fx.Node:
        value = tensor_of(matrix).t()
        return self._once(("t", matrix), lambda: self._call(aten.t.default, (matrix,), value))


def _rank_and_drops(site: Lowered) -> tuple[int, bool]:
    """A site's rank, and whether it drops or may drop in some run."""
    drops = isinstance(site.dropout, fx.Node) or site.dropout > 0
    return int(tensor_of(site.a).shape[0]), drops
