"""Sets of rewrites, applied until none fits any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tlora_fx.errors import RewritesEndless
from tlora_fx.rewriting.matching import Match, match
from tlora_fx.rewriting.patterns import Pattern
from tlora_fx.rewriting.rewriter import Build, Rewriter

#: Rewrites of one node's place, beyond which a set of rules is taken to go in circles.
MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """Pattern, and what replaces it.

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
                found = match(rule.pattern, node, given)
                if not isinstance(found, Match):
                    continue
                if rewriter.replace(found, rule.build(found), _told(rule, node)) is None:
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


def _may_fit(rule: RewriteRule, node: fx.Node) -> bool:
    targets = rule.pattern.targets()
    return targets is None or (node.op == "call_function" and node.target in targets)


def _told(rule: RewriteRule, node: fx.Node) -> str:
    return f"{rule.name} at {node.name}" if rule.name else ""
