"""Rewrite one graph so that it stays whole.

What a helper makes takes role, jobs, path and source line from what it replaces, says which nodes
it was made from, and has its value at once. Each rewrite counts (`rewrite_allowed`): where a
bisection holds it back, nothing is done and the helper returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tlora_fx.errors import GraphInvalid, RewriteMismatch, RewritesEndless
from tlora_fx.ir.graph import MADE_FROM, ORIGIN, TensorRef, derive
from tlora_fx.ir.shapes import RUN, fake_like, fake_mode_of, give_value, type_text
from tlora_fx.pipeline import rewrite_allowed, watched_rules
from tlora_fx.rewriting.matching import Match, find, match, title
from tlora_fx.rewriting.patterns import Pattern

# What new nodes take from the node that they stand for; "axis" only where the value is the same.
TAGS = ("role", "jobs", "site", "path", "source")
# What belongs to a node itself, and does not go on to one that stands for it.
OWN = ("val", RUN, ORIGIN, MADE_FROM)
Tags = Mapping[str, Any]


class Maker:
    """Makes nodes at one place of a graph: `make(aten.mul.Tensor, x, 2.0)`."""

    def __init__(
        self, graph: fx.Graph, before: fx.Node, tags: Tags, sources: Collection[fx.Node]
    ) -> None:
        self.made: list[fx.Node] = []
        self._graph, self._before = graph, before
        self._tags, self._sources = tags, sources
        self._mode = fake_mode_of(graph)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Call an operator; raises GraphInvalid where it does not take what it is given."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        self._keep(node)
        give_value(node, self._mode)
        return node

    def tensor(self, ref: TensorRef, target: str = "", **meta: Any) -> fx.Node:
        """Read a stored tensor.

        target   where the module has it; by its name where none is given
        meta     what else is known of it, instead of what it takes from the node replaced
        """
        with self._graph.inserting_before(self._before):
            node = self._graph.create_node("get_attr", target or ref.name)
        self._keep(node)
        node.meta.update(tensor=ref, val=fake_like(self._mode, ref.shape, ref.dtype), **meta)
        return node

    def tagged(self, **tags: Any) -> Maker:
        """The same place, for nodes with other tags: `make.tagged(role="table")(op, x)`."""
        other = Maker(self._graph, self._before, {**self._tags, **tags}, self._sources)
        other.made = self.made
        return other

    def _keep(self, node: fx.Node) -> None:
        node.meta.update(self._tags)
        derive(node, *self._sources)
        self.made.append(node)


Build = Callable[[Maker], fx.Node]
BuildSeveral = Callable[[Maker], Sequence[fx.Node]]


class Rewriter:
    """The helpers, for one graph; each raises GraphInvalid for a node of another."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def find(self, pattern: Pattern, given: Mapping[str, Any] | None = None) -> Iterator[Match]:
        """All matches, in the graph's order; each may be replaced before the next is found."""
        return find(self.graph, pattern, given)

    def replace(
        self,
        found: Match | fx.Node,
        build: Build,
        what: str = "",
        tags: Tags | None = None,
        sources: Collection[fx.Node] = (),
    ) -> fx.Node | None:
        """Put another value in place of a node's, or of a match's.

        build     makes the new value, just before the old one: `lambda make: make(op, x)`
        what      the rewrite in words, for bisect
        tags      instead of those of the node replaced
        sources   what else it is made from, besides the match
        returns   the new node; what was matched and nobody reads any more is erased, and so are
                  tensors that only it read
        raises    RewriteMismatch where shape or dtype is another
        """
        node = found.node if isinstance(found, Match) else found
        matched = found.nodes if isinstance(found, Match) else (node,)
        if not rewrite_allowed(what or _told("replace", node)):
            return None
        maker = self._maker(node, node, tags, (*matched, *sources))
        new = build(maker)
        if new in maker.made and "branches" in node.meta:
            new.meta.setdefault("branches", node.meta["branches"])
        _take_over(maker, node, new)
        stored = [each for old in matched for each in old.all_input_nodes if each.op == "get_attr"]
        for old in (*matched, *stored):
            if not old._erased and not old.users and old.op != "placeholder":
                self.graph.erase_node(old)
        return new

    def replace_several(
        self,
        found: Sequence[Match | fx.Node],
        build: BuildSeveral,
        what: str = "",
        tags: Tags | None = None,
    ) -> list[fx.Node] | None:
        """Put other values in place of several at once: one rewrite, with all their origins.

        build     makes a value for each of them, where the first of them stands:
                  `lambda make: [make(getitem, pair := make(op, x), 0), make(getitem, pair, 1)]`
        tags      of what is made besides; each new value has those of the one that it replaces
        returns   the new values in order; None where the rewrite is held back, or where one of the
                  values is made of another, so that no place is before all of them
        raises    RewriteMismatch where a shape or dtype is another, or their number
        """
        matched = [item.nodes if isinstance(item, Match) else (item,) for item in found]
        olds = [item.node if isinstance(item, Match) else item for item in found]
        self._require_own(*olds)
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        first = min(olds, key=order.__getitem__)
        needed = needed_before(first, olds, order)
        if needed is None or not rewrite_allowed(what or _told("replace several, first", first)):
            return None
        for node in needed:
            first.prepend(node)
        sources = dict.fromkeys(node for nodes in matched for node in nodes)
        maker = self._maker(first, first, tags, sources)
        news = list(build(maker))
        _require_as_many(olds, news)
        for old, new, nodes in zip(olds, news, matched, strict=True):
            if new in maker.made:
                kept = {tag: value for tag, value in old.meta.items() if tag not in OWN}
                new.meta.update(kept)
                derive(new, *nodes)
            _take_over(maker, old, new)
        for old in sorted(sources, key=order.__getitem__, reverse=True):
            if not old._erased and not old.users and old.op != "placeholder":
                self.graph.erase_node(old)
        return news

    def insert_after(
        self, node: fx.Node, build: Build, what: str = "", tags: Tags | None = None
    ) -> fx.Node | None:
        """Make all users of a node read a value that is made of it.

        build, what, tags, returns, raises   as of `replace`
        """
        if not rewrite_allowed(what or _told("insert after", node)):
            return None
        maker = self._maker(node, _following(node), tags, (node,))
        new = build(maker)
        _take_over(maker, node, new)
        return new

    def insert_before(
        self,
        node: fx.Node,
        argument: fx.Node,
        build: Build,
        what: str = "",
        tags: Tags | None = None,
    ) -> fx.Node | None:
        """Make one node read a value made of its argument; others read the argument itself.

        build, what, tags, returns, raises   as of `replace`
        """
        if not rewrite_allowed(what or _told("insert before", node)):
            return None
        maker = self._maker(node, node, tags, (argument,))
        new = build(maker)
        _require_type(argument, new)
        node.replace_input_with(argument, new)
        return new

    def bypass(self, node: fx.Node, by: fx.Node, what: str = "") -> bool:
        """Make all users of a node read another one that is there; False where held back.

        raises    RewriteMismatch where shape or dtype is another
        """
        self._require_own(node, by)
        if not rewrite_allowed(what or _told("drop", node)):
            return False
        _require_type(node, by)
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)
        return True

    def at(self, node: fx.Node, tags: Tags | None = None) -> Maker:
        """Make nodes just before another: what is no rewrite by itself, such as a table."""
        return self._maker(node, node, tags, (node,))

    def erase_dead(self) -> int:
        """Erase what nobody reads, inputs aside; returns how many nodes."""
        dead = 0
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
                dead += 1
        return dead

    def _maker(
        self, like: fx.Node, before: fx.Node, tags: Tags | None, sources: Collection[fx.Node]
    ) -> Maker:
        self._require_own(like)
        own = {key: like.meta[key] for key in TAGS if key in like.meta}
        # Inputs and stored tensors belong to no call: what is made of them runs for a reader.
        caller = like if like.meta.get("path") else next(iter(like.users), like)
        near = {key: caller.meta.get(key) or "" for key in ("path", "source")}
        return Maker(self.graph, before, {**near, **own, **(tags or {})}, dict.fromkeys(sources))

    def _require_own(self, *nodes: fx.Node) -> None:
        """Refuse nodes of other graphs, such as of a layer's code; raises GraphInvalid."""
        for node in nodes:
            if node.graph is not self.graph:
                raise GraphInvalid(
                    "a rewriter was given a node of another graph",
                    node=node.format_node(),
                    help="make it of the node's own graph: Rewriter(node.graph)",
                )


def needed_before(
    first: fx.Node, nodes: Collection[fx.Node], order: Mapping[fx.Node, int]
) -> list[fx.Node] | None:
    """Nodes that must move before the first of several, so that all could run there, in order.

    returns   None where one of them reads what another computes
    """
    needed: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in nodes:
                return None
            if source not in needed and order[source] > order[first]:
                needed[source] = None
                stack.append(source)
    return sorted(needed, key=order.__getitem__)


def _require_as_many(olds: Sequence[fx.Node], news: Sequence[fx.Node]) -> None:
    if len(olds) == len(news):
        return
    raise RewriteMismatch(
        "a rewrite puts another number of values in the place of several",
        node=olds[0].format_node(),
        expected=f"{len(olds)} values",
        found=f"{len(news)} values",
        help="return a value for each match, in their order",
    )


def _take_over(maker: Maker, node: fx.Node, new: fx.Node) -> None:
    """Give the readers of a node the new one; what was made for it reads on."""
    _require_type(node, new)
    if "axis" in node.meta:
        new.meta.setdefault("axis", node.meta["axis"])
    own = set(maker.made)
    node.replace_all_uses_with(new, lambda user: user not in own)


def _require_type(old: fx.Node, new: fx.Node) -> None:
    before, after = old.meta.get("val"), new.meta.get("val")
    if _agree(before, after):
        return
    raise RewriteMismatch(
        "a rewrite puts a value of another type in a value's place",
        node=old.format_node(),
        source=old.meta.get("source") or None,
        expected=type_text(before),
        found=f"{type_text(after)} of {new.format_node()}",
        help="cast or reshape the new value",
    )


def _agree(left: Any, right: Any) -> bool:
    """Whether two values are of one type, as far as symbols tell."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right)
    if left.dtype != right.dtype or left.dim() != right.dim():
        return False
    pairs = zip(left.shape, right.shape, strict=True)
    return not any(statically_known_true(here != there) for here, there in pairs)


def _following(node: fx.Node) -> fx.Node:
    """The node before which something stands right after a node; inputs stay together."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _told(verb: str, node: fx.Node) -> str:
    path = node.meta.get("path") or "the root"
    return f"{verb} {node.name} at {path}"


#: Rewrites of one node's place, beyond which a set of rules is taken to go in circles.
MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """A pattern, and its replacement.

    pattern    where it fits
    build      what makes the new value of a match, as `Rewriter.replace` takes it
    benefit    of rules that fit one node, the one of most benefit is taken; of equals the first
    name       of the rewrite in a bisection
    """

    pattern: Pattern
    build: Callable[[Match], Build]
    benefit: int = 1
    name: str = ""


def rewrite_greedily(
    graph: fx.Graph, rules: Sequence[RewriteRule], given: Mapping[str, Any] | None = None
) -> int:
    """Apply rules wherever they fit, again on what they make, until none does.

    given     captures that are known before, as of `match`
    returns   how many rewrites were made
    raises    RewritesEndless for rules that undo each other; RewriteMismatch
    """
    ordered = sorted(rules, key=lambda rule: -rule.benefit)
    rewriter = Rewriter(graph)
    held_back: set[tuple[fx.Node, int]] = set()
    made, most = 0, MAX_ROUNDS * max(len(graph.nodes), 1)
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            if node._erased or not node.users:
                continue
            for index, rule in enumerate(ordered):
                if (node, index) in held_back or not _may_fit(rule, node):
                    continue
                found = match(rule.pattern, node, given, rule.name)
                if not isinstance(found, Match):
                    continue
                if _apply(rewriter, rule, found) is None:
                    held_back.add((node, index))
                    continue
                made, changed = made + 1, True
                break
            if made > most:
                raise RewritesEndless(
                    "rewrites come to no end",
                    node=node.format_node() if not node._erased else None,
                    found=f"{made} rewrites of a graph of {len(graph.nodes)} nodes",
                    help="a rule undoes what another one does: leave one of them out",
                )
    return made


def _apply(rewriter: Rewriter, rule: RewriteRule, found: Match) -> fx.Node | None:
    """Put what a rule makes in place of its match; None where a bisection holds it back."""
    name = f"{rule.name} at {found.node.name}" if rule.name else ""
    rules = watched_rules()
    if rules is None:
        return rewriter.replace(found, rule.build(found), name)
    with rules[rule.name or title(rule.pattern)].timed():
        return rewriter.replace(found, rule.build(found), name)


def _may_fit(rule: RewriteRule, node: fx.Node) -> bool:
    targets = rule.pattern.targets()
    return targets is None or (node.op == "call_function" and node.target in targets)
